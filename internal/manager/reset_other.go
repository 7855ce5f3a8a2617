//go:build !linux

package manager

import "syscall"

// isClosed is known only on Linux, where the manager runs.
func isClosed(syscall.Conn) bool { return false }
