//go:build unix

package workload

import (
	"os/exec"
	"syscall"
)

// ownGroup starts the command in a process group of its own, which Ctrl-C on this terminal does not reach.
func ownGroup(cmd *exec.Cmd) { cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true} }

// endGroup ends the command's process group. force does not give it a choice.
func endGroup(cmd *exec.Cmd, force bool) error {
	if force {
		return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL)
	}
	return syscall.Kill(-cmd.Process.Pid, syscall.SIGTERM)
}
