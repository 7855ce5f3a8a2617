//go:build !linux

package main

import (
	"context"
	"errors"
)

func runMesh(context.Context, string, string) error { return errors.ErrUnsupported }
