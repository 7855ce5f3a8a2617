//go:build !unix

package sandbox

import "os"

// Signals returns the signals that a caller forwards to its program instead of ending by them.
func Signals() []os.Signal { return []os.Signal{os.Interrupt} }
