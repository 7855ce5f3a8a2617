package testenv

import (
	"os"
	"os/signal"
	"syscall"
)

// AllowHangups lets programs that this process starts receive SIGHUP, even if the process ignores it, as under
// nohup. A shell cannot trap a signal that it inherits as ignored; execve resets a signal that the parent catches
// to the default.
func AllowHangups() { signal.Notify(make(chan os.Signal, 1), syscall.SIGHUP) }
