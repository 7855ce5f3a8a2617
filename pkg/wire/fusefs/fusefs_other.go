//go:build !linux

package fusefs

import (
	"errors"
	"os"

	"kubevpn/pkg/wire/remotefs"
)

// Serve is not implemented on this operating system.
func Serve(*os.File, *remotefs.Client) error { return errors.ErrUnsupported }
