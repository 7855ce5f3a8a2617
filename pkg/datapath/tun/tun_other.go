//go:build !linux && !darwin

package tun

import (
	"fmt"
	"os"
	"runtime"
)

// GSO is the result of [Device.GSO] for every device on this operating system.
const GSO = false

// Create is not implemented on this operating system.
func Create(name string, mtu int) (*os.File, error) { return nil, notImplemented() }

// Adopt is not implemented on this operating system.
func Adopt(f *os.File, name string, mtu int) (Device, error) {
	f.Close()
	return nil, notImplemented()
}

func notImplemented() error { return fmt.Errorf("%w: not implemented on %s", ErrNoTUN, runtime.GOOS) }
