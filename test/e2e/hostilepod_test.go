//go:build e2e && linux

package e2e

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"os/exec"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
	"kubevpn/test/lab"
)

const (
	// laptopsAtWork is the number of laptops that use the cluster during the attack. Other laptops connect during it.
	laptopsAtWork = 9
	// roundsAtWork is the minimum number of times that each of them uses the cluster.
	roundsAtWork = 5
	// maxAttackedMemory is the limit for the traffic manager, and for each agent, in KiB. Idle they use 20 to 60 MiB, and
	// the manager's container may use 1 GiB. An attack without limits takes more than 700 MiB of each.
	maxAttackedMemory = 384 << 10
	// slowClient is generous: two processors serve the cluster, the laptops and the attack.
	slowClient = time.Minute

	managerLabels = "app.kubernetes.io/component=traffic-manager"
)

// hostilePod lets a pod attack each port of the traffic manager, of an intercepted workload and of Services that lead
// to both. Then a user attacks the port of sessions. Neither the laptops, which work and connect during the attacks,
// nor the kubelet may notice.
func hostilePod(t *testing.T, w *world) {
	w.loadHostile(t)
	s := w.newShop(t, "hostile-pod", "privileged")
	l, v := w.newUser(t, lab.Admin), w.visitor(t)
	l.connect(t)
	l.startApp(t, "laptop")
	l.proxy(t, s, "--headers", mine+"="+me, "--port", "8080")
	service := "http://" + w.clusterIP(t, s.namespace, "shop") + "/"
	testenv.Eventually(t, time.Minute, func() error { return v.want(service, "laptop", mine, me) }) // kube-proxy knows it

	victims := watchVictims(t, s)
	attack := startAttack(t, s)
	work := startWork(t, w)
	attack.wait(t, s)
	own := func(t *testing.T) {
		t.Helper()
		for range roundsAtWork {
			for _, address := range append(work.addresses, service) {
				if r := l.run(t, "curl", "-sS", "--max-time", "60", "-o", "/dev/null", address); r.code != 0 {
					t.Error(r)
				}
			}
			for name, ip := range s.ready(t) {
				pod := "http://" + ip + ":8080/"
				if err := errors.Join(v.want(pod, "laptop", mine, me), v.want(pod, name), v.want(service, "laptop", mine, me)); err != nil {
					t.Error(err)
				}
			}
		}
	}
	t.Run("intercepted_requests_reach_the_laptop", own)
	t.Run("laptop_connects_during_the_attack", func(t *testing.T) { connectsAfresh(t, w, work.addresses) })
	t.Run("laptop_connects_while_a_user_floods_the_manager", func(t *testing.T) {
		victims.flood(t)
		connectsAfresh(t, w, work.addresses)
	})
	t.Run("laptops_notice_nothing", work.end)
	t.Run("each_port_was_attacked", func(t *testing.T) { attack.end(t, s) })
	t.Run("traffic_manager_and_agents_notice_nothing", victims.check)
}

// worker is a laptop that uses the cluster through its own proxy, so that many fit on one machine.
type worker struct {
	*attempt
	http *http.Client
}

// connectWorkers connects laptops at the same time.
func connectWorkers(t *testing.T, w *world, n int) []*worker {
	t.Helper()
	all := make([]*worker, n)
	for i := range all {
		l := w.newUser(t, lab.Admin)
		if err := os.MkdirAll(l.home+"/run", 0o700); err != nil {
			t.Fatal(err)
		}
		all[i] = &worker{attempt: l.begin(t, "--socks", "127.0.0.1:0", "-v=4")}
	}
	network := (&laptop{world: w}).network()
	for _, one := range all {
		p := one.proxy(t)
		one.http = &http.Client{Timeout: slowClient, Transport: &http.Transport{
			DisableKeepAlives: true,
			Proxy:             http.ProxyURL(&url.URL{Scheme: "socks5", User: url.UserPassword(p.User, p.Password), Host: p.Address}),
			DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
				return dialIn(network, address)
			},
		}}
	}
	return all
}

// disconnect ends the laptop's connection, which must have lasted.
func (o *worker) disconnect(t *testing.T) {
	t.Helper()
	if err := o.cmd.Process.Signal(syscall.SIGINT); err != nil {
		t.Error(err)
	}
	if code, last := o.attempt.end(t); code != int(api.ExitOK) {
		t.Errorf("exit %d; last event %+v\n%s", code, last, &o.stderr)
	}
}

// use requests each address once.
func (o *worker) use(ctx context.Context, addresses []string) error {
	for _, address := range addresses {
		req, err := http.NewRequestWithContext(ctx, http.MethodGet, address, nil)
		if err != nil {
			return err
		}
		resp, err := o.http.Do(req)
		if err != nil {
			return err
		}
		_, err = io.Copy(io.Discard, resp.Body)
		resp.Body.Close()
		if err != nil || resp.StatusCode != http.StatusOK {
			return fmt.Errorf("%s: %s, %w", address, resp.Status, err)
		}
	}
	return nil
}

// connectsAfresh connects one more laptop, which then uses the cluster.
func connectsAfresh(t *testing.T, w *world, addresses []string) {
	one := connectWorkers(t, w, 1)[0]
	if err := one.use(t.Context(), addresses); err != nil {
		t.Error(err)
	}
	one.disconnect(t)
}

// workday is what the laptops do during the attack.
type workday struct {
	addresses []string // by name, of a Service and of a pod
	workers   []*worker
	results   []chan error // of each worker
	stop      context.CancelFunc
}

// startWork connects laptops that use the cluster until end.
func startWork(t *testing.T, w *world) *workday {
	t.Helper()
	ctx, stop := context.WithCancel(t.Context())
	t.Cleanup(stop)
	d := &workday{stop: stop, workers: connectWorkers(t, w, laptopsAtWork), addresses: []string{
		"http://web.default/", "http://" + w.clusterIP(t, "default", "web") + "/",
		"http://" + net.JoinHostPort(w.pods(t, "default", "app=web")[0].String(), "8080") + "/",
	}}
	for i, one := range d.workers {
		result := make(chan error, 1)
		d.results = append(d.results, result)
		go func() {
			err := one.work(ctx, d.addresses)
			if err != nil {
				err = fmt.Errorf("laptop %d: %w", i+1, err)
			}
			result <- err
		}()
	}
	return d
}

// work uses the cluster until ctx ends, but at least roundsAtWork times. Its pauses keep the machine from being
// overloaded.
func (o *worker) work(ctx context.Context, addresses []string) error {
	tick := time.NewTicker(200 * time.Millisecond)
	defer tick.Stop()
	for n := 1; n <= roundsAtWork || ctx.Err() == nil; n++ {
		if err := o.use(context.WithoutCancel(ctx), addresses); err != nil {
			return fmt.Errorf("round %d: %w", n, err)
		}
		<-tick.C
	}
	return nil
}

// end ends the work, and fails the test if any request failed.
func (d *workday) end(t *testing.T) {
	d.stop()
	for i, one := range d.workers {
		err := <-d.results[i]
		one.disconnect(t)
		if err != nil {
			t.Errorf("%v\n%s", err, tail(one.stderr.String(), 40))
		}
	}
}

// attack is the pod that attacks others.
type attack struct{ ports []string }

const attackNamespace = "hostile-attacker"

// startAttack starts a pod that attacks each port on which the traffic manager's pod and one pod of the workload listen,
// and Services that lead to them.
func startAttack(t *testing.T, s *shop) *attack {
	t.Helper()
	manager := s.pods(t, "kubevpn", managerLabels)[0].String()
	a := &attack{ports: slices.Concat(s.listening(t, "kubevpn", managerLabels), s.listening(t, s.namespace, "app=shop"))}
	// The documented ports of the traffic manager, those of the application, and those of the agent.
	if len(a.ports) < 2+4+1 {
		t.Fatalf("the pods listen only on %v", a.ports)
	}
	manifest := strings.NewReplacer("NAMESPACE", attackNamespace, "MANAGER", manager)
	s.apply(t, manifest.Replace(`
apiVersion: v1
kind: Namespace
metadata: {name: NAMESPACE}
---
apiVersion: v1
kind: Service
metadata: {name: manager, namespace: NAMESPACE}
spec: {ports: [{name: health, port: 10801}, {name: proxy, port: 10802}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: manager, namespace: NAMESPACE, labels: {kubernetes.io/service-name: manager}}
addressType: IPv4
ports: [{name: health, port: 10801}, {name: proxy, port: 10802}]
endpoints: [{addresses: [MANAGER], conditions: {ready: true}}]
`))
	for port, ip := range map[string]string{
		"10801": s.clusterIP(t, attackNamespace, "manager"), "10802": s.clusterIP(t, attackNamespace, "manager"),
		"80": s.clusterIP(t, s.namespace, "shop"), "9001": s.clusterIP(t, s.namespace, "shop"),
	} {
		a.ports = append(a.ports, net.JoinHostPort(ip, port))
	}
	s.apply(t, strings.NewReplacer("NAMESPACE", attackNamespace, "IMAGE", hostileRef,
		"PORTS", `"`+strings.Join(a.ports, `", "`)+`"`).Replace(`
apiVersion: v1
kind: Pod
metadata: {name: attacker, namespace: NAMESPACE, labels: {app: attacker}}
spec:
  restartPolicy: Never
  terminationGracePeriodSeconds: 2
  containers:
  - name: attacker
    image: IMAGE
    imagePullPolicy: Never
    args: [attack, -for, 5m, PORTS]
`))
	return a
}

// listening returns the addresses and ports at which other pods reach a pod. It leaves out listeners that use only the
// loopback interface.
func (w *world) listening(t *testing.T, namespace, selector string) []string {
	t.Helper()
	network := fmt.Sprintf("--net=/proc/%d/ns/net", w.podProcess(t, namespace, selector))
	out, err := exec.CommandContext(t.Context(), "nsenter", network, "ss", "-H", "-l", "-n", "-t").Output()
	if err != nil {
		t.Fatal(err)
	}
	var all []string
	for line := range strings.Lines(string(out)) {
		host, port, err := net.SplitHostPort(strings.Fields(line)[3])
		if err != nil {
			t.Fatal(err)
		}
		target := net.JoinHostPort(w.pods(t, namespace, selector)[0].String(), port)
		if host != "127.0.0.1" && host != "[::1]" && host != "::1" && !slices.Contains(all, target) {
			all = append(all, target)
		}
	}
	return all
}

// wait returns when the pod has attacked each port by each method.
func (a *attack) wait(t *testing.T, s *shop) {
	t.Helper()
	began := time.Now()
	testenv.Eventually(t, 2*time.Minute, func() error {
		log, err := s.tryKubectl(t.Context(), "-n", attackNamespace, "logs", "attacker")
		if err == nil && !strings.Contains(log, "attacking ") {
			err = errors.New("the attack has not begun")
		}
		return err
	})
	t.Logf("the attack was complete after another %v", time.Since(began).Round(time.Second))
}

// end ends the attack, and checks that it reached each port by each method.
func (a *attack) end(t *testing.T, s *shop) {
	if err := syscall.Kill(s.podProcess(t, attackNamespace, "app=attacker"), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.kubectl(t, "-n", attackNamespace, "wait", "pod/attacker", "--for=jsonpath={.status.phase}=Succeeded", "--timeout=60s")
	lines := strings.Split(s.kubectl(t, "-n", attackNamespace, "logs", "attacker"), "\n")
	var done map[string]map[string]int // conns by port and method
	if err := json.Unmarshal([]byte(lines[len(lines)-1]), &done); err != nil {
		t.Fatalf("%v: %q", err, lines)
	}
	for _, target := range a.ports {
		if len(done[target]) == 0 {
			t.Errorf("%s was not attacked", target)
		}
		for method, n := range done[target] {
			if n == 0 {
				t.Errorf("%s was not attacked by %s", target, method)
			}
		}
		t.Logf("%s: %v", target, done[target])
	}
}

// victims are the processes and pods under attack.
type victims struct {
	shop      *shop
	processes map[string]int // the traffic manager and the agents
	before    string
}

func watchVictims(t *testing.T, s *shop) *victims {
	t.Helper()
	v := &victims{shop: s, processes: map[string]int{"the traffic manager": s.podProcess(t, "kubevpn", managerLabels)}}
	for pod := range s.ready(t) {
		for _, pid := range s.agents(t, pod) {
			v.processes["the agent of "+pod] = pid
		}
	}
	if len(v.processes) != 3 {
		t.Fatalf("got the processes %v, want the traffic manager and two agents", v.processes)
	}
	for _, pid := range v.processes {
		// Reset the peak (proc(5), clear_refs).
		if err := os.WriteFile(fmt.Sprintf("/proc/%d/clear_refs", pid), []byte("5"), 0); err != nil {
			t.Fatal(err)
		}
	}
	v.before = v.state(t)
	return v
}

// state returns what the kubelet tells about the pods: it changes when a container restarts or a probe fails.
func (v *victims) state(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for namespace, labels := range map[string]string{"kubevpn": managerLabels, v.shop.namespace: "app=shop"} {
		pods := strings.Fields(v.shop.kubectl(t, "-n", namespace, "get", "pods", "-l", labels, "-o", "jsonpath={.items[*].metadata.name}"))
		for _, pod := range pods {
			fmt.Fprintln(&b, pod, v.shop.kubectl(t, "-n", namespace, "get", "pod", pod, "-o",
				`jsonpath=restarts {.status.containerStatuses[*].restartCount} {.status.conditions[?(@.type=="Ready")]}`))
			fmt.Fprintln(&b, v.shop.kubectl(t, "-n", namespace, "get", "events", "-o", `jsonpath={.items[*].count} {.items[*].message}`,
				"--field-selector", "reason=Unhealthy,involvedObject.name="+pod))
		}
	}
	lines := strings.Split(b.String(), "\n")
	slices.Sort(lines)
	return strings.Join(lines, "\n")
}

// check fails if a victim was restarted, needed much memory, or was unhealthy for a moment.
func (v *victims) check(t *testing.T) {
	for name, pid := range v.processes {
		if _, err := os.Stat(fmt.Sprintf("/proc/%d", pid)); err != nil {
			t.Errorf("%s was killed", name)
			continue
		}
		used := peakMemory(t, pid)
		t.Logf("%s used up to %d KiB", name, used)
		if used > maxAttackedMemory {
			t.Errorf("%s used %d KiB, more than %d KiB", name, used, maxAttackedMemory)
		}
	}
	if d := cmp.Diff(v.before, v.state(t)); d != "" {
		t.Errorf("the kubelet noticed the attack (-before +after)\n%s", d)
	}
}

// flood attacks the port of sessions as a user can, through pods/portforward: it abandons more sessions than the
// traffic manager keeps, and then opens as many conns as handshakes may last at once.
func (v *victims) flood(t *testing.T) {
	t.Helper()
	const sessions, silent = 1100, 256
	network := fmt.Sprintf("/proc/%d/ns/net", v.processes["the traffic manager"])
	address := net.JoinHostPort("127.0.0.1", fmt.Sprint(api.ManagerPort))
	var open []net.Conn
	t.Cleanup(func() {
		for _, conn := range open {
			conn.Close()
		}
	})
	err := inside(network, func() error {
		d := net.Dialer{Timeout: slowClient}
		for range sessions {
			conn, err := d.Dial("tcp", address)
			if err != nil {
				return err
			}
			if _, err := conn.Write(firstHello()); err == nil { // the traffic manager may reset the conn
				_, _ = io.ReadFull(conn, make([]byte, 24)) // the answer
			}
			conn.Close()
		}
		for range silent {
			conn, err := d.Dial("tcp", address)
			if err != nil {
				return err
			}
			open = append(open, conn)
		}
		return nil
	})
	if err != nil {
		t.Error(err)
	}
}

// firstHello returns the first message of a new session (pkg/wire/transport/spec.md).
func firstHello() []byte {
	b := append([]byte("kubevpn"), transport.Version)
	var secret [16 + 32]byte // the session and its token
	rand.Read(secret[:])
	b = append(b, secret[:]...)
	return append(b, 0, 1, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0) // link 0 of a new session, first attempt, nothing received
}
