package lab

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"
)

// Lab is one lab, which may or may not be up. Its methods may be called from several goroutines. Only one of Up, Down
// and Restart runs at a time, across all programs on the machine; a second call fails.
type Lab struct {
	config   Config
	progress *progress

	cgroups     *cgroups // set by prepare
	cniDir      string
	snapshotter string
	programs    programs

	mu    sync.Mutex
	state state
}

// New returns a lab without starting it.
func New(c Config) *Lab {
	c = c.withDefaults()
	return &Lab{config: c, progress: newProgress(c.Progress)}
}

// ErrNotUp means that no lab of that name is up.
var ErrNotUp = errors.New("lab is not up")

// Attach returns a lab that another program started. It uses only Name, Dir, Cache, Source and Progress of c; the
// state of the lab contains the rest.
func Attach(c Config) (*Lab, error) {
	l := New(c)
	if err := l.config.validate(); err != nil {
		return nil, err
	}
	s, err := readState(l.stateFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("%s: %w: run 'lab up'", l.config.Name, ErrNotUp)
	}
	if err != nil {
		return nil, err
	}
	l.adopt(s)
	if l.cgroups, err = newCgroups(l.config.Name); err != nil {
		return nil, err
	}
	return l, nil
}

// adopt replaces the lab's configuration with that of a state.
func (l *Lab) adopt(s state) {
	found := s.config(l.config.Dir)
	l.config.Nodes, l.config.ProxyMode = found.Nodes, found.ProxyMode
	l.config.IPv6, l.config.Ranges = found.IPv6, found.Ranges
	l.config.ProxySettings, l.config.guests = found.ProxySettings, found.guests
	l.config.NodeModes, l.config.Kubernetes = found.NodeModes, found.Kubernetes
	l.programs, l.snapshotter = s.Programs, s.Snapshotter
	l.state = s
}

// Config returns the lab's configuration with defaults filled in.
func (l *Lab) Config() Config { return l.config }

// Dir returns the lab's state directory.
func (l *Lab) Dir() string { return l.dir() }

// Kubeconfig returns the path of the kubeconfig of a user: Admin, Developer or Token. It works in the laptop's
// namespace and on the nodes.
func (l *Lab) Kubeconfig(user string) (string, error) {
	file := l.pki(user + ".kubeconfig")
	if !slices.Contains([]string{Admin, Developer, Token}, user) {
		return "", fmt.Errorf("no user %q: want %s, %s or %s", user, Admin, Developer, Token)
	}
	if _, err := os.Stat(file); err != nil {
		return "", err
	}
	return file, nil
}

// Command prepares a command that runs in one of the lab's places: "laptop", "router", "node1"... The caller owns and
// starts it. Down kills the processes that it leaves.
//
// On the laptop and the router, it runs through `ip netns exec`, with their own resolv.conf, hosts and /sys. On a node,
// it runs in the node's mount namespace or in the guest, so that ctr finds containerd. For a guest, the command is a
// stand-in, see package guest.
func (l *Lab) Command(ctx context.Context, place string, argv ...string) (*exec.Cmd, error) {
	if len(argv) == 0 {
		return nil, errors.New("no command given")
	}
	if err := l.checkPlace(place); err != nil {
		return nil, err
	}
	if !strings.HasPrefix(place, "node") {
		ip, err := systemProgram("ip")
		if err != nil {
			return nil, err
		}
		return exec.CommandContext(ctx, ip, append([]string{"netns", "exec", l.config.namespace(place)}, argv...)...),
			nil
	}
	nsenter, err := systemProgram("nsenter")
	if err != nil {
		return nil, err
	}
	if l.inGuest(place) {
		if kernel, _ := l.process("node-" + place); !kernel.Running() {
			return nil, fmt.Errorf("the guest of %s has died (%s): run 'lab down', then 'lab up'", place,
				l.logFile(kernel.Name))
		}
		args := append([]string{"--net=" + filepath.Join(netnsDir, l.config.namespace(place)), "--"},
			l.inPlace(place, "", argv...)...)
		return exec.CommandContext(ctx, nsenter, args...), nil
	}
	pid := l.holder(place)
	if pid == 0 {
		return nil, fmt.Errorf("nothing of %s is running: run 'lab down', then 'lab up'", place)
	}
	args := []string{
		"--net=" + filepath.Join(netnsDir, l.config.namespace(place)),
		fmt.Sprintf("--mount=/proc/%d/ns/mnt", pid),
		fmt.Sprintf("--uts=/proc/%d/ns/uts", pid),
		"--",
	}
	return exec.CommandContext(ctx, nsenter, append(args, argv...)...), nil
}

func (l *Lab) checkPlace(place string) error {
	places := l.config.places()
	for _, p := range places {
		if p == place {
			if _, err := os.Stat(filepath.Join(netnsDir, l.config.namespace(place))); err != nil {
				return fmt.Errorf("%s: %w: run 'lab up'", l.config.Name, ErrNotUp)
			}
			return nil
		}
	}
	return fmt.Errorf("no place %q in the lab: want %s", place, strings.Join(places, ", "))
}

// Kubectl returns a kubectl command, of the cluster's version, that runs on the laptop as a user.
func (l *Lab) Kubectl(ctx context.Context, user string, args ...string) (*exec.Cmd, error) {
	kubeconfig, err := l.Kubeconfig(user)
	if err != nil {
		return nil, err
	}
	argv := append([]string{l.programs.Kube, "kubectl", "--kubeconfig=" + kubeconfig}, args...)
	return l.Command(ctx, "laptop", argv...)
}

// Load imports an image archive (docker or OCI) into every node's containerd.
func (l *Lab) Load(ctx context.Context, file string) error {
	if _, err := os.Stat(file); err != nil {
		return err
	}
	return l.eachNode(func(n int) error { return l.loadImages(ctx, n, file) })
}

// eachNode calls f for all nodes concurrently.
func (l *Lab) eachNode(f func(n int) error) error {
	errs := make([]error, l.config.Nodes)
	var group sync.WaitGroup
	for n := range l.config.Nodes {
		group.Go(func() { errs[n] = f(n + 1) })
	}
	group.Wait()
	return errors.Join(errs...)
}

// poll calls f until it succeeds. It fails when ctx ends, when the limit is over, or when one of the named processes
// has died; the error then contains the end of its log.
func (l *Lab) poll(ctx context.Context, limit time.Duration, waitFor []string, f func(context.Context) error) error {
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	for {
		err := f(ctx)
		if err == nil {
			return nil
		}
		for _, name := range waitFor {
			if p, ok := l.process(name); ok && !p.Running() {
				return fmt.Errorf("%s has died; the end of %s:\n%s", name, l.logFile(name), l.tail(name))
			}
		}
		select {
		case <-ctx.Done():
			text := err.Error()
			for _, name := range waitFor {
				text += fmt.Sprintf("\nthe end of %s:\n%s", l.logFile(name), l.tail(name))
			}
			return fmt.Errorf("gave up after %s: %s", limit, text)
		case <-time.After(100 * time.Millisecond):
		}
	}
}
