//go:build unix

package dev

import (
	"os"
	"os/signal"
	"slices"
	"syscall"
)

// programs are the signals that are the program's, not this process's, but for those that are ignored, as by nohup: the program
// ignores them too.
func programs() []os.Signal {
	return slices.DeleteFunc([]os.Signal{
		syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
	}, signal.Ignored)
}
