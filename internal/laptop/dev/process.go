// Package dev runs a program of the laptop like a container of a workload: with the environment of the container, and
// with its files at their paths.
//
//	pod ─┬─ internal/kube/podenv ─┬▶ environment ────────────────────────────────┐
//	     │                   └▶ volumes ─▶ pkg/host/sandbox: tmpfs, in memory ─┼─▶ the program
//	     │                        ▲ repeatedly: changes, and tokens before they expire
//	     └─ exec ─▶ the image's variables, if the pod runs ───────────────────┘
//
// A program without a workload has only the network: its own, or this machine's with variables that name a proxy.
//
// It writes nothing to a disk and leaves nothing when the program has ended.
package dev

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"os"
	"os/signal"
	"path"
	"slices"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/wakeup"
)

// Config configures Prepare. The container's variables override those of Environ, except for those that keep this
// machine's value (isKept, keptFromImage) unless FromPod has their names. Env overrides both.
type Config struct {
	Options
	podenv.Source
	Container string
	Cluster   *client.Cluster // for remote volumes

	// Network connects the network of place, which only the program uses. It calls ready when the program may run. It
	// returns when ctx or the network has ended, which ends the program. Nil: the program uses the laptop's network.
	Network func(ctx context.Context, place sandbox.Place, ready func()) error

	// Names gives the program on the laptop's network its own name resolution: the first in Program.names.
	Names bool

	Warn   func(string) // is called for each difference from the container, also by Run
	Logger *slog.Logger

	tick <-chan time.Time // for tests: when to look for changes
}

// Program is a program with the environment and files of its container. Run may be called once.
type Program struct {
	cfg    Config
	box    *sandbox.Sandbox
	remote *remoteVolumes
	fresh  podenv.Following
	vars   []podenv.Variable    // of the container
	names  chan sandbox.Network // the name resolution of the program, and each that replaces it; nil: this machine's
}

// Prepare reads environment and files of the container. It starts nothing.
func Prepare(ctx context.Context, cfg Config) (*Program, error) {
	r, err := cfg.Reader(cfg.Container)
	if err != nil {
		return nil, err
	}
	var ahead sync.WaitGroup
	ahead.Go(func() { r.ReadAhead(ctx) })
	if err := r.See(ctx, cfg.Exec); err != nil {
		cfg.Logger.Info("the image's variables are not known", "pod", cfg.Pod.Name, "err", err)
	}
	ahead.Wait()
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
	guard, err := newGuard(cfg.Environ, cfg.MountOver)
	if err != nil {
		return nil, err
	}
	shown := guard.shown(mounts, volumes, cfg.Warn)
	remote, err := openRemote(ctx, &cfg, mounts, shown)
	if err != nil {
		return nil, err
	}
	box, err := sandbox.New(sandbox.Config{
		Init: cfg.Init, Args: cfg.Args, Env: environment(cfg, variables),
		Stdin: cfg.Stdin, Stdout: cfg.Stdout, Stderr: cfg.Stderr,
		Mounts: shown, Volumes: all, Serve: remote.mounted, Network: cfg.Network != nil,
		Names: cfg.Names, Hostname: hostname(cfg), Logger: cfg.Logger,
	})
	if err != nil {
		remote.close()
		return nil, err
	}
	var names chan sandbox.Network
	if cfg.Names {
		names = make(chan sandbox.Network, 2)
	}
	return &Program{cfg: cfg, box: box, remote: remote, vars: variables, names: names, fresh: podenv.Following{
		Readers: []*podenv.Reader{r}, Volumes: volumes, Problems: more, Running: cfg.Running, Warn: cfg.Warn,
		Tick: cfg.tick,
	}}, nil
}

// prepareBare is Prepare for a program without a container: with this machine's environment and files.
func prepareBare(cfg Config) (*Program, error) {
	box, err := sandbox.New(sandbox.Config{
		Init: cfg.Init, Args: cfg.Args, Env: environment(cfg, nil),
		Stdin: cfg.Stdin, Stdout: cfg.Stdout, Stderr: cfg.Stderr, Network: cfg.Network != nil, Logger: cfg.Logger,
	})
	if err != nil {
		return nil, err
	}
	return &Program{cfg: cfg, box: box, remote: new(remoteVolumes)}, nil
}

// Run runs the program until it ends, or ctx does, which kills it. It forwards the signals that this process gets.
func (p *Program) Run(ctx context.Context) (sandbox.ExitStatus, error) {
	// This process must outlive the program, so signals must not end it.
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, sandbox.Signals()...)
	defer signal.Stop(signals)

	defer p.remote.start(ctx)()
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
	stop := wakeup.Go(ctx, func(ctx context.Context) { // concurrently, because an API server may be slow
		if len(p.fresh.Readers) == 0 { // no container
			return
		}
		p.fresh.Show = func(ctx context.Context, v podenv.Volume) error { return process.Update(ctx, sandboxVolume(v)) }
		podenv.Follow(ctx, p.fresh)
	})
	defer stop()
	for {
		select {
		case <-ended:
			signal.Stop(signals) // leave may take a while, and the next signal ends this process
			stop()
			if left := leave(); err == nil {
				err = left
			}
			return status, err
		case n := <-p.names:
			if err := process.SetNetwork(ctx, n); err != nil && !errors.Is(err, os.ErrProcessDone) {
				p.cfg.Logger.Warn("cannot change the name resolution of the program", "err", err)
			}
		case s := <-signals:
			if err := process.Forward(s); err != nil && !errors.Is(err, os.ErrProcessDone) {
				p.cfg.Logger.Warn("cannot forward a signal", "signal", s, "err", err)
			}
		}
	}
}

// mapAddresses gives the container's variables that are an address, ADDRESS:PORT, or SCHEME://ADDRESS:PORT, such as
// those of Services, the addresses by which this machine reaches the cluster. Call it before Run.
func (p *Program) mapAddresses(mappings packet.Mappings) {
	if len(mappings) == 0 {
		return
	}
	vars, quiet := slices.Clone(p.vars), p.cfg
	for i := range vars {
		vars[i].Value = mapAddress(vars[i].Value, mappings)
	}
	quiet.Warn = func(string) {}
	p.box.SetEnv(environment(quiet, vars))
}

func mapAddress(value string, mappings packet.Mappings) string {
	scheme, rest, found := strings.Cut(value, "://")
	if !found {
		scheme, rest = "", value
	} else {
		scheme += "://"
	}
	if a, err := netip.ParseAddr(rest); err == nil && mappings.ToLocal(a) != a {
		return scheme + mappings.ToLocal(a).String()
	}
	if at, err := netip.ParseAddrPort(rest); err == nil && mappings.ToLocal(at.Addr()) != at.Addr() {
		return scheme + netip.AddrPortFrom(mappings.ToLocal(at.Addr()), at.Port()).String()
	}
	return value
}

// keptFromImage reports whether environment omits a variable of the image without a warning.
func keptFromImage(v podenv.Variable) bool {
	// Paths in the image and its user do not apply to programs of the laptop.
	return v.Image && (path.IsAbs(v.Value) || slices.Contains([]string{"USER", "LOGNAME", "TERM"}, v.Name))
}

// environment returns the environment of the program.
func environment(cfg Config, container []podenv.Variable) []string {
	all := map[string]string{}
	set := func(entries []string) {
		for _, e := range entries {
			name, value, _ := strings.Cut(e, "=")
			all[name] = value
		}
	}
	set(cfg.Environ)
	var left []string
	for _, v := range container {
		value, there := all[v.Name]
		switch {
		case slices.Contains(cfg.FromPod, v.Name):
			all[v.Name] = v.Value
		case keptFromImage(v), v.Image && there: // what the pod itself does not set is no news
		case v.Name == "HOSTNAME", !there && !isKept(v.Name): // a shell may set HOSTNAME, and programs expect the pod's
			all[v.Name] = v.Value
		case (!there || value != v.Value) && !slices.ContainsFunc(cfg.Env, func(e string) bool {
			return strings.HasPrefix(e, v.Name+"=")
		}):
			left = append(left, v.Name)
		}
	}
	if len(left) > 0 {
		cfg.Warn(fmt.Sprintf("keeping this machine's values of %s: it sets them, or they may decide what programs "+
			"execute; --env-from-pod NAME takes the pod's", strings.Join(left, ", ")))
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
		// The reader is the laptop's user, whichever user the container has.
		h.Files = append(h.Files, sandbox.File{Path: f.Path, Mode: f.Mode | 0o400, Data: f.Data})
	}
	return h
}
