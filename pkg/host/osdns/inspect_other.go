//go:build !linux

package osdns

import (
	"errors"
	"fmt"
	"runtime"
)

// Inspect is not implemented on this operating system.
func Inspect(Options, error) (Inspection, error) {
	return Inspection{}, fmt.Errorf("looking at name resolution: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}
