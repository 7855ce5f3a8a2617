package sandbox

import "os"

// Pid returns the process ID of the sandbox's init in the parent's PID namespace.
func (p *Process) Pid() int { return p.init.Pid }

// Signal sends the program a signal, whatever the terminal has sent.
func (p *Process) Signal(sig os.Signal) error { return p.signal(sig, false) }
