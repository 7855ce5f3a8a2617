//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// mappedSuite checks that a laptop reaches a cluster and its own network although both have the same addresses.
func mappedSuite(t *testing.T, w *world) {
	l := w.newLaptop(t, lab.Admin)
	w.startMapped(t)
	if w.isSystem() {
		l.connect(t)
		l.forwardIPv6(t)
	}
	for _, f := range w.Config().Families() {
		family := map[bool]string{true: "IPv4", false: "IPv6"}[f.Pods.Addr().Is4()]
		t.Run("office_has_the_pods_of_a_node/"+family, func(t *testing.T) { mappedOffice(t, l, f) })
	}
	t.Run("docker_has_the_services", func(t *testing.T) { mappedDocker(t, l) })
	t.Run("another_VPN_has_the_pods_of_a_node", func(t *testing.T) { mappedVPN(t, l) })
	t.Run("office_comes_later", func(t *testing.T) { mappedLater(t, l) })
	t.Run("kill_9_leaves_nothing", func(t *testing.T) {
		l.office(t, w.Config().Families()[0].PodRange(1))
		before := l.snapshot(t)
		l.connect(t)
		l.dies(t, syscall.SIGKILL, []string{theDaemon})
		l.soonAs(t, before)
	})
}

// office gives the laptop a network with one other host, whose address it returns.
func (l *laptop) office(t *testing.T, network netip.Prefix) (neighbour netip.Addr) {
	t.Helper()
	self, neighbour := at(network, 200), at(network, 201)
	l.must(t, "ip", "link", "add", "office0", "type", "veth", "peer", "name", "office1")
	l.finally(t, "ip", "link", "del", "office0")
	l.must(t, "ip", "link", "set", "office1", "netns", l.Config().Name+"-router")
	nodad := []string{}
	if network.Addr().Is6() {
		nodad = []string{"nodad"}
	}
	l.must(t, append([]string{"ip", "addr", "add", netip.PrefixFrom(self, network.Bits()).String(), "dev", "office0"}, nodad...)...)
	l.must(t, "ip", "link", "set", "office0", "up")
	// The router has the cluster's pods behind it, so its end is a single address.
	l.onRouter(t, append([]string{"ip", "addr", "add", neighbour.String(), "dev", "office1"}, nodad...)...)
	l.onRouter(t, "ip", "link", "set", "office1", "up")
	l.onRouter(t, "ip", "route", "add", self.String(), "dev", "office1")
	testenv.Eventually(t, soon, func() error {
		if r := l.run(t, "ping", "-n", "-c", "1", "-W", "1", neighbour.String()); r.code != 0 {
			return errors.New(r.String())
		}
		return nil
	})
	return neighbour
}

// webPod returns a pod of web in the network, and its name.
func (w *world) webPod(t *testing.T, network netip.Prefix) (at netip.Addr, name string) {
	t.Helper()
	for line := range strings.Lines(w.kubectl(t, "get", "pods", "-l", "app=web", "-o",
		`jsonpath={range .items[*]}{.metadata.name} {.status.podIPs[*].ip}{"\n"}{end}`)) {
		f := strings.Fields(line)
		for _, ip := range f[1:] {
			if a := netip.MustParseAddr(ip); network.Contains(a) {
				return a, f[0]
			}
		}
	}
	t.Fatalf("no pod of web in %v", network)
	return netip.Addr{}, ""
}

func mappedOffice(t *testing.T, l *laptop, f lab.Family) {
	network := f.PodRange(1)
	pod, name := l.webPod(t, network)
	neighbour := l.office(t, network)
	before := l.snapshot(t)
	l.connect(t)
	c := l.connection(t)
	here := c.Mappings.ToLocal(pod)
	if here == pod || !slices.ContainsFunc(c.CIDRs, func(p netip.Prefix) bool { return p.Contains(pod) }) {
		t.Fatalf("%v is not mapped: networks %v, mappings %v", pod, c.CIDRs, c.Mappings)
	}
	l.mappedReaches(t, here, name)
	record := map[bool]string{true: "A", false: "AAAA"}[pod.Is4()]
	if out := l.must(t, "dig", "+short", "+time=15", "+tries=1", "web-headless.default.svc.cluster.local", record); !slices.Contains(strings.Fields(out), here.String()) ||
		slices.Contains(strings.Fields(out), pod.String()) {
		t.Errorf("the pods of web-headless are %q, want %v and not %v", out, here, pod)
	}
	if mapped, itself := l.must(t, "dig", "+short", "+time=15", "+tries=1", "-x", here.String()), l.must(t, "dig", "+short", "+time=15", "+tries=1", "-x", pod.String()); !strings.Contains(mapped, "web-headless") || mapped != itself {
		t.Errorf("the names of %v are %q, those of %v %q", here, mapped, pod, itself)
	}
	// The cluster's other networks have their own addresses.
	l.reachesOthers(t)
	l.must(t, "ping", "-n", "-c", "1", "-W", "3", neighbour.String())
	if _, err := l.get(t, "http://"+netip.AddrPortFrom(pod, 8080).String()+"/"); err == nil {
		t.Errorf("%v, which is an address of the office, is answered by the cluster", pod)
	}
	if r := l.run(t, "kubevpn", "why", "http://"+netip.AddrPortFrom(pod, 8080).String()+"/"); r.code != int(api.ExitRouteTaken) || !strings.Contains(r.stdout, here.String()) {
		t.Errorf("why does not say that %v is %v: %v", pod, here, r)
	}
	l.must(t, "kubevpn", "why", "http://"+netip.AddrPortFrom(here, 8080).String()+"/")
	if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, network.String()+" of the cluster is ") {
		t.Errorf("status does not list the mapping:\n%s", out)
	}
	l.must(t, "kubevpn", "disconnect", "--all")
	l.sameAs(t, before)
}

// mappedReaches checks every protocol to the pod at an address of this machine.
func (l *laptop) mappedReaches(t *testing.T, here netip.Addr, name string) {
	t.Helper()
	l.mappedPrograms(t, here, name)
	if r := l.sh(t, "printf hello | nc -u -w 2 %s 9001", here); r.stdout != "hello" {
		t.Error(r)
	}
	l.must(t, "ping", "-n", "-c", "1", "-s", "6000", "-W", "3", here.String()) // in fragments
	if r := l.run(t, "nc", "-v", "-w", "4", here.String(), "4444"); r.code == 0 || !strings.Contains(r.stderr, "refused") {
		t.Errorf("a closed TCP port: %v", r)
	}
	// An ICMP error quotes a packet to the address that the program knows.
	if r := l.run(t, "python3", "-c", `
import socket, sys
s = socket.socket(socket.AF_INET6 if ":" in sys.argv[1] else socket.AF_INET, socket.SOCK_DGRAM)
s.settimeout(5)
s.connect((sys.argv[1], 4444))
s.send(b"x")
try:
    s.recv(10)
except ConnectionRefusedError:
    print("refused")
`, here.String()); strings.TrimSpace(r.stdout) != "refused" {
		t.Errorf("a closed UDP port: %v", r)
	}
	if l.isSystem() {
		if r := l.run(t, "ping", "-n", "-c", "1", "-t", "1", "-W", "3", here.String()); !strings.Contains(r.stdout, "Time to live exceeded") &&
			!strings.Contains(r.stdout, "Hop limit") {
			t.Errorf("the first hop is no router: %v", r)
		}
	}
	r := l.run(t, "sh", "-c", "cd "+t.TempDir()+` && head -c 16777216 /dev/urandom >data && nc -N `+here.String()+` 9001 <data >back && cmp data back && echo same; rm -f data back`)
	if strings.TrimSpace(r.stdout) != "same" {
		t.Error(r)
	}
}

// mappedPrograms checks that common programs reach the pod, in which PostgreSQL runs.
func (l *laptop) mappedPrograms(t *testing.T, here netip.Addr, name string) {
	t.Helper()
	if e, err := l.get(t, "http://"+netip.AddrPortFrom(here, 8080).String()+"/"); err != nil || e.Host != name {
		t.Errorf("%v is answered by %q, want %s (%v)", here, e.Host, name, err)
	}
	l.must(t, "ping", "-n", "-c", "1", "-W", "3", here.String())
	l.mappedPSQL(t, here)
	if r := l.run(t, "mtr", "-n", "-c", "1", "--report", here.String()); !regexp.MustCompile(`\|-- ` + here.String() + ` +0\.0%`).MatchString(r.stdout) {
		t.Errorf("mtr: %v", r)
	}
}

func (l *laptop) mappedPSQL(t *testing.T, here netip.Addr) {
	t.Helper()
	if r := l.run(t, "psql", "-h", here.String(), "-U", "postgres", "-At", "-c", "select 6*7"); strings.TrimSpace(r.stdout) != "42" {
		t.Errorf("psql: %v", r)
	}
}

// startMapped runs PostgreSQL in a pod of web on node 1, with the Service db, and returns that pod.
func (w *world) startMapped(t *testing.T) (pod netip.Addr, name string) {
	t.Helper()
	pod, name = w.webPod(t, w.Config().Families()[0].PodRange(1))
	w.kubectl(t, "label", "pod", name, "mapped=yes", "--overwrite")
	w.within(t, "default", "mapped=yes").startPostgres(t, "*")
	w.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: db, namespace: default}
spec: {selector: {mapped: "yes"}, ports: [{port: 5432}]}
`)
	return pod, name
}

// reachesOthers checks pods of another node, a Service and names.
func (l *laptop) reachesOthers(t *testing.T) {
	t.Helper()
	l.reaches(t)
	f := l.Config().Families()[0]
	pod, name := l.webPod(t, f.PodRange(2))
	for _, url := range []string{"http://" + netip.AddrPortFrom(l.here(t, pod), 8080).String() + "/", "http://" + l.here(t, netip.MustParseAddr(l.clusterIP(t, "default", "web"))).String() + "/"} {
		if e, err := l.get(t, url); err != nil || strings.Contains(url, ":8080") && e.Host != name {
			t.Errorf("%s: %v, %v", url, e, err)
		}
	}
}

// here returns the address by which programs of the laptop reach one of the cluster.
func (l *laptop) here(t *testing.T, a netip.Addr) netip.Addr {
	t.Helper()
	return l.connection(t).Mappings.ToLocal(a)
}

// mappedDocker has a bridge in the Services' network, in which cluster DNS is too.
func mappedDocker(t *testing.T, l *laptop) {
	f := l.Config().Families()[0]
	l.must(t, "ip", "link", "add", "docker0", "type", "bridge")
	l.finally(t, "ip", "link", "del", "docker0")
	l.must(t, "ip", "addr", "add", netip.PrefixFrom(at(f.Services, 201), f.Services.Bits()).String(), "dev", "docker0")
	l.must(t, "ip", "link", "set", "docker0", "up")
	before := l.snapshot(t)
	l.connect(t)
	vip := netip.MustParseAddr(l.clusterIP(t, "default", "web"))
	here := l.here(t, vip)
	if here == vip {
		t.Fatalf("the Services' network is not mapped: %v", l.connection(t).Mappings)
	}
	if out := l.must(t, "dig", "+short", "+time=15", "+tries=1", "web.default.svc.cluster.local"); out != here.String() {
		t.Errorf("web is %q, want %v", out, here)
	}
	if r := l.run(t, "nc", "-v", "-w", "5", here.String(), "4444"); r.code == 0 || !strings.Contains(r.stderr, "refused") {
		t.Errorf("a port that the Service does not have: %v", r)
	}
	l.mappedPSQL(t, l.here(t, netip.MustParseAddr(l.clusterIP(t, "default", "db"))))
	l.reachesOthers(t)
	t.Run("dev_has_addresses_that_answer", func(t *testing.T) {
		out := l.must(t, "kubevpn", "dev", "deployment/web", "--", "sh", "-c", "echo $KUBERNETES_SERVICE_HOST $KUBERNETES_PORT")
		k := l.here(t, f.Kubernetes).String()
		if want := k + " tcp://" + k + ":443"; !strings.HasSuffix(strings.TrimSpace(out), want) {
			t.Errorf("the program has %q, want %q", out, want)
		}
	})
	l.must(t, "kubevpn", "disconnect", "--all")
	l.sameAs(t, before)
}

// mappedVPN has a VPN whose route equals one of the cluster's.
func mappedVPN(t *testing.T, l *laptop) {
	network := l.Config().Families()[0].PodRange(1)
	pod, name := l.webPod(t, network)
	v := l.newOtherVPN(t)
	down := v.up(t, "ip route add "+network.String()+" dev office0", ":")
	defer down()
	before := l.snapshot(t)
	l.connect(t)
	l.mappedReaches(t, l.here(t, pod), name)
	l.reachesOthers(t)
	if out := l.must(t, "ip", "route", "get", pod.String()); !strings.Contains(out, "office0") {
		t.Errorf("the VPN has lost its route: %s", out)
	}
	l.must(t, "kubevpn", "disconnect", "--all")
	l.sameAs(t, before)
}

// mappedLater connects the laptop to an office that has the pods of a node while flows are open.
func mappedLater(t *testing.T, l *laptop) {
	f := l.Config().Families()[0]
	affected, name := l.webPod(t, f.PodRange(1))
	other := netip.MustParseAddr(l.clusterIP(t, "default", "web"))
	l.connect(t)
	began := l.connection(t)
	flow := func(to netip.Addr) net.Conn {
		conn := l.dial(t, netip.AddrPortFrom(to, 9001).String())
		if err := conn.SetDeadline(time.Now().Add(time.Minute)); err != nil {
			t.Fatal(err)
		}
		speak(t, conn)
		return conn
	}
	ends, stays := flow(affected), flow(other)
	defer ends.Close()
	defer stays.Close()
	l.office(t, f.Pods) // wider than the route, which the kernel prefers until it is gone
	testenv.Eventually(t, soon, func() error {
		if l.here(t, affected) == affected {
			return errors.New("the network of the pods is not mapped")
		}
		return nil
	})
	if _, err := io.ReadAll(ends); !errors.Is(err, syscall.ECONNRESET) || errors.Is(err, os.ErrDeadlineExceeded) {
		t.Errorf("the flow to %v, which is another host now, ends with %v, want a reset", affected, err)
	}
	speak(t, stays)
	if now := l.connection(t); now.ID != began.ID || now.Status != api.StatusConnected || !now.Since.Equal(began.Since) {
		t.Errorf("another connection: %+v", now)
	}
	here := l.here(t, affected)
	if e, err := l.get(t, "http://"+netip.AddrPortFrom(here, 8080).String()+"/"); err != nil || e.Host != name {
		t.Errorf("%v is answered by %q, want %s (%v)", here, e.Host, name, err)
	}
	l.reachesOthers(t)
	l.must(t, "kubevpn", "disconnect", "--all")
	l.must(t, "ip", "link", "set", "office0", "down")
	l.must(t, "ip", "addr", "flush", "dev", "office0")
	if s := l.status(t); len(s.Connections) != 0 {
		t.Errorf("%+v", s.Connections)
	}
}

// mappedTwins connects the laptop to two clusters with equal networks at once, in every pair of netstacks, and ends the
// connections in either order. Programs of both clusters have the same names, except one.
func mappedTwins(t *testing.T, l *laptop, other *world) {
	const only = `
apiVersion: v1
kind: Service
metadata: {name: only-there, namespace: default}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
`
	other.apply(t, only)
	there := l.relayed(t, other)
	pod, name := other.startMapped(t)
	l.must(t, "kubevpn", "disconnect", "--all")
	before := l.snapshot(t)
	names := func(w *world) []string {
		return strings.Fields(w.kubectl(t, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].metadata.name}"))
	}
	for _, a := range []string{"gvisor", "system"} {
		for _, b := range []string{"gvisor", "system"} {
			t.Run(a+"_"+b, func(t *testing.T) {
				l.connect(t, "--netstack", a, "--name", "near")
				first := l.connection(t)
				second := l.connectTo(t, there, "--netstack", b, "--name", "far")
				if len(second.Mappings) == 0 {
					t.Fatalf("nothing is mapped: %+v", second)
				}
				reaches := func(name string, w *world) {
					t.Helper()
					e, err := l.get(t, "http://"+name+"/")
					if err != nil || !slices.Contains(names(w), e.Host) {
						t.Errorf("%s is answered by %q, which is not in %s (%v)", name, e.Host, w.Config().Name, err)
					}
				}
				each := func(names map[string]*world) {
					t.Helper()
					for name, w := range names {
						reaches(name, w)
					}
				}
				each(map[string]*world{
					"web.default.near": l.world, "web.default.far": other, "web.default.svc.far": other, "web.default": l.world,
					"web.default.svc.cluster.local": l.world, "only-there.default": other, "only-there.default.svc.cluster.local": other,
					"only-there.default.far": other,
				})
				l.mappedPrograms(t, second.Mappings.ToLocal(pod), name)
				l.mappedPSQL(t, second.Mappings.ToLocal(netip.MustParseAddr(other.clusterIP(t, "default", "db"))))
				if out := l.must(t, "dig", "+short", "+time=15", "+tries=1", "only-there.default.near"); out != "" {
					t.Errorf("a Service of the other cluster is %q", out)
				}
				if out := l.must(t, "kubevpn", "status", "-o", "wide"); !strings.Contains(out, "NAME.NAMESPACE.near are always") || !strings.Contains(out, "NAME.NAMESPACE.far are always") {
					t.Errorf("status does not list the names:\n%s", out)
				}
				var asked api.DNSQueryList
				if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "dns", "-o", "json")), &asked); err != nil {
					t.Fatal(err)
				}
				for name, id := range map[string]string{"web.default.near": first.ID, "web.default.far": second.ID} {
					if !slices.ContainsFunc(asked.Items, func(q api.DNSQuery) bool { return q.Name == name && q.Connection == id }) {
						t.Errorf("dns does not say that %s was answered by %s", name, id)
					}
				}
				ends, stays, name := first, other, "web.default.far"
				if a == b {
					ends, stays, name = second, l.world, "web.default.near"
				}
				l.must(t, "kubevpn", "disconnect", ends.ID)
				each(map[string]*world{name: stays, "web.default.svc.cluster.local": stays})
				l.must(t, "kubevpn", "disconnect", "--all")
				l.sameAs(t, before)
			})
		}
	}
}

// speak sends a byte to an echo server, and waits for it.
func speak(t *testing.T, conn net.Conn) {
	t.Helper()
	if _, err := conn.Write([]byte("x")); err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(conn, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
}
