//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
	"kubevpn/test/lab"
)

// imageRef is the image that the suites install. It exists only in clusters into which it was loaded.
const imageRef = "docker.io/kubevpn/kubevpn:e2e"

// bin contains the product's binaries and image. TestMain builds it once per run.
var bin string

func TestMain(m *testing.M) { os.Exit(run(m)) }

func run(m *testing.M) int {
	testenv.AllowHangups()
	if os.Geteuid() != 0 {
		fmt.Fprintln(os.Stderr, "SKIPPED: the end-to-end suites need root: they make network namespaces and run a cluster")
		if os.Getenv("CI") == "true" {
			return 1
		}
		return 0
	}
	dir, err := os.MkdirTemp("", "kubevpn-e2e-")
	if err == nil {
		defer os.RemoveAll(dir)
		// The ordinary user of the laptop runs the binary too.
		err = os.Chmod(dir, 0o755)
	}
	if err == nil {
		err = build.Product(context.Background(), dir, imageRef)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	bin = dir

	var stop context.CancelFunc
	interrupted, stop = signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	// Catch SIGPIPE, because the reader of the output may exit before the labs are down. The programs that the tests
	// start get the default action for a caught signal, but not for an ignored one.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	unhook := context.AfterFunc(interrupted, func() {
		removeLabs()
		os.RemoveAll(dir)
		os.Exit(1)
	})
	code := m.Run()
	unhook()
	stop()
	return code
}

var (
	// interrupted is done when SIGINT or SIGTERM ends the run.
	interrupted context.Context
	// started contains the labs that the run started (*lab.Lab), for removeLabs.
	started sync.Map
)

// start starts a lab and takes it down after the test, also if a signal ends the run.
func start(t *testing.T, l *lab.Lab) error {
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	defer context.AfterFunc(interrupted, cancel)()
	t.Cleanup(func() {
		if _, err := l.Down(); err != nil {
			t.Errorf("taking the lab down: %v", err)
		}
	})
	started.Store(l, nil)
	return l.Up(ctx)
}

// removeLabs takes down the labs of a run that a signal ends. A lab is locked while it starts or stops.
func removeLabs() {
	for l := range started.Range {
		err := testenv.Poll(time.Minute, func() error {
			_, err := l.(*lab.Lab).Down()
			return err
		})
		if err != nil {
			fmt.Fprintln(os.Stderr, err)
		}
	}
}

// soon is the limit for an operation of a second or two, with room for a busy machine. Tests log how long it took.
const soon = 20 * time.Second

const (
	transportVariable = "KUBEVPN_E2E_TRANSPORT"
	suiteVariable     = "KUBEVPN_E2E_SUITE"
)

// world is one cluster into which the product's image was loaded.
type world struct {
	*lab.Lab
	netstack  string // that laptops request; empty: kubevpn chooses
	transport string // that laptops request; empty: kubevpn chooses
}

// in returns the same cluster for laptops that request a netstack.
func (w *world) in(netstack string) *world { return &world{w.Lab, netstack, w.transport} }

// by returns the same cluster for laptops that request a transport.
func (w *world) by(transport string) *world { return &world{w.Lab, w.netstack, transport} }

// isSystem reports whether laptops request the system netstack, in which the cluster's kernels serve ClusterIPs.
func (w *world) isSystem() bool { return w.netstack == "system" }

// tellLeaks logs the queries for cluster names that left the cluster during the test. They are a fault only while
// kubevpn is connected: after a kill -9, for example, programs query their previous nameserver.
func (w *world) tellLeaks(t *testing.T) {
	t.Helper()
	before, err := w.Queries()
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		all, err := w.Queries()
		if err != nil {
			t.Error(err)
			return
		}
		for _, q := range ofTheCluster(all[min(len(before), len(all)):]) {
			t.Logf("asked outside: %+v", q)
		}
	})
}

// labs limits how many labs run in parallel. Suites wait half of the time: two processors serve two labs, and three keep
// them so busy that programs time out. Each lab, with those that its suites add, takes up to 128 inotify instances, which
// is Debian's limit: then labs run one at a time. .ci/run raises the limit.
var labs = make(chan struct{}, labsSideBySide())

func labsSideBySide() int {
	text, err := os.ReadFile("/proc/sys/fs/inotify/max_user_instances")
	if err != nil {
		return 1
	}
	instances, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		return 1
	}
	return min(max(instances/128, 1), 2)
}

// queue is closed when the last test of the queue for a lab has got it. Tests get labs in the order of the source: a long
// test must not be the last.
var queue = closed()

func closed() chan struct{} {
	c := make(chan struct{})
	close(c)
	return c
}

// newWorld starts a cluster for the test of these suites, which then runs in parallel with others. If KUBEVPN_E2E_LAB
// names a lab, it attaches to that lab if the configuration fits. All laptops request the transport of
// KUBEVPN_E2E_TRANSPORT, if it is set. A test without the suite of KUBEVPN_E2E_SUITE is skipped.
func newWorld(t *testing.T, c lab.Config, suites ...[]suite) *world {
	t.Helper()
	if len(selected(suites)) == 0 {
		t.Skipf("this test does not contain the suite %s", os.Getenv(suiteVariable))
	}
	testenv.NeedRoot(t)
	if name := os.Getenv("KUBEVPN_E2E_LAB"); name != "" {
		l, err := lab.Attach(lab.Config{Name: name})
		if err != nil {
			t.Fatal(err)
		}
		got := l.Config()
		if got.ProxyMode != c.ProxyMode || got.IPv6 != c.IPv6 || !slices.Equal(got.NodeModes, c.NodeModes) {
			t.Skipf("SKIPPED: lab %s has kube-proxy %s%v and IPv6 %v, this suite wants %s%v and %v", name, got.ProxyMode, got.NodeModes, got.IPv6, c.ProxyMode, c.NodeModes, c.IPv6)
		}
		w := &world{Lab: l, transport: os.Getenv(transportVariable)}
		w.loadImage(t)
		return w
	}
	turn, next := queue, make(chan struct{})
	queue = next
	t.Parallel()
	<-turn
	labs <- struct{}{}
	close(next)
	t.Cleanup(func() { <-labs })
	c.Progress = os.Stderr
	l := lab.New(c)
	if _, err := l.Down(); err != nil { // of a run that was killed
		t.Fatal(err)
	}
	if err := start(t, l); err != nil {
		t.Fatal(err)
	}
	w := &world{Lab: l, transport: os.Getenv(transportVariable)}
	w.loadImage(t)
	return w
}

func (w *world) loadImage(t *testing.T) {
	t.Helper()
	if err := w.Load(t.Context(), filepath.Join(bin, "image.tar")); err != nil {
		t.Fatal(err)
	}
}

// kubectl runs kubectl as the admin and returns its output.
func (w *world) kubectl(t *testing.T, args ...string) string {
	t.Helper()
	out, err := w.tryKubectl(t.Context(), args...)
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func (w *world) tryKubectl(ctx context.Context, args ...string) (string, error) {
	cmd, err := w.Kubectl(ctx, lab.Admin, args...)
	if err != nil {
		return "", err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("kubectl %s: %w: %s", strings.Join(args, " "), err, out)
	}
	return strings.TrimSpace(string(out)), nil
}

// apply applies a manifest and deletes its objects after the test.
func (w *world) apply(t *testing.T, manifest string) {
	t.Helper()
	file := filepath.Join(t.TempDir(), "manifest.yaml")
	if err := os.WriteFile(file, []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	// Objects of an earlier suite may still be terminating.
	testenv.Eventually(t, 90*time.Second, func() error {
		out, err := w.tryKubectl(t.Context(), "apply", "-f", file)
		said := fmt.Sprint(out, err)
		switch goes := strings.Contains(said, "currently being deleted") || strings.Contains(said, "being terminated"); {
		case goes:
			err = errors.New(said)
		case err != nil:
			t.Fatal(err)
		}
		return err
	})
	t.Cleanup(func() {
		if _, err := w.tryKubectl(context.WithoutCancel(t.Context()), "delete", "--ignore-not-found", "--wait=false", "-f", file); err != nil {
			t.Error(err)
		}
	})
}

// pods returns the primary addresses of the running pods with a label.
func (w *world) pods(t *testing.T, namespace, selector string) []netip.Addr {
	t.Helper()
	out := w.kubectl(t, "-n", namespace, "get", "pods", "-l", selector, "--field-selector=status.phase=Running",
		"-o", `jsonpath={range .items[*]}{.status.podIP}{"\n"}{end}`)
	var addrs []netip.Addr
	for line := range strings.FieldsSeq(out) {
		addrs = append(addrs, netip.MustParseAddr(line))
	}
	if len(addrs) == 0 {
		t.Fatalf("no pod with %s in %s", selector, namespace)
	}
	return addrs
}

// clusterIP returns the first ClusterIP of a Service.
func (w *world) clusterIP(t *testing.T, namespace, name string) string {
	t.Helper()
	return w.kubectl(t, "-n", namespace, "get", "service", name, "-o", "jsonpath={.spec.clusterIP}")
}

// laptop is the machine of one developer: the laptop's network namespace, its own home and a kubeconfig.
type laptop struct {
	*world
	home       string
	kubeconfig string
	program    string   // kubevpn
	uid        uint32   // 0: root
	asks       bool     // commands ask for consent instead of assuming --yes
	within     []string // a command that runs the laptop's commands as its arguments; may be nil
}

// newLaptop creates a laptop for one of the lab's users and stops its daemon after the test.
func (w *world) newLaptop(t *testing.T, user string) *laptop {
	t.Helper()
	kubeconfig, err := w.Kubeconfig(user)
	if err != nil {
		t.Fatal(err)
	}
	l := &laptop{world: w, home: t.TempDir(), kubeconfig: kubeconfig, program: filepath.Join(bin, "kubevpn")}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		if r := l.runContext(ctx, t, "kubevpn", "quit"); r.code != 0 {
			t.Errorf("kubevpn quit: %v", r)
		}
		if t.Failed() {
			log, err := os.ReadFile(filepath.Join(l.home, "state", "kubevpn", "daemon.log"))
			if err == nil {
				t.Logf("daemon.log:\n%s", tail(string(log), 60))
			}
		}
	})
	return l
}

func tail(s string, lines int) string {
	all := strings.Split(strings.TrimRight(s, "\n"), "\n")
	return strings.Join(all[max(0, len(all)-lines):], "\n")
}

// result is the outcome of a command on the laptop.
type result struct {
	command        string
	stdout, stderr string
	code           int
	took           time.Duration
}

func (r result) String() string {
	return fmt.Sprintf("%s: exit %d after %v\nstdout: %s\nstderr: %s", r.command, r.code, r.took.Round(time.Millisecond), r.stdout, r.stderr)
}

// command prepares a command on the laptop; "kubevpn" is the laptop's program, usually the binary under test.
func (l *laptop) command(ctx context.Context, t *testing.T, argv ...string) *exec.Cmd {
	t.Helper()
	if argv[0] == "kubevpn" {
		argv = append([]string{l.program}, argv[1:]...)
	}
	argv = append([]string{"env", "-i"}, append(l.environment(), argv...)...)
	if l.uid != 0 {
		id := fmt.Sprint(l.uid)
		argv = append([]string{"setpriv", "--reuid", id, "--regid", id, "--clear-groups", "--"}, argv...)
	}
	cmd, err := l.Command(ctx, "laptop", append(slices.Clone(l.within), argv...)...)
	if err != nil {
		t.Fatal(err)
	}
	cmd.WaitDelay = 5 * time.Second
	return cmd
}

func (l *laptop) environment() []string {
	env := []string{
		"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
		"HOME=" + l.home,
		"XDG_RUNTIME_DIR=" + filepath.Join(l.home, "run"),
		"XDG_STATE_HOME=" + filepath.Join(l.home, "state"),
		"XDG_CONFIG_HOME=" + filepath.Join(l.home, "config"),
		"KUBECONFIG=" + l.kubeconfig,
		"KUBEVPN_IMAGE=" + imageRef,
	}
	if !l.asks {
		env = append(env, "KUBEVPN_YES=true") // in most suites, another laptop installed the manager
	}
	if l.netstack != "" {
		env = append(env, "KUBEVPN_NETSTACK="+l.netstack)
	}
	if l.transport != "" {
		env = append(env, "KUBEVPN_TRANSPORT="+l.transport)
	}
	return env
}

func (l *laptop) runContext(ctx context.Context, t *testing.T, argv ...string) result {
	t.Helper()
	if err := os.MkdirAll(filepath.Join(l.home, "run"), 0o700); err != nil {
		t.Fatal(err)
	}
	cmd := l.command(ctx, t, argv...)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	start := time.Now()
	err := cmd.Run()
	r := result{command: strings.Join(argv, " "), stdout: stdout.String(), stderr: stderr.String(), took: time.Since(start)}
	var exit *exec.ExitError
	switch {
	case errors.As(err, &exit):
		r.code = exit.ExitCode()
	case err != nil:
		t.Fatalf("%s: %v", r.command, err)
	}
	return r
}

// run runs a command on the laptop, for at most 90 seconds.
func (l *laptop) run(t *testing.T, argv ...string) result {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), 4*time.Minute)
	defer cancel()
	return l.runContext(ctx, t, argv...)
}

// must runs a command that must succeed and returns its trimmed standard output.
func (l *laptop) must(t *testing.T, argv ...string) string {
	t.Helper()
	r := l.run(t, argv...)
	if r.code != 0 {
		t.Fatal(r)
	}
	return strings.TrimSpace(r.stdout)
}

// sh runs a shell script on the laptop.
func (l *laptop) sh(t *testing.T, format string, args ...any) result {
	t.Helper()
	return l.run(t, "sh", "-c", fmt.Sprintf(format, args...))
}

// hosts returns how many of the requests each pod answered.
func (l *laptop) hosts(t *testing.T, url string, requests int) map[string]int {
	t.Helper()
	hosts := map[string]int{}
	for range requests {
		e, err := l.get(t, url)
		if err != nil {
			t.Fatal(err)
		}
		hosts[e.Host]++
	}
	return hosts
}

// connect runs `kubevpn connect`, which must succeed, and disconnects after the test.
func (l *laptop) connect(t *testing.T, args ...string) result {
	t.Helper()
	r := l.run(t, append([]string{"kubevpn", "connect"}, args...)...)
	if r.code != 0 {
		t.Error(r) // first, because only the beginning of a long output is kept
		if r.code == int(api.ExitNetstack) {
			l.world.logFlows(t)
		}
		t.FailNow()
	}
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 30*time.Second)
		defer cancel()
		if r := l.runContext(ctx, t, "kubevpn", "disconnect", "--all"); r.code != 0 {
			t.Errorf("%v", r)
		}
	})
	return r
}

// logFlows logs the nodes' flows to cluster DNS, because an old flow may block a new one.
func (w *world) logFlows(t *testing.T) {
	t.Helper()
	for n := range w.Config().Nodes {
		cmd, err := w.Command(t.Context(), fmt.Sprintf("node%d", n+1), "sh", "-c",
			"conntrack -L | grep port=53; ipvsadm -Ln; ipvsadm -Lnc | grep :53")
		if err != nil {
			t.Error(err)
			continue
		}
		out, err := cmd.CombinedOutput() // only IPVS' nodes have ipvsadm
		t.Logf("flows of node %d: %v\n%s", n+1, err, out)
	}
}

// status returns the result of `kubevpn status -o json`.
func (l *laptop) status(t *testing.T) api.Status {
	t.Helper()
	var s api.Status
	if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "status", "-o", "json")), &s); err != nil {
		t.Fatal(err)
	}
	return s
}

// connection returns the laptop's only connection.
func (l *laptop) connection(t *testing.T) api.Connection {
	t.Helper()
	s := l.status(t)
	if len(s.Connections) != 1 {
		t.Fatalf("%d connections, want 1: %+v", len(s.Connections), s.Connections)
	}
	return s.Connections[0]
}

// volatile matches the parts that differ between two snapshots of an unchanged machine: counters, ages, timers, device indexes.
// ip looks up the names of all network namespaces, and complains about one that another program removes at that time.
var volatile = regexp.MustCompile(`packets \d+ bytes \d+|(gc|hello|tcn|topology_change)_timer +\S+|expires \d+sec|valid_lft \S+|preferred_lft \S+|\[\d+:\d+\]|(?m)^# .*$|` +
	`^Error: Peer netns reference is invalid\.\n`)

// snapshot returns every part of the laptop's network configuration that a VPN could change.
func (l *laptop) snapshot(t *testing.T) string {
	t.Helper()
	r := l.sh(t, `
		for c in "ip -d link" "ip addr" "ip rule" "ip -6 rule" "ip route show table all" "ip -6 route show table all" \
			"nft list ruleset" "iptables-save" "ip6tables-save" "stat -c %%N,%%y,%%a,%%U,inode=%%i /etc/resolv.conf /etc/hosts" \
			"cat /etc/resolv.conf /etc/hosts" "ls -A /var/lib/kubevpn" \
			"grep -rs . /proc/sys/net/ipv4/conf /proc/sys/net/ipv6/conf /proc/sys/net/ipv4/ip_forward /proc/sys/net/ipv4/ping_group_range"; do
			echo "== $c"; $c 2>&1
		done`)
	return volatile.ReplaceAllString(r.stdout, "")
}

// sameAs fails the test if the laptop's network has changed.
func (l *laptop) sameAs(t *testing.T, before string) {
	t.Helper()
	if d := cmp.Diff(before, l.snapshot(t)); d != "" {
		t.Errorf("the laptop is not as before (-before +after):\n%s", d)
	}
}

// kill sends SIGKILL to a process.
func kill(t *testing.T, pid int) {
	t.Helper()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatalf("kill -9 %d: %v", pid, err)
	}
}
