package docker

import (
	"context"
	"debug/elf"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/signal"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/podenv"
)

const (
	// refresh is how often volumes are read again; the kubelet does it about as often.
	refresh = time.Minute
	// graceMost is the longest that other containers have to end when the one that the user works on has.
	graceMost = 10 * time.Second
)

// Run runs the pod's containers until the one that the user works on ends, or ctx does. exit is that one's exit code. When it
// returns nothing of it is left. Signals that the terminal sends reach the program by themselves; SIGTERM is passed on.
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
	d, err := newDirectory(cfg.RuntimeDirs, cfg.Logger)
	if err != nil {
		return 0, err
	}
	r := &run{Config: cfg, plan: p, dir: d}
	defer func() {
		if e := r.end(); err == nil {
			err = e
		}
	}()
	return r.run(ctx)
}

// suitable refuses what would fail in a container with a worse error.
func suitable(executable string) error {
	f, err := elf.Open(executable)
	if err != nil {
		return api.Errorf(api.ExitEngine, "reading this program, which the containers run: %w", err)
	}
	defer f.Close()
	if slices.ContainsFunc(f.Progs, func(p *elf.Prog) bool { return p.Type == elf.PT_INTERP }) {
		return api.Errorf(api.ExitEngine, "this kubevpn (%s) needs a C library, which images may not have, and the containers run it", executable).
			WithHint("use a static one, as `make build` makes it: CGO_ENABLED=0 go build")
	}
	if _, err := os.Stat("/dev/net/tun"); err != nil {
		return api.Errorf(api.ExitNoTUN, "there is no device for the containers' network: %w", err).WithHint("load the kernel's module: sudo modprobe tun")
	}
	return nil
}

// prepare finds out what is to be run; it pulls images.
func prepare(ctx context.Context, cfg Config) (*plan, error) {
	cfg.Pod = withoutAgents(cfg.Pod)
	p := &plan{cfg: cfg, pod: cfg.Pod, user: cfg.Arguments, selinux: cfg.Engine.has("selinux"), userns: cfg.Engine.has("userns")}
	_, err := os.Stat("/proc/sys/net/ipv6")
	p.ipv6 = err == nil
	if p.containers, err = choose(p.pod, cfg.Container, cfg.Alone, cfg.Image); err != nil {
		return nil, err
	}
	for n := range p.containers {
		c := &p.containers[n]
		if c.of, err = cfg.Engine.image(ctx, c.image, cfg.Pull); err != nil {
			return nil, err
		}
	}
	return p, nil
}

// run is one run of a pod's containers.
type run struct {
	Config
	plan *plan
	dir  *directory

	network *networkContainer
	others  []*running
	chosen  *running

	background  sync.WaitGroup     // Connect, and the refreshing of volumes
	stop        context.CancelFunc // Connect
	ignore      context.CancelFunc // the ends of other containers, and what changes in volumes
	lost        chan error         // from Connect
	output      sync.Mutex         // of the other containers' lines
	programs    map[string]program
	mounts      map[string][]podenv.Mount
	readers     *readers
	shownBefore map[string][]byte // volumes, by name
}

func (r *run) run(ctx context.Context) (int, error) {
	held, stop := context.WithCancel(ctx)
	watched, ignore := context.WithCancel(ctx)
	r.stop, r.ignore, r.lost = stop, ignore, make(chan error, 1)
	volumes, err := r.read(ctx)
	if err != nil {
		return 0, err
	}
	const starting = "Starting the containers"
	r.Step(starting, false)
	if r.network, err = r.startNetwork(ctx); err != nil {
		return 0, err
	}
	for _, v := range volumes {
		if err := r.show(v); err != nil {
			return 0, err
		}
	}
	r.Step(starting, true)
	if err := r.connect(held); err != nil {
		return 0, err
	}
	for n := range r.plan.containers[:len(r.plan.containers)-1] {
		one, err := r.start(ctx, n)
		if err != nil {
			return 0, err
		}
		r.others = append(r.others, one)
		r.background.Go(func() { r.watch(watched, one) })
	}
	return r.work(ctx, watched)
}

// read computes what the containers have, and says what they have not.
func (r *run) read(ctx context.Context) ([]volume, error) {
	r.readers = &readers{pod: r.plan.pod, of: map[string]*podenv.Reader{}}
	r.programs, r.shownBefore = map[string]program{}, map[string][]byte{}
	warn := func(name string, problems []podenv.Problem) {
		for _, p := range problems {
			r.Warn(name + p.Error())
		}
	}
	for _, c := range r.plan.containers {
		reader, err := podenv.New(r.Kube, r.plan.pod, c.name)
		if err != nil {
			return nil, err
		}
		r.readers.names = append(r.readers.names, c.name)
		r.readers.of[c.name] = reader
		variables, problems := reader.Environment(ctx)
		warn("container "+c.name+": ", problems)
		if r.programs[c.name], err = r.plan.program(c, variables); err != nil {
			return nil, err
		}
	}
	mounts, volumes, problems := r.readers.volumes(ctx)
	warn("", problems)
	r.mounts = mounts
	return volumes, ctx.Err()
}

// connect brings the network up, and returns when programs may use it.
func (r *run) connect(held context.Context) error {
	ready := make(chan struct{})
	var once sync.Once
	r.background.Go(func() {
		err := r.Connect(held, r.network.remote, func() { once.Do(func() { close(ready) }) })
		if err == nil && held.Err() == nil {
			err = errors.New("the connection to the cluster has ended")
		}
		r.lost <- err
	})
	select {
	case <-ready:
		return nil
	case err := <-r.lost:
		r.lost <- err // end takes it
		if err == nil {
			err = context.Cause(held)
		}
		return err
	case <-r.network.remote.Done():
		return r.network.gone()
	}
}

// work runs the container that the user works on. Volumes are kept fresh until watched ends.
func (r *run) work(ctx, watched context.Context) (int, error) {
	// They are the program's: this process has to outlive it.
	terminal := make(chan os.Signal, 1)
	signal.Notify(terminal, os.Interrupt, unix.SIGHUP, unix.SIGQUIT)
	defer signal.Stop(terminal)
	asked := make(chan os.Signal, 1)
	signal.Notify(asked, unix.SIGTERM)
	defer signal.Stop(asked)
	if !r.Begin() {
		<-ctx.Done() // it ends
		return 0, context.Cause(ctx)
	}
	var err error
	if r.chosen, err = r.start(ctx, len(r.plan.containers)-1); err != nil {
		return 0, err
	}
	r.background.Go(func() { r.refresh(watched) }) // the files' socket is its alone now, until end
	for {
		select {
		case <-r.chosen.ended:
			return r.chosen.exit()
		case <-terminal:
		case s := <-asked:
			r.chosen.signal(s.(syscall.Signal))
		case err := <-r.lost:
			r.lost <- err
			if err == nil {
				err = context.Cause(ctx)
			}
			return 0, err
		case <-r.network.remote.Done():
			return 0, r.network.gone()
		}
	}
}

// watch tells when a container ends that was not to.
func (r *run) watch(ctx context.Context, one *running) {
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

// end ends everything that is left, whatever it is, and removes it.
func (r *run) end() (err error) {
	grace := graceMost
	if s := r.plan.pod.Spec.TerminationGracePeriodSeconds; s != nil {
		grace = min(grace, time.Duration(*s)*time.Second)
	}
	r.ignore()
	if r.chosen != nil {
		r.chosen.close()
	}
	for _, one := range r.others {
		one.signal(unix.SIGTERM)
	}
	patience := time.NewTimer(grace)
	defer patience.Stop()
	for _, one := range r.others {
		select {
		case <-one.ended:
		case <-patience.C:
			patience.Reset(0)
		}
		one.close()
	}
	for _, one := range append(r.others, r.chosen) {
		if one != nil {
			err = errors.Join(err, r.removed(one.child))
		}
	}
	r.stop()
	r.background.Wait()
	select {
	case gone := <-r.lost:
		err = errors.Join(err, gone)
	default:
	}
	if r.network != nil {
		r.network.close()
		err = errors.Join(err, r.removed(r.network.child))
	}
	if e := r.dir.remove(); errors.Is(e, fs.ErrPermission) {
		err = errors.Join(err, r.removeAsRoot())
	} else {
		err = errors.Join(err, e)
	}
	return err
}
