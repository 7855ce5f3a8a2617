//go:build unix

package daemonclient

import (
	"os/exec"
	"syscall"
)

// detach starts the command in a new session, so that Ctrl-C and the end of this terminal do not affect it.
func detach(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true} }
