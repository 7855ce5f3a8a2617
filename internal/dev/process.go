// Package dev runs a program of the laptop as a container of a workload would run: with its environment and its files,
// at the paths where it looks for them.
//
//	pod ── internal/podenv ─▶ environment ─────────────────────────────┐
//	 └─── exec ─▶ the image's variables, if it runs ────────────────────┤
//	                       └▶ volumes ─▶ pkg/host/sandbox: tmpfs, in memory ─┴─▶ the program
//	                             ▲ again and again: what has changed, tokens before they expire
//
// Nothing of it is written to a disk, and nothing is left when the program has ended.
package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"path"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/podenv"
	"kubevpn/pkg/host/sandbox"
)

// Config is what Prepare needs.
type Config struct {
	Kube      kubernetes.Interface
	Pod       *corev1.Pod // one that runs, or one made of the workload's template
	Container string
	Volumes   map[string]string // directories of this machine that stand for volumes of the pod
	// Running finds another pod of the workload, if Pod does not go on running; nil: there is none.
	Running func(ctx context.Context) (*corev1.Pod, error)
	Exec    podenv.Exec // nil: no container runs

	Init []string // as sandbox.Config has it
	Args []string // the program
	// Local is the laptop's environment. The container's wins, but for what is about the laptop itself (kept,
	// keptFromImage) and not in FromPod, which are names; Env, NAME=VALUE, wins over both.
	Local, FromPod, Env []string
	// MountOver are paths at which, and below which, volumes may hide what the machine needs or its user keeps (guard).
	MountOver             []string
	Stdin, Stdout, Stderr *os.File
	// Network gives the program a network of its own, which place has: it calls ready when the program may run, and
	// returns when ctx has ended, or the network has; then the program is ended. Nil: the program has the laptop's.
	Network func(ctx context.Context, place sandbox.Place, ready func()) error

	Warn   func(string) // what the container has and the program has not; Run calls it, too
	Logger *slog.Logger

	tick <-chan time.Time // a test's: when to look for what has changed
}

// Program is a program with what its container has. It is run once.
type Program struct {
	cfg   Config
	box   *sandbox.Sandbox
	fresh podenv.Following
}

// Prepare reads what the container has. It starts nothing.
func Prepare(ctx context.Context, cfg Config) (*Program, error) {
	r, err := podenv.New(cfg.Kube, cfg.Pod, cfg.Container)
	if err != nil {
		return nil, err
	}
	if err := r.Here(cfg.Volumes); err != nil {
		return nil, err
	}
	if err := r.See(ctx, cfg.Exec); err != nil { // which keeps nobody from working
		cfg.Logger.Info("the image's variables are not known", "pod", cfg.Pod.Name, "err", err)
	}
	variables, problems := r.Environment(ctx)
	mounts, volumes, more := r.Volumes(ctx)
	for _, problem := range slices.Concat(problems, more) {
		cfg.Warn(problem.Error())
	}
	if ctx.Err() != nil {
		return nil, context.Cause(ctx)
	}
	var all []sandbox.Volume
	for _, v := range volumes {
		all = append(all, sandboxVolume(v))
	}
	guard, err := newGuard(cfg.Local, cfg.MountOver)
	if err != nil {
		return nil, err
	}
	box, err := sandbox.New(sandbox.Config{
		Init: cfg.Init, Args: cfg.Args, Env: environment(cfg, variables),
		Stdin: cfg.Stdin, Stdout: cfg.Stdout, Stderr: cfg.Stderr,
		Mounts: guard.shown(mounts, volumes, cfg.Warn), Volumes: all, Network: cfg.Network != nil, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	return &Program{cfg: cfg, box: box, fresh: podenv.Following{
		Readers: []*podenv.Reader{r}, Volumes: volumes, Problems: more, Running: cfg.Running, Warn: cfg.Warn,
		Tick: cfg.tick,
	}}, nil
}

// Run runs the program until it ends, or ctx does, which kills it. It forwards the signals that this process gets.
func (p *Program) Run(ctx context.Context) (sandbox.ExitStatus, error) {
	// They are the program's: this process has to outlive it.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, sandbox.Signals()...)
	defer signal.Stop(signals)

	process, leave, err := p.begin(ctx)
	if err != nil {
		return sandbox.ExitStatus{}, err
	}
	ended := make(chan struct{})
	var status sandbox.ExitStatus
	go func() {
		defer close(ended)
		status, err = process.Wait()
	}()
	fresh, stop := context.WithCancel(ctx)
	stopped := make(chan struct{})
	go func() { // beside, because an API server may take its time
		defer close(stopped)
		p.fresh.Show = func(ctx context.Context, v podenv.Volume) error { return process.Update(ctx, sandboxVolume(v)) }
		podenv.Follow(fresh, p.fresh)
	}()
	defer func() {
		stop()
		<-stopped
	}()
	for {
		select {
		case <-ended:
			signal.Stop(signals) // the next one ends this process, which may wait for a while here
			stop()
			if left := leave(); err == nil {
				err = left
			}
			return status, err
		case s := <-signals:
			if err := process.Forward(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
				p.cfg.Logger.Warn("cannot forward a signal", "signal", s, "err", err)
			}
		}
	}
}

// keptFromImage reports whether the image's value of a variable is left out without a word.
func keptFromImage(v podenv.Variable) bool {
	// Places in the image, and its user, would only mislead the laptop's programs.
	return v.Image && (path.IsAbs(v.Value) || slices.Contains([]string{"USER", "LOGNAME", "TERM"}, v.Name))
}

// environment is the program's.
func environment(cfg Config, container []podenv.Variable) []string {
	all := map[string]string{}
	set := func(entries []string) {
		for _, e := range entries {
			name, value, _ := strings.Cut(e, "=")
			all[name] = value
		}
	}
	set(cfg.Local)
	var left []string
	for _, v := range container {
		value, there := all[v.Name]
		switch {
		case slices.Contains(cfg.FromPod, v.Name):
			all[v.Name] = v.Value
		case keptFromImage(v):
		case !isKept(v.Name):
			all[v.Name] = v.Value
		case (!there || value != v.Value) && !slices.ContainsFunc(cfg.Env, func(e string) bool {
			return strings.HasPrefix(e, v.Name+"=")
		}):
			left = append(left, v.Name)
		}
	}
	if len(left) > 0 {
		cfg.Warn(fmt.Sprintf("this machine's values are kept of %s: its programs execute what they say; "+
			"--env-from-pod NAME takes the pod's",
			strings.Join(left, ", ")))
	}
	for _, name := range cfg.FromPod {
		if !slices.ContainsFunc(container, func(v podenv.Variable) bool { return v.Name == name }) {
			cfg.Warn(fmt.Sprintf("--env-from-pod %s: the container has no such variable", name))
		}
	}
	set(cfg.Env)
	var entries []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		entries = append(entries, name+"="+all[name])
	}
	return entries
}

// sandboxVolume converts a volume for the sandbox.
func sandboxVolume(v podenv.Volume) sandbox.Volume {
	h := sandbox.Volume{Name: v.Name}
	for _, f := range v.Files {
		// Who reads it is the user, whatever user the container has.
		h.Files = append(h.Files, sandbox.File{Path: f.Path, Mode: f.Mode | 0o400, Data: f.Data})
	}
	return h
}
