package docker

import (
	"cmp"
	"context"
	"crypto/rand"
	"debug/elf"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/podenv"
	"kubevpn/pkg/host/sandbox"
	"kubevpn/pkg/host/subreaper"
)

const (
	// graceMost limits the grace period of the other containers after the end of the main one.
	graceMost = 10 * time.Second
	// endReportTimeout limits the time between the end of `docker run` and the report of PID 1 on the program's end.
	endReportTimeout = 2 * time.Second
)

// Run runs the pod's containers until the main container or ctx ends. exit is the exit code of the main container's
// program, which receives the signals of this process. Run removes everything that it created before it returns.
func Run(ctx context.Context, cfg Config) (exit int, err error) {
	if err := suitable(cfg.Executable); err != nil {
		return 0, err
	}
	p, err := prepare(ctx, cfg)
	if err != nil {
		return 0, err
	}
	for _, w := range p.warnings() {
		cfg.Warn(w)
	}
	if err := cfg.Engine.removeVolumes(ctx); err != nil {
		cfg.Warn(fmt.Sprintf("cannot remove volumes of earlier runs: %v", err))
	}
	r := &run{Config: p.cfg, plan: p}
	defer func() {
		if e := r.end(); err == nil {
			err = e
		}
	}()
	return r.run(ctx)
}

// suitable rejects a binary or machine with which a container would fail later, with a worse error.
func suitable(executable string) error {
	f, err := elf.Open(executable)
	if err != nil {
		return api.Errorf(api.ExitEngine, "cannot read this program, which the containers run: %w", err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return api.Errorf(api.ExitEngine,
			"the containers run this kubevpn (%s), which needs a C library that images may lack", executable).
			WithHint("use a static binary: `make build`, or CGO_ENABLED=0 go build")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return api.Errorf(api.ExitNoTUN, "cannot create the device of the containers' network: %w", err).
			WithHint("load the kernel module: sudo modprobe tun")
	}
	return nil
}

// prepare makes the plan of a run, and pulls images.
func prepare(ctx context.Context, cfg Config) (*plan, error) {
	cfg.Pod = withoutAgents(cfg.Pod)
	p := &plan{id: strings.ToLower(rand.Text()[:10]), cfg: cfg,
		selinux: cfg.Engine.has("selinux"), userns: cfg.Engine.has("userns")}
	_, err := os.Stat("/proc/sys/net/ipv6")
	p.ipv6 = err == nil
	if p.containers, err = choose(p.cfg.Pod, cfg.Container, cfg.Alone, cfg.Image); err != nil {
		return nil, err
	}
	for n := range p.containers {
		c := &p.containers[n]
		if c.imageInfo, err = cfg.Engine.image(ctx, c.image, c.alwaysPull, cfg.Pull, cfg.Warn); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// run is one run of a pod's containers.
type run struct {
	Config
	plan    *plan
	content content

	network *network
	others  []*child
	chosen  *child

	background   sync.WaitGroup     // all goroutines of the run
	stop         context.CancelFunc // ends Connect
	stopWatching context.CancelFunc // ends the watch of other containers and the updates of volumes
	lost         error              // the result of Connect; may be read once background is done
	output       sync.Mutex         // held while a line of another container is written
}

// content is what the containers get from the pod.
type content struct {
	programs map[string]subreaper.Program // by container
	mounts   map[string][]podenv.Mount    // by container
	points   map[string][]string          // mount points within volumes, by volume
	fresh    podenv.Following             // the volumes, and what keeps them up to date
}

func (r *run) run(ctx context.Context) (int, error) {
	held, lose := context.WithCancelCause(ctx)
	watched, stopWatching := context.WithCancel(ctx)
	r.stop, r.stopWatching = func() { lose(nil) }, stopWatching
	var err error
	if r.content, err = r.read(ctx); err != nil {
		return 0, err
	}
	const starting = "Starting the containers"
	r.Step(starting, false)
	if r.network, err = r.startNetwork(ctx); err != nil {
		return 0, err
	}
	for _, v := range r.content.fresh.Volumes {
		if err := r.show(ctx, v); err != nil {
			return 0, err
		}
	}
	r.Step(starting, true)
	if err := r.connect(held, lose); err != nil {
		return 0, err
	}
	for n := range r.plan.containers[:len(r.plan.containers)-1] {
		one, err := r.start(held, n)
		if err != nil {
			return 0, err
		}
		r.others = append(r.others, one)
		r.background.Go(func() { r.watch(watched, one) })
	}
	return r.work(held, watched)
}

// read reads environments and volumes of the containers, and warns about missing items.
func (r *run) read(ctx context.Context) (content, error) {
	got := content{programs: map[string]subreaper.Program{}}
	warn := func(name string, problems []podenv.Problem) {
		for _, p := range problems {
			r.Warn(name + p.Error())
		}
	}
	for _, c := range r.plan.containers {
		reader, err := r.Reader(c.name)
		if err != nil {
			return got, err
		}
		got.fresh.Readers = append(got.fresh.Readers, reader)
		if err := reader.See(ctx, r.Exec); err != nil {
			r.Logger.Info("cannot read the environment of a container in the pod", "container", c.name, "err", err)
		}
		variables, problems := reader.Environment(ctx)
		warn("container "+c.name+": ", problems)
		if got.programs[c.name], err = r.plan.program(c, variables); err != nil {
			return got, err
		}
	}
	got.mounts, got.fresh.Volumes, got.fresh.Problems = podenv.Volumes(ctx, got.fresh.Readers...)
	warn("", got.fresh.Problems)
	got.points = nested(got.mounts)
	got.fresh.Running, got.fresh.Show, got.fresh.Warn = r.Running, r.show, r.Warn
	return got, ctx.Err()
}

// connect connects the network, and returns when programs may use it. The end of the connection ends held.
func (r *run) connect(held context.Context, lose context.CancelCauseFunc) error {
	ready := make(chan struct{})
	r.background.Go(func() {
		r.lost = r.Connect(held, r.network.remote, sync.OnceFunc(func() { close(ready) }))
		lose(cmp.Or(r.lost, errors.New("the connection to the cluster has ended")))
	})
	select {
	case <-ready:
		return nil
	case <-held.Done():
		return context.Cause(held)
	case <-r.network.remote.Done():
		return r.network.gone()
	}
}

// work runs the main container while the connection holds. It updates volumes until watched ends.
func (r *run) work(held, watched context.Context) (int, error) {
	signals := make(chan os.Signal, 8)
	signal.Notify(signals, append(sandbox.Signals(), unix.SIGTSTP, unix.SIGCONT)...)
	defer signal.Stop(signals)
	if !r.Begin() {
		<-held.Done()
		return 0, context.Cause(held)
	}
	var err error
	if r.chosen, err = r.start(held, len(r.plan.containers)-1); err != nil {
		return 0, err
	}
	r.background.Go(func() { podenv.Follow(watched, r.content.fresh) })
	for {
		select {
		case <-r.chosen.ended:
			return r.chosen.exit()
		case <-r.chosen.done:
			return r.released()
		case s := <-signals:
			r.chosen.signal(s.(syscall.Signal))
			if s == unix.SIGTSTP { // Ctrl-Z stops this process, too, until the shell continues it
				_ = unix.Kill(os.Getpid(), unix.SIGSTOP) // never fails for this process itself
			}
		case <-held.Done():
			return 0, context.Cause(held)
		case <-r.network.remote.Done():
			return 0, r.network.gone()
		}
	}
}

// released returns the result of a run whose `docker run` has returned: its container has ended, or still runs without
// the terminal.
func (r *run) released() (int, error) {
	select {
	case <-r.chosen.ended:
		return r.chosen.exit()
	case <-time.After(endReportTimeout):
	}
	r.chosen.detached = true
	err := api.Errorf(api.ExitEngine,
		"`docker run` ended before its container %s, so kubevpn ended the container: %w", r.chosen.container,
		cmp.Or(r.chosen.err, errors.New("the detach keys ended it")))
	if r.chosen.err == nil {
		err = err.WithHint("the detach keys are Ctrl-P Ctrl-Q by default; -- --detach-keys KEYS changes them")
	}
	return 0, err
}

// watch warns when another container ends before the main one.
func (r *run) watch(ctx context.Context, one *child) {
	select {
	case <-one.ended:
		exit, err := one.exit()
		if err == nil {
			err = fmt.Errorf("exit code %d", exit)
		}
		r.Warn(fmt.Sprintf("container %s has ended: %v", one.container, err))
	case <-ctx.Done():
	}
}

// end ends and removes everything that still runs.
func (r *run) end() (err error) {
	grace := graceMost
	if s := r.Pod.Spec.TerminationGracePeriodSeconds; s != nil {
		grace = min(grace, time.Duration(*s)*time.Second)
	}
	r.stopWatching()
	if r.chosen != nil {
		r.chosen.close()
	}
	for _, one := range r.others {
		one.signal(unix.SIGTERM)
	}
	timeout := time.NewTimer(grace)
	defer timeout.Stop()
	for _, one := range r.others {
		select {
		case <-one.ended:
		case <-timeout.C:
			timeout.Reset(0) // the next one gets no grace period
		}
		one.close()
	}
	for _, one := range append(r.others, r.chosen) {
		if one != nil {
			err = errors.Join(err, r.removed(one))
		}
	}
	r.stop()
	r.background.Wait()
	err = errors.Join(err, r.lost)
	if r.network != nil {
		r.network.close()
		err = errors.Join(err, r.removed(r.network.child))
	}
	return err
}
