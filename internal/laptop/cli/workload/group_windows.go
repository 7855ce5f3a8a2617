package workload

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/windows"
)

// ownGroup starts the command in a process group of its own, which Ctrl-C on this console does not reach.
func ownGroup(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: windows.CREATE_NEW_PROCESS_GROUP}
}

// endGroup ends the command alone: Windows has no signal for a group.
func endGroup(cmd *exec.Cmd, _ bool) error { return cmd.Process.Kill() }
