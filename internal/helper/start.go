package helper

import "io"

// StartConfig configures Start.
type StartConfig struct {
	// Executable is this program's absolute path. `EXECUTABLE helper` must call Main.
	Executable string
	// Sudo is the path of sudo; empty: the first in PATH. Root does not use it.
	Sudo string
	// Stderr receives the messages of sudo, which the error also contains. The prompt of sudo goes to the terminal.
	// Nil: discard them.
	Stderr io.Writer
}
