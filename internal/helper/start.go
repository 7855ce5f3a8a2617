package helper

import "io"

// StartConfig configures Start.
type StartConfig struct {
	// Executable is this program's absolute path. `EXECUTABLE helper` must call Main.
	Executable string
	// Sudo is the path of sudo; empty: the first in PATH. Root does not use it.
	Sudo string
	// Stderr gets sudo's own messages, which the error contains too. Its prompt goes to the terminal. Default: nothing
	// is written.
	Stderr io.Writer
}
