//go:build unix && !linux

package cluster

import (
	"os/exec"
	"syscall"
)

// ownGroup puts the process into a session of its own, to be killed as one. It has no terminal on which it could ask.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
