//go:build !linux

package route

import (
	"errors"
	"fmt"
	"runtime"
)

// Tunnels is not implemented on this operating system.
func Tunnels() ([]Tunnel, error) {
	return nil, fmt.Errorf("looking at other VPNs: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}
