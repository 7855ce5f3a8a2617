//go:build linux

package main

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
	"kubevpn/test/lab"
)

const imageRef = "docker.io/kubevpn/kubevpn:bench"

type bench struct {
	rounds  int
	each    time.Duration
	labName string
	only    string // what to measure; empty: everything

	*lab.Lab
	dir     string // binaries, the laptop's home
	self    string
	pod     netip.Addr // reached by kubevpn, by the port-forward and through pods/proxy
	podName string
	twin    netip.Addr // the same kind of pod, reached by the kernel's route
	forward int        // the port-forward's process
}

func (b *bench) run(ctx context.Context) (*report, error) {
	r := newReport(thisMachine(), b.each)
	return r, b.onLab(ctx, func(ctx context.Context) error { return b.measureAll(ctx, r) })
}

// onLab measures on a lab with kubevpn's programs, and removes what it made.
func (b *bench) onLab(ctx context.Context, measure func(context.Context) error) (err error) {
	if b.dir, err = os.MkdirTemp("", "kubevpn-bench-"); err != nil {
		return err
	}
	defer os.RemoveAll(b.dir)
	if b.self, err = os.Executable(); err != nil {
		return err
	}
	for _, step := range []func(context.Context) error{b.build, b.up, b.place, b.findPods} {
		if err := step(ctx); err != nil {
			return err
		}
	}
	if b.labName == "" {
		defer func() { _, _ = b.Down() }()
	}
	defer func() { _ = b.laptop(context.WithoutCancel(ctx), b.kubevpn(), "quit").Run() }()
	return measure(ctx)
}

func (b *bench) measureAll(ctx context.Context, r *report) error {
	if err := b.connects(ctx, r); err != nil {
		return err
	}
	switch b.only {
	case "intercepts":
		return b.measureIntercepts(ctx, r)
	case "datagrams":
		return b.measureDatagrams(ctx, r)
	case "requests":
		return b.measureRequests(ctx, r)
	case "recording":
		return b.measureRecording(ctx, r)
	case "diff":
		return b.measureDiff(ctx, r)
	}
	if err := b.measureRest(ctx, r); err != nil {
		return err
	}
	stop, err := b.openPaths(ctx)
	if err != nil {
		return err
	}
	defer stop()
	if err := b.measureMemory(ctx, r); err != nil {
		return err
	}
	if err := b.measureSpeed(ctx, r); err != nil {
		return err
	}
	if err := b.measureDatagrams(ctx, r); err != nil {
		return err
	}
	if err := b.measureAfter(ctx, r); err != nil {
		return err
	}
	return b.measureIntercepts(ctx, r)
}

func (b *bench) kubevpn() string { return filepath.Join(b.dir, "kubevpn") }

func (b *bench) build(ctx context.Context) error {
	say("building kubevpn and its image")
	return build.Product(ctx, b.dir, imageRef)
}

func (b *bench) up(ctx context.Context) (err error) {
	if b.labName != "" {
		b.Lab, err = lab.Attach(lab.Config{Name: b.labName})
	} else {
		b.Lab = lab.New(lab.Config{Name: "bench", Nodes: 3, Progress: os.Stderr})
		err = b.Up(ctx)
	}
	if err != nil {
		return err
	}
	return b.Load(ctx, filepath.Join(b.dir, "image.tar"))
}

// place puts the measured pod on one node and the traffic manager on another. Neither is on the control plane's node,
// because that node has a shorter path to the API server.
//
//	node1: control plane    node2: the pod    node3: its twin, the traffic manager
func (b *bench) place(ctx context.Context) error {
	node := func(n int) string { return fmt.Sprintf("%s-node%d", b.Config().Name, n) }
	for _, args := range [][]string{
		{"cordon", node(1)},
		{"delete", "pods", "-l", "app=web", "--field-selector=spec.nodeName=" + node(1)},
		{"rollout", "status", "deployment/web", "--timeout=60s"},
		{"cordon", node(2)},
	} {
		if _, err := b.kubectl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// findPods finds both pods of the lab's workload, and routes one of them to the laptop through the router. This route
// is the kernel's path, and connect excludes it.
func (b *bench) findPods(ctx context.Context) error {
	out, err := b.kubectl(ctx, "get", "pods", "-l", "app=web", "--field-selector=status.phase=Running",
		"-o", `jsonpath={range .items[*]}{.spec.nodeName} {.metadata.name} {.status.podIP} {.status.hostIP}{"\n"}{end}`)
	if err != nil {
		return err
	}
	lines := strings.Split(strings.TrimSpace(out), "\n")
	slices.Sort(lines)
	if len(lines) != 2 || !strings.Contains(lines[0], "-node2 ") || !strings.Contains(lines[1], "-node3 ") {
		return fmt.Errorf("want the workload's two pods on node2 and node3, found %q", lines)
	}
	var addrs [2]netip.Addr
	var names [2]string
	var host string
	for i, line := range lines {
		fields := strings.Fields(line)
		if len(fields) != 4 {
			return fmt.Errorf("a pod without addresses: %q", line)
		}
		if addrs[i], err = netip.ParseAddr(fields[2]); err != nil {
			return err
		}
		names[i], host = fields[1], fields[3]
	}
	b.pod, b.podName, b.twin = addrs[0], names[0], addrs[1]
	family := b.Config().Families()[0]
	// Connections that the client closes first hold their port for a minute. A laptop that opens thousands a second to
	// one address runs out of ports, and measures the kernel's search for one.
	ports := []string{"laptop", "sysctl", "-qw", "net.ipv4.ip_local_port_range=1024 65535", "net.ipv4.tcp_tw_reuse=1"}
	for _, route := range [][]string{
		ports,
		{"router", "ip", "route", "replace", b.twin.String(), "via", host},
		{"laptop", "ip", "route", "replace", b.twin.String(), "via", family.Gateway.String()},
	} {
		cmd, err := b.Command(ctx, route[0], route[1:]...)
		if err != nil {
			return err
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("%s: %w: %s", strings.Join(route, " "), err, out)
		}
	}
	return nil
}

// laptop prepares a command on the laptop, with its own home.
func (b *bench) laptop(ctx context.Context, argv ...string) *exec.Cmd {
	kubeconfig, err := b.Kubeconfig(lab.Admin)
	if err != nil {
		return &exec.Cmd{Err: err}
	}
	home := filepath.Join(b.dir, "home")
	if err := os.MkdirAll(home, 0o700); err != nil {
		return &exec.Cmd{Err: err}
	}
	env := []string{
		"env", "HOME=" + home, "XDG_RUNTIME_DIR=" + home, "XDG_STATE_HOME=" + home, "XDG_CONFIG_HOME=" + home,
		"KUBECONFIG=" + kubeconfig, "KUBEVPN_IMAGE=" + imageRef, "KUBEVPN_YES=true",
	}
	cmd, err := b.Command(ctx, "laptop", append(env, argv...)...)
	if err != nil {
		return &exec.Cmd{Err: err}
	}
	return cmd
}

// connects times `kubevpn connect`: first without a manager, then with a running manager.
func (b *bench) connects(ctx context.Context, r *report) error {
	for i := range b.rounds + 1 {
		say("kubevpn connect, %d of %d", i+1, b.rounds+1)
		start := time.Now()
		if out, err := b.connect(ctx, "--netstack", "gvisor"); err != nil {
			return fmt.Errorf("kubevpn connect: %w\n%s", err, out)
		}
		if took := time.Since(start).Seconds(); i == 0 {
			r.add("connect, manager to be installed", all, took)
		} else {
			r.add("connect, manager running", all, took)
		}
		if i < b.rounds {
			if out, err := b.disconnect(ctx); err != nil {
				return fmt.Errorf("kubevpn disconnect: %w\n%s", err, out)
			}
		}
	}
	return nil
}

func (b *bench) connect(ctx context.Context, args ...string) ([]byte, error) {
	return b.laptop(ctx, append([]string{b.kubevpn(), "connect", "--exclude-cidr", b.twin.String() + "/32"},
		args...)...).CombinedOutput()
}

// connectBy connects again, and waits until the transport is in use.
func (b *bench) connectBy(ctx context.Context, netstack, transport string) error {
	if out, err := b.disconnect(ctx); err != nil {
		return fmt.Errorf("kubevpn disconnect: %w\n%s", err, out)
	}
	if out, err := b.connect(ctx, "--netstack", netstack, "--transport", transport); err != nil {
		return fmt.Errorf("kubevpn connect --netstack %s --transport %s: %w\n%s", netstack, transport, err, out)
	}
	return testenv.Poll(30*time.Second, func() error {
		out, err := b.laptop(ctx, b.kubevpn(), "status", "-o", "json").Output()
		if err != nil {
			return fmt.Errorf("kubevpn status: %w", err)
		}
		var status api.Status
		if err := json.Unmarshal(out, &status); err != nil {
			return fmt.Errorf("reading the status: %w", err)
		}
		if len(status.Connections) != 1 {
			return fmt.Errorf("the status has %d connections", len(status.Connections))
		}
		c := status.Connections[0]
		for _, t := range c.Transports {
			if t.Name == transport && t.State == api.TransportInUse && c.Netstack == netstack {
				return nil
			}
		}
		return fmt.Errorf("netstack %s with the transports %+v is in use", c.Netstack, c.Transports)
	})
}

func (b *bench) disconnect(ctx context.Context) ([]byte, error) {
	return b.laptop(ctx, b.kubevpn(), "disconnect", "--all").CombinedOutput()
}

// openPaths starts the port-forward. The other paths need nothing but kubevpn's connection.
func (b *bench) openPaths(ctx context.Context) (stop func(), err error) {
	return b.forwardTo(ctx, echoPort, sinkPort, sourcePort, silentPort)
}

// forwardTo starts a port-forward to ports of the pod.
func (b *bench) forwardTo(ctx context.Context, ports ...int) (stop func(), err error) {
	args := []string{"kubectl", "port-forward", "pod/" + b.podName}
	for _, p := range ports {
		args = append(args, fmt.Sprintf("%d:%d", p+forwardOffset, p))
	}
	cmd := b.laptop(ctx, args...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return nil, fmt.Errorf("kubectl port-forward: %w", errors.Join(cmd.Wait(), errors.New(stderr.String())))
	}
	b.forward = cmd.Process.Pid // ip and env replace themselves with it
	go io.Copy(io.Discard, out)
	return func() { _ = cmd.Process.Kill(); _ = cmd.Wait() }, nil
}

// expose lets the laptop reach the manager by a node port, for the transport direct.
func (b *bench) expose(ctx context.Context) error {
	if out, err := b.laptop(ctx, b.kubevpn(), "install", "--expose", "nodeport").CombinedOutput(); err != nil {
		return fmt.Errorf("kubevpn install --expose nodeport: %w\n%s", err, out)
	}
	return nil
}

// measureSpeed makes all measurements round by round, by every path in each round, so that other load on the machine
// affects all of them.
func (b *bench) measureSpeed(ctx context.Context, r *report) error {
	if err := b.expose(ctx); err != nil {
		return err
	}
	for round := range b.rounds {
		for _, s := range stages {
			if err := b.connectBy(ctx, s.netstack, s.transport); err != nil {
				return err
			}
			for _, m := range measurements {
				for _, p := range append(slices.Clone(s.beside), s.path) {
					if p == upgraded && m.kind == "connect" {
						continue // each connection is a separate request: nothing to compare with
					}
					got, err := b.measureOne(ctx, r, m, p)
					if err != nil {
						return fmt.Errorf("%s, %s: %w", m.row, p, err)
					}
					say("round %d of %d: %s, %s: %.0f", round+1, b.rounds, m.row, p, m.value(got))
				}
			}
		}
	}
	return nil
}

// measureOne makes one measurement by one path, and adds all its results to the report.
func (b *bench) measureOne(ctx context.Context, r *report, m measurement, p path) (measured, error) {
	w := work{Kind: m.kind, Target: b.target(p, m.port), Flows: m.flows, Duration: b.each}
	if m.beside != nil {
		w.Beside = &work{Kind: m.beside.kind, Target: b.target(p, m.beside.port), Flows: m.beside.flows}
	}
	if p == upgraded {
		w.Pod = b.podName
	}
	watched, err := b.processes()
	if err != nil {
		return measured{}, err
	}
	switch {
	case p == portForward:
		w.Laptop = []int{b.forward}
	case p.ours():
		w.Laptop = watched.laptop
	}
	var got measured
	peak, err := watched.peak(func() (err error) {
		got, err = b.measure(ctx, w)
		return err
	})
	if err != nil {
		return measured{}, err
	}
	r.add(m.row, p, m.value(got))
	if m.bulk() {
		r.add(processorRow(m.row), p, got.CPUs)
		r.add(laptopRow(m.row), p, got.LaptopCPUs)
	}
	if m.bulk() && m.flows > 1 && p.ours() {
		r.add(memoryRow(m.row, p), laptopSide, peak.laptop/1e6)
		r.add(memoryRow(m.row, p), managerSide, peak.manager/1e6)
	}
	return got, nil
}

func (b *bench) measure(ctx context.Context, w work) (measured, error) {
	ctx, cancel := context.WithTimeout(ctx, 2*w.Duration+30*time.Second)
	defer cancel()
	spec, err := json.Marshal(w)
	if err != nil {
		return measured{}, err
	}
	argv := []string{b.self, "-client", string(spec)}
	if strings.HasPrefix(w.Kind, "udp-") {
		argv = append(atOnce(), argv...)
	}
	cmd := b.laptop(ctx, argv...)
	var stderr bytes.Buffer
	cmd.Stderr = &stderr
	out, err := cmd.Output()
	if err != nil {
		return measured{}, fmt.Errorf("%w: %s", err, stderr.String())
	}
	var m measured
	return m, json.Unmarshal(out, &m)
}

func say(format string, args ...any) { fmt.Fprintf(os.Stderr, "bench: "+format+"\n", args...) }
