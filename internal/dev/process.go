// Package dev runs a program of the laptop as a container of a workload would run: with its environment and its files, at the
// paths where it looks for them.
//
//	pod ── internal/podenv ─▶ environment ─────────────────────────────┐
//	                       └▶ volumes ─▶ pkg/sandbox: tmpfs, in memory ─┴─▶ the program
//	                             ▲ again every minute: what has changed, tokens before they expire
//
// Nothing of it is written to a disk, and nothing is left when the program has ended.
package dev

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"os/signal"
	"slices"
	"strings"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/podenv"
	"kubevpn/pkg/sandbox"
)

// refresh is how often volumes are read again; the kubelet does it about as often.
const refresh = time.Minute

// Config is what Run needs.
type Config struct {
	Kube      kubernetes.Interface
	Pod       *corev1.Pod // one that runs, or one made of the workload's template
	Container string

	Init []string // as sandbox.Config has it
	Args []string // the program
	// Local is the laptop's environment. The container's wins, but for what is about the laptop itself (localOnly); Env, NAME=VALUE,
	// wins over both.
	Local, Env            []string
	Stdin, Stdout, Stderr *os.File
	Network               *sandbox.Network

	Warn   func(string) // what the container has and the program has not
	Logger *slog.Logger
}

// localOnly are variables that say where the program runs, which is the laptop.
var localOnly = []string{"PATH", "HOME", "USER", "LOGNAME", "SHELL", "PWD", "OLDPWD", "TERM", "TMPDIR", "HOSTNAME"}

// Run runs the program until it ends, or ctx does, which kills it. Signals that the terminal sends reach the program by
// themselves; SIGTERM is passed on.
func Run(ctx context.Context, cfg Config) (sandbox.ExitStatus, error) {
	r, err := podenv.New(cfg.Kube, cfg.Pod, cfg.Container)
	if err != nil {
		return sandbox.ExitStatus{}, err
	}
	variables, problems := r.Environment(ctx)
	mounts, volumes, more := r.Volumes(ctx)
	for _, p := range append(problems, more...) {
		cfg.Warn(p.Error())
	}
	if err := ctx.Err(); err != nil {
		return sandbox.ExitStatus{}, context.Cause(ctx)
	}
	box, err := sandbox.New(sandbox.Config{
		Init: cfg.Init, Args: cfg.Args, Env: environment(cfg.Local, variables, cfg.Env),
		Stdin: cfg.Stdin, Stdout: cfg.Stdout, Stderr: cfg.Stderr,
		Mounts: shown(mounts, cfg.Warn), Volumes: held(volumes), Network: cfg.Network, Logger: cfg.Logger,
	})
	if err != nil {
		return sandbox.ExitStatus{}, err
	}
	// They are the program's: this process has to outlive it.
	terminal := make(chan os.Signal, 1)
	signal.Notify(terminal, os.Interrupt, syscall.SIGHUP, syscall.SIGQUIT)
	defer signal.Stop(terminal)
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, syscall.SIGTERM)
	defer signal.Stop(asked)

	p, err := box.Start(ctx)
	if err != nil {
		return sandbox.ExitStatus{}, err
	}
	ended := make(chan struct{})
	var status sandbox.ExitStatus
	go func() {
		defer close(ended)
		status, err = p.Wait()
	}()
	tick := time.NewTicker(refresh)
	defer tick.Stop()
	known := prints(held(volumes))
	for {
		select {
		case <-ended:
			return status, err
		case <-terminal:
		case s := <-asked:
			if err := p.Signal(s); err != nil {
				cfg.Logger.Warn("passing a signal on", "signal", s, "err", err)
			}
		case <-tick.C:
			update(ctx, cfg, r, p, known)
		}
	}
}

// update brings the volumes up to date.
func update(ctx context.Context, cfg Config, r *podenv.Reader, p *sandbox.Process, known map[string][]byte) {
	_, volumes, problems := r.Volumes(ctx)
	for _, problem := range problems {
		cfg.Logger.Warn("reading a volume again", "err", problem)
	}
	now := held(volumes)
	for name, print := range prints(now) {
		if bytes.Equal(print, known[name]) {
			continue
		}
		v := now[slices.IndexFunc(now, func(v sandbox.Volume) bool { return v.Name == name })]
		if err := p.Update(ctx, v); err != nil {
			cfg.Logger.Warn("bringing a volume up to date", "volume", name, "err", err)
			continue
		}
		known[name] = print
	}
}

// prints tell whether volumes have changed.
func prints(volumes []sandbox.Volume) map[string][]byte {
	all := make(map[string][]byte, len(volumes))
	for _, v := range volumes {
		if len(v.Files) == 0 {
			continue // the program's own
		}
		b, err := json.Marshal(v)
		if err != nil { // of strings and bytes
			panic(err)
		}
		all[v.Name] = b
	}
	return all
}

// environment is the program's.
func environment(local []string, container []podenv.Variable, env []string) []string {
	all := map[string]string{}
	set := func(entries []string) {
		for _, e := range entries {
			name, value, _ := strings.Cut(e, "=")
			all[name] = value
		}
	}
	set(local)
	for _, v := range container {
		if _, there := all[v.Name]; !there || !slices.Contains(localOnly, v.Name) {
			all[v.Name] = v.Value
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
		all = append(all, sandbox.Mount{Path: m.Path, Volume: m.Volume, SubPath: m.SubPath, ReadOnly: m.ReadOnly})
	}
	return all
}

// held are volumes as the sandbox takes them.
func held(volumes []podenv.Volume) []sandbox.Volume {
	var all []sandbox.Volume
	for _, v := range volumes {
		h := sandbox.Volume{Name: v.Name}
		for _, f := range v.Files {
			// Who reads it is the user, whatever user the container has.
			h.Files = append(h.Files, sandbox.File{Path: f.Path, Mode: f.Mode | 0o400, Data: f.Data})
		}
		all = append(all, h)
	}
	return all
}
