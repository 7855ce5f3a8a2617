//go:build !linux && !darwin && !windows

package tun

import (
	"fmt"
	"os"
	"runtime"
)

// GSO is what [Device.GSO] says of every device on this system, for who has to say it before there is one.
const GSO = false

// Create is not implemented on this operating system.
func Create(name string, mtu int) (*os.File, error) { return nil, errNotHere() }

// Adopt is not implemented on this operating system.
func Adopt(f *os.File, name string, mtu int) (Device, error) {
	f.Close()
	return nil, errNotHere()
}

// Open is not implemented on this operating system.
func Open(name string, mtu int) (Device, error) { return nil, errNotHere() }

func errNotHere() error { return fmt.Errorf("%w: not implemented on %s", ErrNoTUN, runtime.GOOS) }
