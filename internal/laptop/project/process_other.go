//go:build !linux

package project

import (
	"os"
	"os/exec"
)

// apart does nothing: Ctrl-C reaches the commands, too, and they clean up.
func apart(*exec.Cmd) {}

// endProcess asks a process to end, where the system can.
func endProcess(p *os.Process) error { return p.Signal(os.Interrupt) }
