package dev

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/exec"
	"sync"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podenv"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/laptop/docker"
	"kubevpn/pkg/host/sandbox"
)

// Mode says where the program runs.
type Mode int

const (
	OnMachine Mode = iota // with this machine's network, which the daemon connects
	Isolated              // with a network of its own, which this process connects
	InDocker              // in containers of this machine's Docker Engine, which this process connects
	Proxied               // with this machine's network, and variables that name a proxy of this process
)

// Options are the user's choices.
type Options struct {
	Mode Mode
	Args []string // the program and its arguments; none in Docker
	Init []string // sandbox.Config.Init

	Environ   []string          // this machine's environment
	Env       []string          // NAME=VALUE; overrides the container's
	FromPod   []string          // names of variables that always have the pod's value
	Volumes   map[string]string // podenv.Source.Here
	Image     string            // for podenv.Remote volumes
	MountOver []string          // paths at and below which volumes may cover files of the machine
	Localhost []LocalhostPort   // OnMachine: ports of the pod's localhost that answer on this machine

	Stdin, Stdout, Stderr *os.File

	Show  func(api.Event) // shows progress and warnings; Run calls it from one goroutine at a time
	Quiet func()          // is called when the program takes the terminal

	Docker docker.Config // for InDocker: the user's choices; Run sets the rest
}

// Target is the workload that the program replaces, and the connection to its cluster.
type Target struct {
	Cluster   *client.Cluster
	Namespace string
	Workload  string // TYPE/NAME; empty: none, so the program has only the network (Isolated and Proxied)
	Container string // empty: the workload's default

	// Hold keeps the connection, and the intercept if there is one, until ctx ends. An event with Held reports that
	// they are ready. This process keeps the connection for the network of place, or for Proxied, with an event that
	// has its SOCKS; otherwise, the daemon does.
	Hold func(ctx context.Context, place sandbox.Place, on func(api.Event)) error
}

// Runner runs one program like a container of a workload.
type Runner struct {
	Options
	target Target
}

// New checks whether this machine can run the program, before anything is started for it. Errors are *api.Error.
func New(ctx context.Context, o Options) (*Runner, error) {
	switch o.Mode {
	case InDocker:
		engine, err := docker.Find(ctx)
		if err != nil {
			return nil, err
		}
		o.Docker.Engine = engine
	case OnMachine, Isolated:
		if err := sandbox.Allowed(o.Mode == Isolated); err != nil {
			return nil, notAllowed(err, o.Mode)
		}
	case Proxied:
	}
	var mu sync.Mutex
	show := o.Show
	o.Show = func(e api.Event) { // the connection and the program send events concurrently
		mu.Lock()
		defer mu.Unlock()
		show(e)
	}
	return &Runner{Options: o}, nil
}

// Run runs the program and returns its exit code. The end of ctx stops the preparations, but not the program, which
// receives signals. When Run returns, nothing of the program is left.
func (r *Runner) Run(ctx context.Context, t Target) (code int, err error) {
	r.target = t
	switch r.Mode {
	case Isolated:
		return r.isolated(ctx)
	case InDocker:
		return r.inDocker(ctx)
	case Proxied:
		return r.proxied(ctx)
	default:
		return r.onMachine(ctx)
	}
}

// untilBegin returns a context that ends with ctx, so that Ctrl-C ends the preparations. After begin, only the program
// handles Ctrl-C, and release ends the context. begin returns false if ctx has ended before.
func untilBegin(ctx context.Context) (held context.Context, release context.CancelFunc, begin func() bool) {
	held, release = context.WithCancel(context.WithoutCancel(ctx))
	return held, release, context.AfterFunc(ctx, release)
}

// onMachine runs the program while the daemon holds the connection. It prepares the program while the daemon connects.
func (r *Runner) onMachine(ctx context.Context) (int, error) {
	held, release, begin := untilBegin(ctx)
	defer release()
	preparing, abandon := context.WithCancel(ctx)
	defer abandon()
	beside := *r
	show, mayShow := later(r.Show) // sudo may be asking for a password
	beside.Show = show
	var c *api.Connection
	var p *Program
	var unprepared error
	prepared := make(chan struct{})
	go func() {
		defer close(prepared)
		p, unprepared = beside.prepare(preparing, nil)
	}()
	released, err := r.hold(held, func(e *api.Event) {
		if c == nil { // not again while it is read
			c = e.Connection
		}
	})
	if err != nil { // the user sees this error first, whatever prepare has found
		abandon()
		<-prepared
		return 0, err
	}
	defer func() {
		release()
		<-released
	}()
	mayShow()
	if <-prepared; unprepared != nil {
		return 0, unprepared
	}
	stop, err := r.forwardLocalhost(p)
	if err != nil {
		return 0, err
	}
	defer stop()
	if !begin() {
		return 0, ctx.Err()
	}
	p.mapAddresses(c.Mappings)
	r.resolve(held, p, c, released)
	r.Quiet()
	status, err := p.Run(context.WithoutCancel(ctx))
	return r.exit(status, err)
}

// later returns a function that keeps events until mayShow is called, and then shows them and those that follow.
func later(show func(api.Event)) (keep func(api.Event), mayShow func()) {
	var mu sync.Mutex
	var kept []api.Event
	shown := false
	keep = func(e api.Event) {
		mu.Lock()
		defer mu.Unlock()
		if !shown {
			kept = append(kept, e)
			return
		}
		show(e)
	}
	mayShow = func() {
		mu.Lock()
		defer mu.Unlock()
		for _, e := range kept {
			show(e)
		}
		kept, shown = nil, true
	}
	return keep, mayShow
}

// hold returns when the daemon holds the connection. It calls see with each event, which see may change. It closes
// released when the daemon no longer holds the connection. If ctx has not ended by then, it shows a warning.
func (r *Runner) hold(ctx context.Context, see func(*api.Event)) (released <-chan struct{}, err error) {
	ready, ended := make(chan struct{}), make(chan error, 1)
	go func() {
		begun := false
		ended <- r.target.Hold(ctx, nil, func(e api.Event) {
			see(&e)
			r.Show(e)
			if !begun && e.Held {
				begun = true
				close(ready)
			}
		})
	}()
	select {
	case <-ready:
	case err := <-ended:
		if err == nil {
			err = errors.New("the daemon closed the connection")
		}
		return nil, err
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		err := <-ended
		if ctx.Err() == nil { // the program itself sees only that nothing answers
			if err == nil {
				err = errors.New("the connection has ended")
			}
			err = fmt.Errorf("%w; the program continues without the cluster", err)
		}
		if err != nil && !errors.Is(err, context.Canceled) {
			r.warn(err.Error())
		}
	}()
	return done, nil
}

// connect holds the connection for the network of place. It calls ready when programs may start.
func (r *Runner) connect(ctx context.Context, place sandbox.Place, ready func()) error {
	return r.target.Hold(ctx, place, func(e api.Event) {
		r.Show(e)
		if e.Held {
			ready()
		}
	})
}

// isolated runs the program in a network of its own. There is no daemon, and nothing needs root.
func (r *Runner) isolated(ctx context.Context) (int, error) {
	held, release, begin := untilBegin(ctx)
	defer release()
	p, err := r.prepare(ctx, func(ctx context.Context, place sandbox.Place, ready func()) error {
		return r.connect(ctx, place, func() {
			if begin() {
				r.Quiet()
				ready()
			}
		})
	})
	if err != nil {
		return 0, err
	}
	status, err := p.Run(held)
	if err != nil && held.Err() != nil {
		return 0, ctx.Err()
	}
	return r.exit(status, err)
}

// inDocker runs the workload's containers.
func (r *Runner) inDocker(ctx context.Context) (int, error) {
	m, err := r.model(ctx)
	if err != nil {
		return 0, err
	}
	held, release, begin := untilBegin(ctx)
	defer release()
	cfg := r.Docker
	cfg.Source, cfg.Workload, cfg.Container = m.Source, m.workload, m.container
	cfg.Alone = r.target.Container != ""
	cfg.Env = r.Env
	cfg.Stdin, cfg.Stdout, cfg.Stderr = r.Stdin, r.Stdout, r.Stderr
	cfg.Logger, cfg.Warn = slog.New(warner{warn: r.warn}), r.warn
	cfg.Connect = r.connect
	cfg.Begin = func() bool {
		r.Quiet()
		return begin()
	}
	cfg.Step = func(text string, done bool) { r.Show(api.Event{Step: text, Done: done}) }
	cfg.Pull = func() io.Writer {
		r.Quiet()
		return r.Stderr
	}
	code, err := docker.Run(held, cfg)
	if err != nil && ctx.Err() != nil {
		return 0, ctx.Err()
	}
	return code, err
}

// prepare calls Prepare. network is Config.Network.
func (r *Runner) prepare(ctx context.Context,
	network func(context.Context, sandbox.Place, func()) error) (*Program, error) {
	cfg := Config{Options: r.Options, Network: network, Logger: slog.New(warner{warn: r.warn}), Warn: r.warn}
	if r.target.Workload == "" {
		return prepareBare(cfg)
	}
	m, err := r.model(ctx)
	if err != nil {
		return nil, err
	}
	cfg.Source, cfg.Container, cfg.Names, cfg.Cluster = m.Source, m.container, network == nil, r.target.Cluster
	return Prepare(ctx, cfg)
}

func (r *Runner) warn(text string) { r.Show(api.Event{Warning: text}) }

// exit returns the exit code of the program, or the error for a program that did not start.
func (r *Runner) exit(status sandbox.ExitStatus, err error) (int, error) {
	switch {
	case errors.Is(err, os.ErrNotExist) && !found(r.Args[0]): // otherwise another file is missing
		return 0, api.Errorf(api.ExitUsage, "%w", err)
	case errors.Is(err, sandbox.ErrNotAllowed): // some machines refuse only the attempt
		return 0, notAllowed(err, r.Mode)
	}
	return status.Code, err
}

// found reports whether this machine has the program.
func found(program string) bool {
	_, err := exec.LookPath(program)
	return err == nil || errors.Is(err, exec.ErrDot)
}

// notAllowed returns the error for a machine that does not allow sandboxes. Its hint names another mode.
func notAllowed(err error, mode Mode) error {
	switch {
	case errors.Is(err, errors.ErrUnsupported):
		return api.Errorf(api.ExitPrivilege, "%w", err).WithHint("`kubevpn dev` needs a Linux machine")
	case mode == Isolated && errors.Is(err, sandbox.ErrNoTUN):
		return api.Errorf(api.ExitNoTUN, "%w", err).
			WithHint("without --isolate the program has this machine's network, which `kubevpn dev` connects with sudo")
	}
	return api.Errorf(api.ExitPrivilege, "%w", err).
		WithHint("`kubevpn dev --docker` runs the workload's containers instead")
}

// model is the container that the program replaces.
type model struct {
	podenv.Source
	workload, container string // names
}

// model reads the workload and one of its pods.
func (r *Runner) model(ctx context.Context) (*model, error) {
	c := r.target.Cluster
	w, err := workloads.New(c).Workload(ctx, r.target.Namespace, r.target.Workload)
	if err != nil {
		return nil, err
	}
	container, err := w.Container(r.target.Container)
	if err != nil {
		return nil, err
	}
	pod, missing, err := w.Model(ctx, c.Kube())
	if err != nil {
		return nil, c.Explain(err)
	}
	if missing != "" {
		r.warn(missing)
	}
	m := &model{podenv.Source{Kube: c.Kube(), Pod: pod, Here: r.Volumes}, w.Name, container.Name}
	m.Running = func(ctx context.Context) (*corev1.Pod, error) { return w.Running(ctx, c.Kube()) }
	if podenv.Runs(pod) {
		m.Exec = func(ctx context.Context, container string, command []string, stdout io.Writer) error {
			return c.Exec(ctx, client.ExecOptions{
				Namespace: pod.Namespace, Pod: pod.Name, Container: container, Command: command, Stdout: stdout,
			})
		}
	}
	return m, nil
}
