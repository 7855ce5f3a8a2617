package tun

import (
	"errors"
	"fmt"
	"os"

	wg "golang.zx2c4.com/wireguard/tun"
)

var errNoFile = errors.New("a TUN device on Windows has no file to pass to another process; use Open")

// Create is not possible on Windows: a Wintun adapter has no file.
func Create(name string, mtu int) (*os.File, error) { return nil, errNoFile }

// Adopt is not possible on Windows: a Wintun adapter has no file.
func Adopt(f *os.File, name string, mtu int) (Device, error) {
	f.Close()
	return nil, errNoFile
}

// Open creates the TUN interface name with the given MTU. It requires an administrator and wintun.dll.
func Open(name string, mtu int) (Device, error) {
	tun, err := wg.CreateTUN(name, mtu)
	if err != nil {
		return nil, fmt.Errorf("creating interface %s: %w", name, err)
	}
	return newDevice(tun, mtu)
}
