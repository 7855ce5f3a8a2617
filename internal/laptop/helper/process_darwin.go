package helper

import "os"

// thisProgram returns the path of the running program. macOS cannot start a program that is only open, so its directory
// should belong to root.
func thisProgram() (string, error) { return os.Executable() }

// checkNetwork does nothing: macOS has no network namespaces.
func checkNetwork(*os.File) error { return nil }
