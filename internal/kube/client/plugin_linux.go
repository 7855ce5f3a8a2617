package client

import (
	"os/exec"
	"syscall"
)

// ownGroup starts the process in a session of its own, without a terminal. Cancel kills the whole session, and the
// kernel kills the process when this process ends.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
