package daemonclient

import (
	"os/exec"
	"syscall"

	"golang.org/x/sys/windows"
)

// detach starts the command without a console, so that Ctrl-C and the end of this console do not affect it.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{CreationFlags: windows.DETACHED_PROCESS | windows.CREATE_NEW_PROCESS_GROUP}
}
