package helper

import "io"

// StartConfig configures Start.
type StartConfig struct {
	// Executable is this program's absolute path. `EXECUTABLE helper` must call Main.
	Executable string
	// Service is the path of the socket of the service; empty: do not use it. Root does not use it.
	Service string
	// Stderr receives the messages of sudo, which the error also contains. The prompt of sudo goes to the terminal.
	// Nil: discard them.
	Stderr io.Writer
	// Announce is called with a line for the user before sudo may ask for a password, or once the service is ready.
	// Nil: discard it.
	Announce func(line string)
}
