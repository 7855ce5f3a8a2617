package lab

import (
	"context"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sys/unix"
)

// Up brings the lab up and returns when its workload answers. It first installs and builds missing programs.
//
// If a lab of this name is already up with the same shape, Up leaves it as it is; with another shape, Up fails. Up
// first removes the remains of a lab that did not come up, or that a reboot ended. If Up fails, the processes and logs
// stay for inspection until Down or the next Up. If ctx ends, Up removes them.
func (l *Lab) Up(ctx context.Context) error {
	if err := l.config.validate(); err != nil {
		return err
	}
	if os.Geteuid() != 0 {
		return errors.New("a lab needs root: it makes network namespaces and mounts")
	}
	if err := l.Install(ctx); err != nil {
		return err
	}
	unlock, err := l.lock()
	if err != nil {
		return err
	}
	defer unlock()
	if up, err := l.alreadyUp(); up || err != nil {
		return err
	}
	if err := l.Build(ctx); err != nil {
		return err
	}
	onMachine := 0
	for n := range l.config.Nodes {
		if !l.config.guest(n + 1) {
			onMachine++
		}
	}
	if err := checkInotify(onMachine); err != nil {
		return err
	}
	start := time.Now()
	if err := l.prepare(); err != nil {
		return err
	}
	if err := l.bringUp(ctx); err != nil {
		if ctx.Err() != nil {
			l.progress.say("interrupted: removing what was started")
			return errors.Join(ctx.Err(), l.remove())
		}
		return fmt.Errorf("%w\nAll logs are in %s; 'lab down%s' removes what was started.", err,
			filepath.Join(l.dir(), "log"), l.nameFlag())
	}
	if err := l.update(func(s *state) { s.Ready = true }); err != nil {
		return err
	}
	l.progress.say("lab %q is up after %s: %s", l.config.Name, seconds(start), l.config.shape())
	return nil
}

// nameFlag returns the flag that selects this lab on a command line.
func (l *Lab) nameFlag() string {
	if l.config.Name == DefaultName {
		return ""
	}
	return " --name " + l.config.Name
}

// alreadyUp reports whether a lab with this configuration is up. It removes remains of a lab.
func (l *Lab) alreadyUp() (bool, error) {
	groups, err := newCgroups(l.config.Name)
	if err != nil {
		return false, err
	}
	l.cgroups = groups
	s, err := readState(l.stateFile())
	if errors.Is(err, os.ErrNotExist) {
		left, err := l.remains()
		if err != nil || len(left) == 0 {
			return false, err
		}
		l.progress.say("removing the remains of an earlier lab %q: %s", l.config.Name, strings.Join(left, ", "))
		return false, l.remove()
	}
	if err != nil {
		l.progress.say("removing a lab %q whose state cannot be read: %v", l.config.Name, err)
		return false, l.remove()
	}
	boot, err := bootID()
	if err != nil {
		return false, err
	}
	if !s.Ready || s.BootID != boot {
		l.progress.say("removing an incomplete earlier lab %q", l.config.Name)
		return false, l.remove()
	}
	found := s.config(l.config.Dir)
	if found.shape() != l.config.shape() {
		return false, fmt.Errorf("lab %q is up with another shape (%s, not %s): run 'lab down%s' first, or choose "+
			"another --name",
			l.config.Name, found.shape(), l.config.shape(), l.nameFlag())
	}
	for _, p := range s.Processes {
		if !p.Running() {
			return false, fmt.Errorf("lab %q is up, but %s has died (%s): run 'lab restart%s %s', or 'lab down%s' "+
				"and 'lab up'",
				l.config.Name, p.Name, l.logFile(p.Name), l.nameFlag(), p.Name, l.nameFlag())
		}
	}
	l.adopt(s)
	l.progress.say("lab %q is up already: %s", l.config.Name, l.config.shape())
	return true, nil
}

// prepare creates the state directory, the keys and the control groups.
func (l *Lab) prepare() error {
	l.cniDir = findCNI()
	boot, err := bootID()
	if err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(l.dir(), "log"), 0o755); err != nil {
		return err
	}
	if err := os.MkdirAll(filepath.Join(l.dir(), "pki"), 0o700); err != nil {
		return err
	}
	c := l.config
	l.snapshotter = snapshotter(l.dir())
	err = l.update(func(s *state) {
		*s = state{
			Name: c.Name, Nodes: c.Nodes, ProxyMode: c.ProxyMode, IPv6: c.IPv6, Ranges: c.Ranges,
			ProxySettings: c.ProxySettings, NodeModes: c.NodeModes, Kubernetes: c.Kubernetes, Guests: c.guests,
			Created: time.Now(), BootID: boot, Programs: l.programs, Snapshotter: l.snapshotter,
		}
	})
	if err != nil {
		return err
	}
	if err := c.writePKI(filepath.Join(l.dir(), "pki")); err != nil {
		return err
	}
	for _, place := range c.places() {
		if place == "laptop" {
			continue // no program of the lab runs there
		}
		if err := l.cgroups.create(place, strings.HasPrefix(place, "node")); err != nil {
			return err
		}
	}
	return nil
}

// snapshotterOf returns how containerd keeps containers' files on node n. A guest has them in memory.
func (l *Lab) snapshotterOf(n int) string {
	if l.config.guest(n) {
		return "overlayfs"
	}
	return l.snapshotter
}

// snapshotter returns how containerd keeps containers' files: with overlayfs, unless dir is on a file system that does
// not support it (such as another overlay).
func snapshotter(dir string) string {
	err := onThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return err
		}
		if err := unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""); err != nil {
			return err
		}
		test := filepath.Join(dir, "overlay-test")
		defer os.RemoveAll(test)
		for _, d := range []string{"lower", "upper", "work", "merged"} {
			if err := os.MkdirAll(filepath.Join(test, d), 0o755); err != nil {
				return err
			}
		}
		options := strings.NewReplacer("DIR", test).Replace("lowerdir=DIR/lower,upperdir=DIR/upper,workdir=DIR/work")
		if err := unix.Mount("overlay", filepath.Join(test, "merged"), "overlay", 0, options); err != nil {
			return err
		}
		return unix.Unmount(filepath.Join(test, "merged"), 0)
	})
	if err != nil {
		return "native"
	}
	return "overlayfs"
}

// bringUp starts everything. The nodes' containerd starts and loads its images while the API server starts, which takes
// longest. kubelets follow when both are ready.
func (l *Lab) bringUp(ctx context.Context) error {
	done := l.progress.step("starting etcd, the API server and the nodes' containerd")
	err := l.startBase(ctx)
	done(err)
	if err != nil {
		return err
	}
	done = l.progress.step("starting kubelets, kube-proxies and the workload")
	err = l.startCluster(ctx)
	done(err)
	return err
}

func (l *Lab) startBase(ctx context.Context) error {
	if err := l.createNetwork(); err != nil {
		return err
	}
	for _, start := range []func() error{l.startEtcd, l.startAPIServer, l.startRouter} {
		if err := start(); err != nil {
			return err
		}
	}
	group, ctx := errgroup.WithContext(ctx)
	for n := 1; n <= l.config.Nodes; n++ {
		group.Go(func() error {
			if err := l.startNode(ctx, n); err != nil {
				return err
			}
			return l.loadImages(ctx, n, l.programs.Images...)
		})
	}
	group.Go(func() error {
		client, err := l.newAPI()
		if err != nil {
			return err
		}
		defer client.close()
		return l.waitAPI(ctx, client)
	})
	return group.Wait()
}

func (l *Lab) startCluster(ctx context.Context) error {
	client, err := l.newAPI()
	if err != nil {
		return err
	}
	defer client.close()
	if err := client.apply(ctx, l.config.nodesManifest()); err != nil {
		return err
	}
	for _, start := range []func() error{l.startControllers, l.startScheduler} {
		if err := start(); err != nil {
			return err
		}
	}
	if err := l.eachNode(l.startKubelet); err != nil {
		return err
	}
	if err := client.apply(ctx, l.config.manifest()); err != nil {
		return err
	}
	if err := l.writeToken(ctx, client); err != nil {
		return err
	}
	return l.waitWorkload(ctx, client)
}

// WaitReady waits until the API server is ready, all pods of the lab itself are available, and the laptop reaches the
// addresses that it should, for example after Restart. It fails when a process of the lab is dead.
func (l *Lab) WaitReady(ctx context.Context) error {
	client, err := l.newAPI()
	if err != nil {
		return err
	}
	defer client.close()
	if err := l.waitAPI(ctx, client); err != nil {
		return err
	}
	return l.waitWorkload(ctx, client)
}

// waitAPI waits until the RBAC bootstrap has ended. Before that, the API server's port is open, but controller-manager
// and scheduler exit.
func (l *Lab) waitAPI(ctx context.Context, client *api) error {
	return l.poll(ctx, time.Minute, []string{"etcd", "kube-apiserver"}, func(ctx context.Context) error {
		return client.do(ctx, "GET", "/readyz", "", nil, nil)
	})
}

func (l *Lab) waitWorkload(ctx context.Context, client *api) error {
	var components []string
	for _, p := range l.processes() {
		components = append(components, p.Name)
	}
	if err := l.poll(ctx, 5*time.Minute, components, client.workloadReady); err != nil {
		return err
	}
	if err := l.poll(ctx, 2*time.Minute, components, l.answers); err != nil {
		return err
	}
	return l.checkProxySettings()
}

// checkProxySettings fails if kube-proxy reports an unknown setting, which it otherwise ignores.
func (l *Lab) checkProxySettings() error {
	if len(l.config.ProxySettings) == 0 {
		return nil
	}
	log, err := os.ReadFile(l.logFile("kube-proxy-node1"))
	if err != nil {
		return err
	}
	return unknownSettings(string(log))
}

// unknownSettings returns an error if kube-proxy's log reports unknown settings.
func unknownSettings(log string) error {
	_, after, found := strings.Cut(log, "strict decoding failed\" err=")
	if !found {
		return nil
	}
	what, _, _ := strings.Cut(after, "\n")
	if plain, err := strconv.Unquote(what); err == nil {
		what = plain
	}
	return fmt.Errorf("kube-proxy's configuration: %s", what)
}

// writeToken requests a token for the ServiceAccount developer and writes a kubeconfig with it.
func (l *Lab) writeToken(ctx context.Context, client *api) error {
	request := fmt.Sprintf(`{"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest",
		"spec": {"expirationSeconds": %d}}`, int(lifetime.Seconds()))
	var answer struct{ Status struct{ Token string } }
	path := "/api/v1/namespaces/default/serviceaccounts/developer/token"
	if err := client.do(ctx, "POST", path, "application/json", []byte(request), &answer); err != nil {
		return err
	}
	ca, err := os.ReadFile(l.pki("ca.crt"))
	if err != nil {
		return err
	}
	return os.WriteFile(l.pki(Token+".kubeconfig"), l.config.bearer(ca, answer.Status.Token), 0o600)
}

// workloadReady checks that CoreDNS and the echo server run; the error names the missing pods.
func (a *api) workloadReady(ctx context.Context) error {
	for _, d := range []string{"kube-system/deployments/coredns", "default/deployments/web"} {
		var deployment struct {
			Metadata struct{ Generation int64 }
			Spec     struct{ Replicas int }
			Status   struct {
				ObservedGeneration int64
				AvailableReplicas  int
			}
		}
		if err := a.get(ctx, "/apis/apps/v1/namespaces/"+d, &deployment); err != nil {
			return err
		}
		s := deployment.Status
		if s.ObservedGeneration < deployment.Metadata.Generation || s.AvailableReplicas < deployment.Spec.Replicas {
			return fmt.Errorf("%s has %d of %d pods available", d, s.AvailableReplicas, deployment.Spec.Replicas)
		}
	}
	return nil
}

// answers checks that the lab works: the laptop reaches the API server and the outside, and on each node the cluster's
// Services work in each family if there is a kube-proxy, which serves the families independently.
func (l *Lab) answers(ctx context.Context) error {
	f := l.config.Families()[0]
	type target struct {
		place   string
		address netip.AddrPort
	}
	targets := []target{
		{"laptop", netip.AddrPortFrom(l.config.APIServer(f), APIPort)},
		{"laptop", netip.AddrPortFrom(f.Gateway, 53)},
		{"laptop", netip.AddrPortFrom(f.Outside, 80)},
	}
	if l.config.ProxyMode != ProxyNone {
		for n := 1; n <= l.config.Nodes; n++ {
			for _, f := range l.config.Families() {
				targets = append(targets, target{fmt.Sprintf("node%d", n), netip.AddrPortFrom(f.ClusterDNS, 53)})
			}
		}
	}
	for _, t := range targets {
		ctx, cancel := context.WithTimeout(ctx, time.Second)
		conn, err := l.Dial(ctx, t.place, "tcp", t.address.String())
		cancel()
		if err != nil {
			return fmt.Errorf("%s does not reach %s: %w", t.place, t.address, err)
		}
		conn.Close()
	}
	return nil
}
