// Package dev runs a program of the laptop as a container of a workload would run: with its environment and its files, at the
// paths where it looks for them.
//
//	pod ── internal/podenv ─▶ environment ─────────────────────────────┐
//	 └─── exec ─▶ the image's variables, if it runs ────────────────────┤
//	                       └▶ volumes ─▶ pkg/sandbox: tmpfs, in memory ─┴─▶ the program
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
	"kubevpn/pkg/sandbox"
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
	// Local is the laptop's environment. The container's wins, but for what is about the laptop itself (kept, keptFromImage);
	// Env, NAME=VALUE, wins over both.
	Local, Env            []string
	Stdin, Stdout, Stderr *os.File
	// Network gives the program a network of its own, which place has: it calls ready when the program may run, and returns when
	// ctx has ended, or the network has; then the program is ended. Nil: the program has the laptop's.
	Network func(ctx context.Context, place *sandbox.Process, ready func()) error

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
		all = append(all, held(v))
	}
	box, err := sandbox.New(sandbox.Config{
		Init: cfg.Init, Args: cfg.Args, Env: environment(cfg.Local, variables, cfg.Env, cfg.Warn),
		Stdin: cfg.Stdin, Stdout: cfg.Stdout, Stderr: cfg.Stderr,
		Mounts: shown(mounts, cfg.Warn), Volumes: all, Network: cfg.Network != nil, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	return &Program{cfg: cfg, box: box, fresh: podenv.Following{
		Readers: []*podenv.Reader{r}, Volumes: volumes, Problems: more, Running: cfg.Running, Warn: cfg.Warn, Tick: cfg.tick,
	}}, nil
}

// Run runs the program until it ends, or ctx does, which kills it. Signals are the program's; those to the whole process group
// reach it by themselves, others are passed on.
func (p *Program) Run(ctx context.Context) (sandbox.ExitStatus, error) {
	// They are the program's: this process has to outlive it.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, programs()...)
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
		p.fresh.Show = func(ctx context.Context, v podenv.Volume) error { return process.Update(ctx, held(v)) }
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
			if err := process.Signal(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
				p.cfg.Logger.Warn("passing a signal on", "signal", s, "err", err)
			}
		}
	}
}

// kept are variables of the laptop that the container's do not replace: its programs are where the laptop has them, and this is
// where they are started. The image's do not replace keptFromImage either, which are about its user.
func kept(name string) bool { return slices.Contains([]string{"PATH", "PWD", "OLDPWD"}, name) }

func keptFromImage(v podenv.Variable) bool {
	return v.Image && (kept(v.Name) || slices.Contains([]string{"HOME", "USER", "LOGNAME", "SHELL", "TERM"}, v.Name) ||
		// Places in the image, and what its programs load from there, would only mislead the laptop's.
		path.IsAbs(v.Value) || strings.HasPrefix(v.Name, "LD_"))
}

// environment is the program's.
func environment(local []string, container []podenv.Variable, env []string, warn func(string)) []string {
	all := map[string]string{}
	set := func(entries []string) {
		for _, e := range entries {
			name, value, _ := strings.Cut(e, "=")
			all[name] = value
		}
	}
	set(local)
	for _, v := range container {
		switch value, there := all[v.Name]; {
		case keptFromImage(v):
		case !there || !kept(v.Name):
			all[v.Name] = v.Value
		case value != v.Value && !slices.ContainsFunc(env, func(e string) bool { return strings.HasPrefix(e, v.Name+"=") }):
			warn(fmt.Sprintf("variable %s: this machine's is kept; --env %s=VALUE sets another", v.Name, v.Name))
		}
	}
	set(env)
	var entries []string
	for _, name := range slices.Sorted(maps.Keys(all)) {
		entries = append(entries, name+"="+all[name])
	}
	return entries
}

// shown are mounts as the sandbox takes them.
func shown(mounts []podenv.Mount, warn func(string)) []sandbox.Mount {
	var all []sandbox.Mount
	for _, m := range mounts {
		if m.Path == "/" || m.Path == "/proc" || strings.HasPrefix(m.Path, "/proc/") {
			warn(fmt.Sprintf("volume %s at %s: nothing can be mounted there", m.Volume, m.Path))
			continue
		}
		one := sandbox.Mount{Path: m.Path, Source: m.Source, ReadOnly: m.ReadOnly}
		if m.Source == "" {
			one.Volume, one.SubPath = m.Volume, m.SubPath
		}
		all = append(all, one)
	}
	return all
}

// held is a volume as the sandbox takes it.
func held(v podenv.Volume) sandbox.Volume {
	h := sandbox.Volume{Name: v.Name}
	for _, f := range v.Files {
		// Who reads it is the user, whatever user the container has.
		h.Files = append(h.Files, sandbox.File{Path: f.Path, Mode: f.Mode | 0o400, Data: f.Data})
	}
	return h
}
