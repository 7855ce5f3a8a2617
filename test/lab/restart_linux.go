package lab

import (
	"context"
	"fmt"
	"strings"
	"time"
)

// Restart kills a process of the lab (with the name that Status returns), if it is alive, and starts it again with the
// same arguments. Tests use it to check which state survives. It does not wait until the process serves.
func (l *Lab) Restart(ctx context.Context, name string) error {
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	s, err := readState(l.stateFile()) // another program may have restarted processes since
	if err != nil {
		return err
	}
	l.mu.Lock()
	l.adopt(s)
	l.mu.Unlock()
	p, found := l.process(name)
	if !found {
		var names []string
		for _, q := range s.Processes {
			names = append(names, q.Name)
		}
		return fmt.Errorf("no process %q in the lab: want one of %s", name, strings.Join(names, ", "))
	}
	if strings.HasPrefix(name, "node-") {
		return fmt.Errorf("%s holds its node's mounts and cannot be restarted: run 'lab down' and 'lab up'", name)
	}
	if err := l.Kill(ctx, name); err != nil {
		return err
	}
	return l.start(Process{Name: p.Name, Place: p.Place, Args: p.Args}, nil)
}

// Kill kills a process of the lab, if it is alive, and waits until it has ended.
func (l *Lab) Kill(ctx context.Context, name string) error {
	p, found := l.process(name)
	if !found {
		return fmt.Errorf("no process %q in the lab", name)
	}
	return l.poll(ctx, 10*time.Second, nil, func(context.Context) error {
		if !p.Running() {
			return nil
		}
		if err := kill(p.PID); err != nil {
			return err
		}
		return fmt.Errorf("%s does not end", name)
	})
}
