//go:build e2e && linux

package e2e

import (
	"bufio"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
	"kubevpn/test/lab"
)

// idleFlows is the number of connections that stay idle during all faults.
const idleFlows = 2000

// faultsSuite breaks the path between laptop and manager. Flows must stall and continue, or end with a reset; new
// flows must soon work; memory must not grow.
func faultsSuite(t *testing.T, w *world) {
	l := w.newUser(t, lab.Admin)
	l.connect(t)
	vip := w.clusterIP(t, "default", "web")
	pod := w.pods(t, "default", "app=web")[0].String()

	flows := []*flow{l.startFlow(t, net.JoinHostPort(vip, "9001")), l.startFlow(t, net.JoinHostPort(pod, "9001"))}
	idle := l.startIdle(t, net.JoinHostPort(vip, "9001"))

	t.Run("slow_readers_slow_only_the_sender", func(t *testing.T) { backpressure(t, l, flows[0], vip) })
	t.Run("flows_continue_after_api_server_is_killed", func(t *testing.T) { apiServerKilled(t, l, flows) })
	if w.transport == "" { // these cut all transports alike
		t.Run("flows_continue_after_a_black_hole_of_20_s", func(t *testing.T) { blackHole(t, l, flows) })
	}
	t.Run("flows_continue_after_kubelet_restarts", func(t *testing.T) { kubeletRestarted(t, l, flows) })
	if w.transport == "" && !w.isSystem() { // after the black hole the netstack has nothing new to show
		t.Run("flows_continue_after_laptop_sleeps", func(t *testing.T) { laptopAsleep(t, l, flows) })
	}
	if w.transport == "" {
		t.Run("flows_continue_on_every_transport", func(t *testing.T) { transportsSwitch(t, l, flows) })
	}
	t.Run("no_byte_was_lost", func(t *testing.T) {
		for _, f := range flows {
			f.finish(t)
		}
	})
	t.Run("new_networks_are_routed", func(t *testing.T) { networksChange(t, l) })
	t.Run("idle_flows_survive", func(t *testing.T) { idle.check(t) })
	t.Run("new_flows_work_after_manager_s_pod_is_deleted", func(t *testing.T) { managerDeleted(t, l, vip) })
	l.must(t, "kubevpn", "disconnect", "--all")
	if w.transport == "" {
		t.Run("manager_of_another_version_is_used", func(t *testing.T) { anotherVersion(t, w) })
	}
}

// flow is a TCP connection to the echo server. It numbers the blocks that it sends and checks those that come back.
type flow struct {
	conn *net.TCPConn
	sent atomic.Int64 // blocks
	seen atomic.Int64
	pace time.Duration // between blocks; 0: no pause
	rush atomic.Bool   // no more pauses
	stop chan struct{}
	err  chan error // one from each direction
}

const flowBlock = 1 << 10

// dial opens a TCP connection from the laptop.
func (l *laptop) dial(t *testing.T, address string) *net.TCPConn {
	t.Helper()
	conn, err := dialIn(l.network(), address)
	if err != nil {
		t.Fatal(err)
	}
	return conn.(*net.TCPConn)
}

// network returns the path of the laptop's network namespace.
func (l *laptop) network() string {
	for _, arg := range l.within {
		if path, ok := strings.CutPrefix(arg, "--net="); ok {
			return path
		}
	}
	return "/run/netns/" + l.Config().Name + "-laptop"
}

func (l *laptop) startFlow(t *testing.T, address string) *flow {
	t.Helper()
	return l.startPaced(t, address, 5*time.Millisecond)
}

func (l *laptop) startPaced(t *testing.T, address string, pace time.Duration) *flow {
	t.Helper()
	f := &flow{conn: l.dial(t, address), pace: pace, stop: make(chan struct{}), err: make(chan error, 2)}
	t.Cleanup(func() { f.conn.Close() })
	go func() { f.err <- f.send() }()
	go func() { f.err <- f.receive() }()
	return f
}

func (f *flow) send() error {
	block := make([]byte, flowBlock)
	tick := time.NewTicker(max(f.pace, 1))
	defer tick.Stop()
	for {
		select {
		case <-f.stop:
			return f.conn.CloseWrite()
		default:
		}
		if f.pace > 0 && !f.rush.Load() {
			<-tick.C
		}
		n := f.sent.Load()
		fill(block, n)
		if _, err := f.conn.Write(block); err != nil {
			return fmt.Errorf("after %d blocks sent: %w", n, err)
		}
		f.sent.Add(1)
	}
}

func (f *flow) receive() error {
	block, want := make([]byte, flowBlock), make([]byte, flowBlock)
	for n := int64(0); ; n++ {
		if _, err := io.ReadFull(f.conn, block); errors.Is(err, io.EOF) {
			return nil
		} else if err != nil {
			return fmt.Errorf("after %d blocks received: %w", n, err)
		}
		if fill(want, n); string(block) != string(want) {
			return fmt.Errorf("block %d came back as %x...", n, block[:16])
		}
		f.seen.Add(1)
	}
}

func fill(block []byte, n int64) {
	binary.BigEndian.PutUint64(block, uint64(n))
	for i := 8; i < len(block); i++ {
		block[i] = byte(n) + byte(i)
	}
}

// goesOn waits until a block comes back that was sent after the call, and returns how long that took.
func (f *flow) goesOn(t *testing.T, within time.Duration) time.Duration {
	t.Helper()
	start, sent := time.Now(), f.sent.Load()
	testenv.Eventually(t, within, func() error {
		select {
		case err := <-f.err:
			f.err <- err
			t.Fatalf("the flow ended: %v", err)
		default:
		}
		if seen := f.seen.Load(); seen <= sent {
			return fmt.Errorf("%d blocks sent, %d came back", f.sent.Load(), seen)
		}
		return nil
	})
	return time.Since(start)
}

// finish half-closes the flow and checks that everything that was sent comes back, followed by the end.
func (f *flow) finish(t *testing.T) {
	t.Helper()
	close(f.stop)
	f.conn.SetReadDeadline(time.Now().Add(10 * time.Second))
	if err := errors.Join(<-f.err, <-f.err); err != nil {
		t.Errorf("%v", err)
	}
	if sent, seen := f.sent.Load(), f.seen.Load(); sent != seen || sent == 0 {
		t.Errorf("%d blocks sent, %d came back", sent, seen)
	}
}

// idlers are idle connections.
type idlers struct {
	conns  []net.Conn
	opened time.Time
}

func (l *laptop) startIdle(t *testing.T, address string) *idlers {
	t.Helper()
	daemon, manager := l.daemonPID(t), l.podProcess(t, l.connection(t).ManagerNamespace, "app.kubernetes.io/component=traffic-manager")
	before := [2]int{resident(t, daemon), resident(t, manager)}
	idle := &idlers{conns: make([]net.Conn, idleFlows), opened: time.Now()}
	t.Cleanup(func() {
		for _, c := range idle.conns {
			if c != nil {
				c.Close()
			}
		}
	})
	var group sync.WaitGroup
	var failed atomic.Pointer[error]
	for worker := range 8 {
		group.Go(func() {
			err := inside(l.network(), func() error {
				for i := worker; i < idleFlows; i += 8 {
					d := net.Dialer{Timeout: 10 * time.Second, KeepAlive: -1}
					c, err := d.Dial("tcp", address)
					if err != nil {
						return err
					}
					idle.conns[i] = c
				}
				return nil
			})
			if err != nil {
				failed.Store(&err)
			}
		})
	}
	group.Wait()
	if err := failed.Load(); err != nil {
		t.Fatal(*err)
	}
	t.Logf("%d flows opened in %v", idleFlows, time.Since(idle.opened).Round(time.Millisecond))
	for i, name := range []string{"daemon", "manager"} {
		after := resident(t, []int{daemon, manager}[i])
		each := (after - before[i]) / idleFlows
		t.Logf("%s: %d KiB resident before, %d KiB with them: %d bytes a flow", name, before[i]>>10, after>>10, each)
		if each > 40<<10 {
			t.Errorf("an idle flow costs the %s %d bytes", name, each)
		}
	}
	return idle
}

// check sends a byte over each connection and expects it back.
func (i *idlers) check(t *testing.T) {
	if rest := time.Minute - time.Since(i.opened); rest > 0 {
		t.Logf("waiting %v until they are a minute old", rest.Round(time.Second))
		<-time.After(rest)
	}
	deadline := time.Now().Add(20 * time.Second)
	dead := 0
	var last error
	for n, c := range i.conns {
		c.SetDeadline(deadline)
		if _, err := c.Write([]byte{byte(n)}); err != nil {
			dead, last = dead+1, err
		}
	}
	for n, c := range i.conns {
		var b [1]byte
		if _, err := io.ReadFull(c, b[:]); err != nil || b[0] != byte(n) {
			dead, last = dead+1, err
		}
	}
	if dead > 0 {
		t.Errorf("%d of %d connections ended within %v: %v", dead, len(i.conns), time.Since(i.opened), last)
	}
	for _, c := range i.conns {
		c.Close()
	}
}

// daemonPID returns the process ID of the laptop's daemon.
func (l *laptop) daemonPID(t *testing.T) int {
	t.Helper()
	text, err := os.ReadFile(filepath.Join(l.home, "run", "kubevpn", "daemon.lock"))
	if err != nil {
		t.Fatal(err)
	}
	pid, err := strconv.Atoi(strings.TrimSpace(string(text)))
	if err != nil {
		t.Fatal(err)
	}
	return pid
}

// resident returns the resident memory of a process in bytes.
func resident(t *testing.T, pid int) int {
	t.Helper()
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(text), "VmRSS:")
	kib, err := strconv.Atoi(strings.Fields(rest)[0])
	if err != nil {
		t.Fatal(err)
	}
	return kib << 10
}

// backpressure checks that slow readers slow down their sender, without using memory or delaying other flows.
func backpressure(t *testing.T, l *laptop, other *flow, vip string) {
	const readers = 16
	daemon, manager := l.daemonPID(t), l.podProcess(t, l.connection(t).ManagerNamespace, "app.kubernetes.io/component=traffic-manager")
	before := [2]int{resident(t, daemon), resident(t, manager)}
	taken := make([]int, readers)
	stop := make(chan struct{})
	var group sync.WaitGroup
	for i := range readers {
		c := l.dial(t, net.JoinHostPort(vip, "9003"))
		group.Go(func() {
			defer c.Close()
			tick := time.NewTicker(time.Second)
			defer tick.Stop()
			var b [1]byte
			for {
				if _, err := io.ReadFull(c, b[:]); err != nil {
					return
				}
				taken[i]++
				select {
				case <-tick.C:
				case <-stop:
					return
				}
			}
		})
	}
	// At the same time, measure the round trips of another flow and a fast download.
	c := l.dial(t, net.JoinHostPort(vip, "9001"))
	defer c.Close()
	fast := l.dial(t, net.JoinHostPort(vip, "9003"))
	defer fast.Close()
	var bytes atomic.Int64
	group.Go(func() {
		buffer := make([]byte, 1<<16)
		for {
			n, err := fast.Read(buffer)
			if err != nil {
				return
			}
			bytes.Add(int64(n))
		}
	})
	worst, trips := time.Duration(0), 0
	deadline := time.Now().Add(5 * time.Second)
	r := bufio.NewReader(c)
	for time.Now().Before(deadline) {
		start := time.Now()
		c.SetDeadline(start.Add(soon))
		if _, err := c.Write([]byte{'x'}); err != nil {
			t.Fatal(err)
		}
		if _, err := r.ReadByte(); err != nil {
			t.Fatal(err)
		}
		worst = max(worst, time.Since(start))
		trips++
	}
	downloaded := bytes.Load()
	fast.Close()
	other.goesOn(t, soon)
	for i, name := range []string{"daemon", "manager"} {
		after := resident(t, []int{daemon, manager}[i])
		t.Logf("%s: %d MiB before, %d MiB with %d slow readers and a download", name, before[i]>>20, after>>20, readers)
		// Allow 256 KiB for each stalled flow, and a fixed amount for the fast one.
		if grown := after - before[i]; grown > 96<<20 {
			t.Errorf("the %s grew by %d MiB", name, grown>>20)
		}
	}
	close(stop)
	group.Wait()
	for i, n := range taken {
		if n < 2 {
			t.Errorf("slow reader %d got %d bytes in 5 s", i, n)
		}
	}
	t.Logf("%d round trips, the slowest %v; %d MiB downloaded in 5 s", trips, worst, downloaded>>20)
	if trips < 5 || downloaded < 1<<20 {
		t.Error("slow readers delay other flows")
	}
}

// reconnecting waits until status shows that the connection is reconnecting, and why.
func (l *laptop) reconnecting(t *testing.T, within time.Duration) time.Duration {
	t.Helper()
	start := time.Now()
	testenv.Eventually(t, within, func() error {
		c := l.connection(t)
		if c.Status != api.StatusReconnecting {
			return fmt.Errorf("status %s", c.Status)
		}
		if c.Error == nil {
			return errors.New("status has no error")
		}
		return nil
	})
	return time.Since(start)
}

// connectedAgain waits until status shows that the connection works.
func (l *laptop) connectedAgain(t *testing.T, within time.Duration) time.Duration {
	t.Helper()
	start := time.Now()
	testenv.Eventually(t, within, func() error {
		if c := l.connection(t); c.Status != api.StatusConnected || c.Error != nil {
			return fmt.Errorf("status %s: %v", c.Status, c.Error)
		}
		return nil
	})
	return time.Since(start)
}

// newType counts up, so that each query for it is a new one.
var newType atomic.Int32

// askNew returns a query with a new type, so that kubevpn has not kept an answer to it.
func askNew(name string) []string {
	const privateUse = 65280 // types up to 65534: RFC 6895
	return []string{"dig", "+time=5", "+tries=1", name, fmt.Sprintf("TYPE%d", privateUse+newType.Add(1))}
}

// namesWithoutTunnel checks that outside names still resolve, and that new queries for cluster names fail soon with
// SERVFAIL.
func (l *laptop) namesWithoutTunnel(t *testing.T) {
	t.Helper()
	for _, tt := range []struct{ name, want string }{
		{"www.outside.test", "status: NOERROR"},
		{"nosuch.outside.test", "status: NXDOMAIN"},
	} {
		if r := l.run(t, "dig", "+time=4", "+tries=1", tt.name); !strings.Contains(r.stdout, tt.want) {
			t.Errorf("want %s: %v", tt.want, r)
		}
	}
	for _, name := range []string{"web.default.svc.cluster.local", "web.default", "web"} {
		if r := l.run(t, askNew(name)...); !strings.Contains(r.stdout, "status: SERVFAIL") {
			t.Errorf("want SERVFAIL: %v", r)
		}
	}
	l.must(t, "curl", "-sS", "--max-time", "2", "http://www.outside.test/")
}

// keptAnswer checks that the name of a Service still resolves if it was looked up before the interruption.
func (l *laptop) keptAnswer(t *testing.T, vip string) {
	t.Helper()
	for _, name := range []string{"web.default.svc.cluster.local", "web.default", "web"} {
		r := l.run(t, "dig", "+time=4", "+tries=1", name)
		if !strings.Contains(r.stdout, vip) {
			t.Errorf("%v", r)
		}
	}
}

func apiServerKilled(t *testing.T, l *laptop, flows []*flow) {
	type dialed struct {
		conn net.Conn
		err  error
	}
	opened := make(chan dialed, 2)
	address := net.JoinHostPort(l.clusterIP(t, "default", "web"), "9001")
	if err := l.Kill(t.Context(), "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	defer func() {
		if err := l.Restart(context.WithoutCancel(t.Context()), "kube-apiserver"); err != nil {
			t.Fatal(err)
		}
		t.Logf("connected %v after its restart", l.connectedAgain(t, 40*time.Second).Round(100*time.Millisecond))
		for _, f := range flows {
			f.goesOn(t, soon)
		}
		if d := <-opened; d.err != nil {
			t.Errorf("the flow that was opened during the outage: %v", d.err)
		} else if d.conn != nil {
			d.conn.Close()
		}
		l.ready(t)
	}()
	t.Logf("detected after %v", l.reconnecting(t, soon).Round(time.Millisecond))
	l.namesWithoutTunnel(t)
	// A flow that is opened during the outage waits, like the older flows.
	go func() {
		conn, err := dialTimeout(l, address, 40*time.Second)
		opened <- dialed{conn, err}
	}()
	if conn, err := dialTimeout(l, address, time.Second); err == nil {
		conn.Close()
		t.Error("accepted while the tunnel is down")
	} else if errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("refused while the tunnel is down: %v", err)
	}
	if len(opened) > 0 {
		t.Errorf("a flow did not wait: %+v", <-opened)
		opened <- dialed{}
	}
}

func dialTimeout(l *laptop, address string, timeout time.Duration) (net.Conn, error) {
	var conn net.Conn
	err := inside(l.network(), func() (err error) {
		conn, err = net.DialTimeout("tcp", address, timeout)
		return err
	})
	return conn, err
}

// ready waits until the API server serves and its controllers work again.
func (w *world) ready(t *testing.T) {
	t.Helper()
	testenv.Eventually(t, time.Minute, func() error {
		_, err := w.tryKubectl(t.Context(), "get", "--raw", "/readyz")
		return err
	})
}

// blackHole silently drops all packets between the laptop and the API server.
func blackHole(t *testing.T, l *laptop, flows []*flow) {
	vip := l.clusterIP(t, "default", "web")
	l.keptAnswer(t, vip) // asks for the name, so that kubevpn keeps the answer
	heal := l.drop(t, `iifname "laptop"`, `oifname "laptop"`)
	begin := time.Now()
	l.keptAnswer(t, vip)
	// Before kubevpn detects the fault, a new query for a cluster name is slow but is answered before the client times out.
	r := l.run(t, askNew("web.default.svc.cluster.local")...)
	t.Logf("a query for a cluster name before the fault was detected took %v", r.took.Round(time.Millisecond))
	if !strings.Contains(r.stdout, "status: SERVFAIL") {
		t.Errorf("%v", r)
	}
	l.reconnecting(t, soon)
	t.Logf("detected after %v", time.Since(begin).Round(time.Millisecond))
	l.namesWithoutTunnel(t)
	l.keptAnswer(t, vip)
	<-time.After(time.Until(begin.Add(20 * time.Second)))
	heal()
	t.Logf("connected %v after its end", l.connectedAgain(t, 15*time.Second).Round(100*time.Millisecond))
	for i, f := range flows {
		t.Logf("flow %d continued after %v", i, f.goesOn(t, soon).Round(time.Millisecond))
	}
	if _, err := l.get(t, "http://web/"); err != nil {
		t.Error(err)
	}
}

// kubeletRestarted restarts the kubelet of the manager's node, which carries the tunnel.
func kubeletRestarted(t *testing.T, l *laptop, flows []*flow) {
	c := l.connection(t)
	node := l.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.spec.nodeName}")
	if err := l.Restart(t.Context(), "kubelet-"+strings.TrimPrefix(node, l.Config().Name+"-")); err != nil {
		t.Fatal(err)
	}
	for i, f := range flows {
		t.Logf("flow %d continued after %v", i, f.goesOn(t, 30*time.Second).Round(100*time.Millisecond))
	}
	l.connectedAgain(t, 10*time.Second)
	if now := l.connection(t); now.ManagerPod != c.ManagerPod {
		t.Errorf("the manager's pod was %s and is %s", c.ManagerPod, now.ManagerPod)
	}
}

// laptopAsleep stops the daemon, as sleep does, for so long that the manager drops its conns.
func laptopAsleep(t *testing.T, l *laptop, flows []*flow) {
	pid := l.daemonPID(t)
	if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error { return stopped(pid) }) // the threads stop one after the other
	begin := time.Now()
	wake := sync.OnceFunc(func() {
		if err := syscall.Kill(pid, syscall.SIGCONT); err != nil {
			t.Error(err)
		}
	})
	defer wake()
	failure{code: api.ExitDaemon, message: "the daemon does not answer", hint: fmt.Sprintf("kill %d", pid), within: 6 * time.Second}.check(t, l.run(t, "kubevpn", "status"))
	<-time.After(time.Until(begin.Add(14 * time.Second))) // longer than the manager's timeout
	wake()
	for i, f := range flows {
		t.Logf("flow %d continued %v after the laptop woke up", i, f.goesOn(t, soon).Round(time.Millisecond))
	}
	l.connectedAgain(t, soon)
}

// stopped returns nil if all threads of a process are stopped (proc(5): stat).
func stopped(pid int) error {
	stats, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/stat", pid))
	if err != nil {
		return err
	}
	for _, stat := range stats {
		text, err := os.ReadFile(stat)
		if err != nil {
			return err
		}
		_, rest, _ := strings.Cut(string(text), ") ")
		if !strings.HasPrefix(rest, "T ") {
			return fmt.Errorf("%s: %.20s", stat, rest)
		}
	}
	return nil
}

// managerDeleted checks that flows end and that a new session is created without help when the manager's pod is
// deleted.
func managerDeleted(t *testing.T, l *laptop, vip string) {
	before := l.connection(t)
	victim := l.startFlow(t, net.JoinHostPort(vip, "9001"))
	victim.goesOn(t, soon)
	l.kubectl(t, "-n", before.ManagerNamespace, "delete", "pod", before.ManagerPod, "--grace-period=0", "--force", "--wait=false")
	var pod string
	testenv.Eventually(t, time.Minute, func() (err error) {
		pod, err = l.tryKubectl(t.Context(), "-n", before.ManagerNamespace, "get", "pods", "-l", ours, "--field-selector=status.phase=Running", "-o", "jsonpath={.items[0].metadata.name}")
		if err == nil && (pod == "" || pod == before.ManagerPod) {
			err = fmt.Errorf("pod %q", pod)
		}
		return err
	})
	running := time.Now()
	testenv.Eventually(t, time.Minute, func() error {
		if c := l.connection(t); c.Status != api.StatusConnected || c.ManagerPod != pod || c.Error != nil {
			return fmt.Errorf("status %s, pod %s, want %s: %v", c.Status, c.ManagerPod, pod, c.Error)
		}
		_, err := l.get(t, "http://web.default/")
		return err
	})
	t.Logf("new flows work %v after the new pod runs", time.Since(running).Round(100*time.Millisecond))
	// The old flow must end, because its other end is gone.
	testenv.Eventually(t, time.Minute, func() error {
		select {
		case err := <-victim.err:
			if err == nil { // the kernel reports a reset once: the writer got it, and the reader got an end of file
				err = <-victim.err
			}
			if !errors.Is(err, syscall.ECONNRESET) && !errors.Is(err, syscall.EPIPE) {
				t.Errorf("a flow whose manager is gone ends with %v, want a reset", err)
			}
			return nil
		default:
			return errors.New("a flow whose manager is gone hangs")
		}
	})
	if c := l.connection(t); c.ID != before.ID || c.Device != before.Device || c.Services != before.Services {
		t.Errorf("before %+v\nafter %+v", before, c)
	}
}

// anotherVersion checks that a manager of another version is reported and used, and that sessions survive --upgrade.
func anotherVersion(t *testing.T, w *world) {
	const old = "docker.io/kubevpn/kubevpn:e2e-old"
	w.loadVersion(t, old, "0.0.9")
	l := w.newUser(t, lab.Admin)
	l.must(t, "kubevpn", "install", "--upgrade", "--image", old)
	r := l.connect(t)
	c := l.connection(t)
	if c.ManagerVersion != "0.0.9" || c.Status != api.StatusConnected {
		t.Errorf("%+v", c)
	}
	if said := r.stdout + r.stderr; !strings.Contains(said, old) || !strings.Contains(said, imageRef) || !strings.Contains(said, "--upgrade") {
		t.Errorf("connect does not name the running version and the next step: %v", r)
	}
	if _, err := l.get(t, "http://web/"); err != nil {
		t.Error(err)
	}
	// Another user upgrades the manager; this session must recover.
	other := w.newUser(t, lab.Admin)
	out := other.must(t, "kubevpn", "install", "--upgrade")
	if !strings.Contains(out, imageRef) {
		t.Errorf("install --upgrade says %q", out)
	}
	upgraded := time.Now()
	testenv.Eventually(t, time.Minute, func() error {
		if c := l.connection(t); c.Status != api.StatusConnected || c.ManagerVersion == "0.0.9" {
			return fmt.Errorf("status %s, version %s", c.Status, c.ManagerVersion)
		}
		_, err := l.get(t, "http://web.default/")
		return err
	})
	t.Logf("the other session recovered %v after the upgrade", time.Since(upgraded).Round(100*time.Millisecond))

	if c := l.connection(t); len(c.Warnings) != 0 {
		t.Errorf("the warning about the old version remains: %q", c.Warnings)
	}
	downgrade := func(t *testing.T) {
		t.Helper()
		other.must(t, "kubevpn", "install", "--upgrade", "--image", old)
		testenv.Eventually(t, time.Minute, func() error {
			if c := l.connection(t); c.Status != api.StatusConnected || c.ManagerVersion != "0.0.9" {
				return fmt.Errorf("status %s, version %s", c.Status, c.ManagerVersion)
			}
			return nil
		})
	}
	if w.isSystem() {
		return
	}
	t.Run("upgrade_while_connected", func(t *testing.T) {
		downgrade(t)
		id := l.connection(t).ID
		r := l.run(t, "kubevpn", "connect", "--upgrade")
		if c := l.connection(t); r.code != 0 || c.ID != id || c.Status != api.StatusConnected || c.ManagerVersion == "0.0.9" {
			t.Errorf("%+v\n%v", c, r)
		}
		if _, err := l.get(t, "http://web/"); err != nil {
			t.Error(err)
		}
	})
	t.Run("upgrade_to_connect", func(t *testing.T) {
		downgrade(t)
		l.must(t, "kubevpn", "disconnect", "--all")
		r := l.connect(t, "--upgrade")
		if c := l.connection(t); c.ManagerVersion == "0.0.9" || len(c.Warnings) != 0 {
			t.Errorf("%+v\n%v", c, r)
		}
	})
}

// loadVersion loads an image of a traffic manager of another version into the cluster.
func (w *world) loadVersion(t *testing.T, ref, version string) {
	t.Helper()
	dir := t.TempDir()
	if err := build.Image(t.Context(), dir, ref, version); err != nil {
		t.Fatal(err)
	}
	if err := w.Load(t.Context(), filepath.Join(dir, "image.tar")); err != nil {
		t.Fatal(err)
	}
}

// networksChange checks that routes follow the networks of the cluster while connected.
func networksChange(t *testing.T, l *laptop) {
	routed := func(prefix string, want bool) {
		t.Helper()
		start := time.Now()
		testenv.Eventually(t, time.Minute, func() error {
			c := l.connection(t)
			got := strings.Contains(l.must(t, "ip", "route", "show", "dev", c.Device)+"\n", prefix+" ")
			listed := slices.ContainsFunc(c.CIDRs, func(p netip.Prefix) bool { return p.String() == prefix })
			if got != want || listed != want {
				return fmt.Errorf("%s: routed %v, in status %v, want %v", prefix, got, listed, want)
			}
			return nil
		})
		t.Logf("%s routed %v after %v", prefix, want, time.Since(start).Round(time.Millisecond))
	}
	pods := l.Config().Families()[0].Pods.Addr().As4()
	node := fmt.Sprintf("%d.%d.77.0/24", pods[0], pods[1])
	l.apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Node
metadata: {name: e2e-new-node}
spec: {podCIDR: %[1]q, podCIDRs: [%[1]q]}
`, node))
	routed(node, true)
	l.kubectl(t, "delete", "node", "e2e-new-node")
	routed(node, false)

	const services = "172.30.99.0/24"
	l.apply(t, fmt.Sprintf(`
apiVersion: networking.k8s.io/v1
kind: ServiceCIDR
metadata: {name: e2e-new-range}
spec: {cidrs: [%q]}
`, services))
	routed(services, true) // the API server takes ten seconds to remove it
}
