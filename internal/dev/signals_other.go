//go:build !unix

package dev

import "os"

// programs are the signals that are the program's, not this process's.
func programs() []os.Signal { return []os.Signal{os.Interrupt} }
