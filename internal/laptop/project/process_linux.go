package project

import (
	"os"
	"os/exec"
	"syscall"
)

// apart starts a command in a process group of its own, which Ctrl-C does not reach: the Set ends it. If the process of
// the Set is killed, the kernel asks the command to end.
func apart(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true, Pdeathsig: syscall.SIGTERM}
}

// endProcess asks a process to end. It cleans up, and ends what it has started.
func endProcess(p *os.Process) error { return p.Signal(syscall.SIGTERM) }
