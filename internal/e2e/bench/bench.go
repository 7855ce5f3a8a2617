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

	"kubevpn/internal/e2e/build"
	"kubevpn/internal/lab"
)

const imageRef = "docker.io/kubevpn/kubevpn:bench"

// The ports of the echo server (internal/lab/echo) and where the port-forward listens for them.
const (
	echoPort, sinkPort, sourcePort, silentPort = 9001, 9002, 9003, 9007
	forwardOffset                              = 10000
)

// path is one way from the laptop to the pod.
type path string

const (
	kernel      path = "kernel, routed"
	portForward path = "kubectl port-forward"
	gvisor      path = "kubevpn, gvisor"
	system      path = "kubevpn, system"
)

// netstacks are the paths that are kubevpn's, each with its value of --netstack.
var netstacks = []struct {
	path path
	name string
}{{gvisor, "gvisor"}, {system, "system"}}

type bench struct {
	rounds  int
	each    time.Duration
	labName string

	*lab.Lab
	dir  string // binaries, the laptop's home
	self string
	pod  netip.Addr // reached by kubevpn and by the port-forward
	twin netip.Addr // the same kind of pod, reached by the kernel's route
}

func (b *bench) run(ctx context.Context) (*report, error) {
	var err error
	if b.dir, err = os.MkdirTemp("", "kubevpn-bench-"); err != nil {
		return nil, err
	}
	defer os.RemoveAll(b.dir)
	if b.self, err = os.Executable(); err != nil {
		return nil, err
	}
	for _, step := range []func(context.Context) error{b.build, b.up, b.place, b.findPods} {
		if err := step(ctx); err != nil {
			return nil, err
		}
	}
	if b.labName == "" {
		defer b.Down()
	}
	defer b.laptop(context.WithoutCancel(ctx), b.kubevpn(), "quit").Run()
	r := newReport()
	if err := errors.Join(b.connects(ctx, r), b.measureRest(ctx, r)); err != nil {
		return nil, err
	}
	stop, err := b.openPaths(ctx)
	if err != nil {
		return nil, err
	}
	defer stop()
	if err := b.measureMemory(ctx, r); err != nil {
		return nil, err
	}
	return r, b.measureSpeed(ctx, r)
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

// place gives the pod that is measured and the traffic manager a node each, neither of which is the control plane's: the
// node that is has a shorter way to the API server, and whoever happened to be there would win.
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
		cmd, err := b.Kubectl(ctx, lab.Admin, args...)
		if err != nil {
			return err
		}
		if out, err := cmd.CombinedOutput(); err != nil {
			return fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
		}
	}
	return nil
}

// findPods takes both pods of the lab's workload, and routes one of them to the laptop through the router: that is the
// kernel's path, which connect is told to leave alone.
func (b *bench) findPods(ctx context.Context) error {
	cmd, err := b.Kubectl(ctx, lab.Admin, "get", "pods", "-l", "app=web", "--field-selector=status.phase=Running",
		"-o", `jsonpath={range .items[*]}{.spec.nodeName} {.status.podIP} {.status.hostIP}{"\n"}{end}`)
	if err != nil {
		return err
	}
	out, err := cmd.Output()
	if err != nil {
		return fmt.Errorf("listing the pods: %w", err)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	slices.Sort(lines)
	if len(lines) != 2 || !strings.Contains(lines[0], "-node2 ") || !strings.Contains(lines[1], "-node3 ") {
		return fmt.Errorf("want the workload's two pods on node2 and node3, found %q", lines)
	}
	var addrs [2]netip.Addr
	var host string
	for i, line := range lines {
		fields := strings.Fields(line)
		if len(fields) != 3 {
			return fmt.Errorf("a pod without addresses: %q", line)
		}
		if addrs[i], err = netip.ParseAddr(fields[1]); err != nil {
			return err
		}
		host = fields[2]
	}
	b.pod, b.twin = addrs[0], addrs[1]
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

// laptop makes a command there, with a home of its own.
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
		"KUBECONFIG=" + kubeconfig, "KUBEVPN_IMAGE=" + imageRef,
	}
	cmd, err := b.Command(ctx, "laptop", append(env, argv...)...)
	if err != nil {
		return &exec.Cmd{Err: err}
	}
	return cmd
}

// connects times `kubevpn connect`, first with the manager to be installed, then with it running.
func (b *bench) connects(ctx context.Context, r *report) error {
	for i := range b.rounds + 1 {
		say("kubevpn connect, %d of %d", i+1, b.rounds+1)
		start := time.Now()
		if out, err := b.connect(ctx, "gvisor"); err != nil {
			return fmt.Errorf("kubevpn connect: %w\n%s", err, out)
		}
		if took := time.Since(start).Seconds(); i == 0 {
			r.add("connect, manager to be installed", gvisor, took)
		} else {
			r.add("connect, manager running", gvisor, took)
		}
		if i < b.rounds {
			if out, err := b.disconnect(ctx); err != nil {
				return fmt.Errorf("kubevpn disconnect: %w\n%s", err, out)
			}
		}
	}
	return nil
}

func (b *bench) connect(ctx context.Context, netstack string) ([]byte, error) {
	return b.laptop(ctx, b.kubevpn(), "connect", "--netstack", netstack, "--exclude-cidr", b.twin.String()+"/32").CombinedOutput()
}

func (b *bench) disconnect(ctx context.Context) ([]byte, error) {
	return b.laptop(ctx, b.kubevpn(), "disconnect", "--all").CombinedOutput()
}

// openPaths starts the port-forward; kubevpn is connected, the kernel's route is there.
func (b *bench) openPaths(ctx context.Context) (stop func(), err error) {
	args := []string{"kubectl", "port-forward", "pod/" + b.podName(ctx)}
	for _, p := range []int{echoPort, sinkPort, sourcePort, silentPort} {
		args = append(args, fmt.Sprintf("%d:%d", p+forwardOffset, p))
	}
	cmd := b.laptop(ctx, args...)
	out, err := cmd.StdoutPipe()
	if err != nil {
		return nil, err
	}
	if err := cmd.Start(); err != nil {
		return nil, err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return nil, fmt.Errorf("kubectl port-forward: %w", err)
	}
	go io.Copy(io.Discard, out)
	return func() { cmd.Process.Kill(); cmd.Wait() }, nil
}

func (b *bench) podName(ctx context.Context) string {
	cmd, err := b.Kubectl(ctx, lab.Admin, "get", "pods", "-l", "app=web", "--sort-by=.metadata.name", "-o",
		`jsonpath={range .items[?(@.status.podIP=="`+b.pod.String()+`")]}{.metadata.name}{end}`)
	if err != nil {
		return ""
	}
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(out))
}

func (b *bench) target(p path, port int) string {
	switch p {
	case kernel:
		return netip.AddrPortFrom(b.twin, uint16(port)).String()
	case portForward:
		return fmt.Sprintf("127.0.0.1:%d", port+forwardOffset)
	}
	return netip.AddrPortFrom(b.pod, uint16(port)).String()
}

// measurement is one way to use a path.
type measurement struct {
	row   string
	kind  string
	port  int
	flows int
	value func(measured) float64
}

var measurements = []measurement{
	{"down, 1 flow", "down", sourcePort, 1, func(m measured) float64 { return m.MBps }},
	{"down, 8 flows", "down", sourcePort, 8, func(m measured) float64 { return m.MBps }},
	{"up, 1 flow", "up", sinkPort, 1, func(m measured) float64 { return m.MBps }},
	{"up, 8 flows", "up", sinkPort, 8, func(m measured) float64 { return m.MBps }},
	{"round trip of 1 byte, median", "rtt", echoPort, 1, func(m measured) float64 { return m.P50us }},
	{"the same beside an upload", "loaded", echoPort, 1, func(m measured) float64 { return m.P50us }},
	{"new connections, 128 at a time", "connect", echoPort, 128, func(m measured) float64 { return m.PerS }},
}

// processorRow is the second figure of a bulk measurement.
func processorRow(row string) string { return row + ": processor time per GB" }

// measureSpeed goes through all measurements round by round, in each round once for each netstack, the paths one after
// the other, so that what else the machine does falls on all of them.
func (b *bench) measureSpeed(ctx context.Context, r *report) error {
	for round := range b.rounds {
		for _, n := range netstacks {
			if out, err := b.disconnect(ctx); err != nil {
				return fmt.Errorf("kubevpn disconnect: %w\n%s", err, out)
			}
			if out, err := b.connect(ctx, n.name); err != nil {
				return fmt.Errorf("kubevpn connect --netstack %s: %w\n%s", n.name, err, out)
			}
			for _, m := range measurements {
				for _, p := range []path{kernel, portForward, n.path} {
					got, err := b.measure(ctx, work{
						Kind: m.kind, Target: b.target(p, m.port), Sink: b.target(p, sinkPort), Flows: m.flows, Duration: b.each,
					})
					if err != nil {
						return fmt.Errorf("%s, %s: %w", m.row, p, err)
					}
					r.add(m.row, p, m.value(got))
					if got.CPUs > 0 {
						r.add(processorRow(m.row), p, got.CPUs)
					}
					say("round %d of %d: %s, %s: %.0f", round+1, b.rounds, m.row, p, m.value(got))
				}
			}
		}
	}
	return nil
}

func (b *bench) measure(ctx context.Context, w work) (measured, error) {
	ctx, cancel := context.WithTimeout(ctx, w.Duration+30*time.Second)
	defer cancel()
	spec, err := json.Marshal(w)
	if err != nil {
		return measured{}, err
	}
	cmd := b.laptop(ctx, b.self, "-client", string(spec))
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
