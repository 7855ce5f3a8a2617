package cluster

import (
	"os/exec"
	"syscall"
)

// ownGroup puts the process into a session of its own, to be killed as one, and together with this process. It has no
// terminal on which it could ask.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Pdeathsig: syscall.SIGKILL}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
