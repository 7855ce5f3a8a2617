//go:build unix

package dev

import (
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// programs are the signals that are the program's, not this process's.
func programs() []os.Signal {
	return []os.Signal{syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2}
}

// fromTerminal reports whether the terminal sends such a signal to the program as well: to all of the foreground's process
// group, which this process is in then.
func fromTerminal(s os.Signal) bool {
	switch s {
	case syscall.SIGINT, syscall.SIGQUIT, syscall.SIGHUP:
	default:
		return false
	}
	tty, err := os.OpenFile("/dev/tty", os.O_RDONLY|unix.O_NOCTTY, 0)
	if err != nil {
		return false // there is none
	}
	defer tty.Close()
	group, err := unix.IoctlGetInt(int(tty.Fd()), unix.TIOCGPGRP)
	return err == nil && group == unix.Getpgrp()
}
