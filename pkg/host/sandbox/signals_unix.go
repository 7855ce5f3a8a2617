//go:build unix

package sandbox

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// Signals returns the signals that a caller forwards to its program instead of terminating. It omits signals that this
// process ignores, as under nohup: the program inherits this and ignores them too.
func Signals() []os.Signal {
	return slices.DeleteFunc([]os.Signal{
		syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
	}, signal.Ignored)
}
