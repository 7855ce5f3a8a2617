package admin

import "os"

// takeStdout returns standard output. On Windows a write whose reader has ended is an error and no signal.
func takeStdout() (*os.File, error) { return os.Stdout, nil }
