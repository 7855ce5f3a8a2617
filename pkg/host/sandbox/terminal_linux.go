package sandbox

import (
	"errors"
	"log/slog"
	"runtime"

	"golang.org/x/sys/unix"
)

// terminal is the controlling terminal of this process, which was in the foreground. A nil terminal does nothing.
type terminal struct {
	fd    int
	group int // ours
}

// foreground opens the terminal if this process is in its foreground.
func foreground() *terminal {
	fd, err := unix.Open("/dev/tty", unix.O_RDWR|unix.O_NOCTTY|unix.O_CLOEXEC, 0)
	if err != nil {
		return nil
	}
	t := &terminal{fd: fd, group: unix.Getpgrp()}
	if now, err := unix.IoctlGetInt(fd, unix.TIOCGPGRP); err != nil || now != t.group {
		t.close()
		return nil
	}
	return t
}

func (t *terminal) close() {
	if t != nil {
		unix.Close(t.fd)
	}
}

// restore makes this process group the foreground group again if the current one has died, such as that of a shell
// in the sandbox. It does not replace a live group, such as that of the user's shell. It closes the terminal.
func (t *terminal) restore(log *slog.Logger) {
	if t == nil {
		return
	}
	defer t.close()
	now, err := unix.IoctlGetInt(t.fd, unix.TIOCGPGRP)
	if err != nil || now <= 0 || now == t.group || !errors.Is(unix.Kill(-now, 0), unix.ESRCH) {
		return
	}
	// TIOCSPGRP stops a background process unless SIGTTOU is blocked.
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	var block, before unix.Sigset_t
	block.Val[0] = 1 << (unix.SIGTTOU - 1)
	if err := unix.PthreadSigmask(unix.SIG_BLOCK, &block, &before); err != nil {
		log.Warn("cannot restore the terminal's foreground process group", "err", err)
		return
	}
	if err := unix.IoctlSetPointerInt(t.fd, unix.TIOCSPGRP, t.group); err != nil {
		log.Warn("cannot restore the terminal's foreground process group", "err", err)
	}
	if err := unix.PthreadSigmask(unix.SIG_SETMASK, &before, nil); err != nil {
		log.Warn("cannot restore the signal mask", "err", err)
	}
}
