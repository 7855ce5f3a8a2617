//go:build unix && !linux

package client

import (
	"os/exec"
	"syscall"
)

// ownGroup starts the process in a session of its own, without a terminal. Cancel kills the whole session.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
