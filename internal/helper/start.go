package helper

import "io"

// StartConfig says how to start the helper process.
type StartConfig struct {
	// Executable is this program's absolute path; it is run as `EXECUTABLE helper`, which must call Main.
	Executable string
	// Sudo is the sudo to run it with; empty: the first in PATH. It is not used by root.
	Sudo string
	// Stderr is where sudo's own messages go, besides the error. Its prompt goes to the terminal. Default:
	// nowhere.
	Stderr io.Writer
}
