//go:build unix && !linux

package cluster

import (
	"os/exec"
	"syscall"
)

// ownGroup puts the process into a group of its own, to be killed as one.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
}
