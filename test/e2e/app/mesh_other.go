//go:build !linux

package main

import (
	"context"
	"errors"
)

func runMesh(context.Context) error { return errors.ErrUnsupported }
