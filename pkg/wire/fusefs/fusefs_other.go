//go:build !linux

package fusefs

import (
	"context"
	"errors"
	"os"

	"kubevpn/pkg/wire/remotefs"
)

// Serve is not implemented on this operating system.
func Serve(context.Context, *os.File, *remotefs.Client) error { return errors.ErrUnsupported }
