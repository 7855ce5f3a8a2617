//go:build !linux

package docker

import (
	"context"
	"errors"
	"runtime"
)

// errElsewhere returns the error for systems on which engines run in a virtual machine.
func errElsewhere() error {
	return noEngine("use a Linux machine", "--docker needs an engine on a Linux machine, and this is %s: %w",
		runtime.GOOS, errors.ErrUnsupported)
}

// Run is not implemented on this operating system.
func Run(context.Context, Config) (int, error) { return 0, errElsewhere() }

// runProgram is not implemented on this operating system.
func runProgram() (int, error) { return 0, errElsewhere() }

// runNetwork is not implemented on this operating system.
func runNetwork() error { return errElsewhere() }
