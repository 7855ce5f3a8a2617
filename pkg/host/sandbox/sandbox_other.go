//go:build !linux

package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"runtime"
)

// Allowed returns an error: sandboxes need Linux.
func Allowed(network bool) error { return errNotHere() }

func errNotHere() error {
	return fmt.Errorf("a mount or network namespace for one program: %w on %s", errors.ErrUnsupported, runtime.GOOS)
}

// Locate is not implemented on this operating system.
func Locate(name string) (real string, missing int, err error) { return "", 0, errNotHere() }

// Init is not implemented on this operating system.
func Init() error { return errNotHere() }

// Start is not implemented on this operating system.
func (s *Sandbox) Start(ctx context.Context) (*Process, error) { return nil, errNotHere() }

// A Process does not exist on this operating system: its Place is nil.
type Process struct{ Place }

func (p *Process) Run(ctx context.Context) error              { return errNotHere() }
func (p *Process) Forward(sig os.Signal) error                { return errNotHere() }
func (p *Process) Update(ctx context.Context, v Volume) error { return errNotHere() }
func (p *Process) Wait() (ExitStatus, error)                  { return ExitStatus{}, errNotHere() }
