//go:build linux && lab

package lab

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netlink"

	"kubevpn/internal/testenv"
)

// These tests start real clusters: go test -tags lab ./test/lab

func lifecycleLab(t *testing.T, c Config) *Lab {
	t.Helper()
	testenv.NeedRoot(t)
	c.Name = fmt.Sprintf("lt%d-%s", os.Getpid()%100000, c.Name)
	c.Progress = logWriter{t}
	l := New(c)
	t.Cleanup(func() {
		if _, err := New(Config{Name: l.config.Name}).Down(); err != nil {
			t.Error(err)
		}
	})
	return l
}

type logWriter struct{ t *testing.T }

func (w logWriter) Write(p []byte) (int, error) {
	w.t.Log(strings.TrimSpace(string(p)))
	return len(p), nil
}

// stepWatcher is a Config.Progress that calls then once, when a step begins. That moment does not depend on the
// machine's speed.
type stepWatcher struct {
	io.Writer
	step string
	then func()
	once sync.Once
}

func (w *stepWatcher) Write(p []byte) (int, error) {
	if strings.Contains(string(p), w.step) {
		w.once.Do(w.then)
	}
	return w.Writer.Write(p)
}

func TestLabLifecycle(t *testing.T) {
	for _, c := range []Config{
		{Name: "iptables"},
		{Name: "nftables", Nodes: 3, ProxyMode: ProxyNFTables, IPv6: true, Ranges: 2},
		{Name: "none", Nodes: 1, ProxyMode: ProxyNone, IPv6: true},
		{Name: "ipvs", ProxyMode: ProxyIPVS, NodeModes: []ProxyMode{ProxyIPTables}, IPv6: true, ProxySettings: map[string]string{"ipvs.strictARP": "true", "ipvs.scheduler": "lc"}},
	} {
		t.Run(c.Name, func(t *testing.T) {
			l := lifecycleLab(t, c)
			before := machine(t, l)
			if err := l.Install(t.Context()); err != nil {
				t.Fatal(err)
			}
			if err := l.Build(t.Context()); err != nil {
				t.Fatal(err)
			}
			start := time.Now()
			if err := l.Up(t.Context()); err != nil {
				t.Fatal(err)
			}
			t.Logf("up took %s; the promise for a quiet machine is 15 s, and 25 with guests", time.Since(start))
			// Other programs add and remove namespaces at the same time.
			other := fmt.Sprintf("other%d", os.Getpid())
			if out, err := exec.Command("ip", "netns", "add", other).CombinedOutput(); err != nil {
				t.Errorf("ip netns add: %v\n%s", err, out)
			}
			defer func() {
				if out, err := exec.Command("ip", "netns", "del", other).CombinedOutput(); err != nil {
					t.Errorf("ip netns del: %v\n%s", err, out)
				}
			}()
			again, err := Attach(Config{Name: l.config.Name})
			if err != nil {
				t.Fatal(err)
			}
			checkLaptop(t, again)
			checkWaysOut(t, again)
			checkCluster(t, again)
			checkUsers(t, again)
			if c.ProxyMode == ProxyIPVS {
				checkIPVS(t, again)
			}

			// Up with the same configuration changes nothing; with another configuration it fails.
			if err := New(l.config).Up(t.Context()); err != nil {
				t.Errorf("up again: %v", err)
			}
			reshaped := l.config
			reshaped.IPv6 = !reshaped.IPv6
			if err := New(reshaped).Up(t.Context()); err == nil || !strings.Contains(err.Error(), "is up with another shape") {
				t.Errorf("up in another shape: %v", err)
			}

			if err := again.Restart(t.Context(), "kube-apiserver"); err != nil {
				t.Fatal(err)
			}
			if err := again.WaitReady(t.Context()); err != nil {
				t.Errorf("after a restart of the API server: %v", err)
			}

			if again.config.guests {
				killGuest(t, again)
			}
			for _, name := range []string{"containerd-node1", "kube-controller-manager", "node-node1", "outside"} {
				if err := again.Kill(t.Context(), name); err != nil {
					t.Fatal(err)
				}
			}
			if status, err := again.Status(); err != nil || status.Up {
				t.Errorf("with dead processes the lab is said to be up: %v", err)
			}
			if err := New(l.config).Up(t.Context()); err == nil || !strings.Contains(err.Error(), "has died") {
				t.Errorf("up with dead processes: %v", err)
			}
			if removed, err := New(Config{Name: l.config.Name}).Down(); err != nil || !removed {
				t.Fatalf("down: %v, %v", removed, err)
			}
			if diff := cmp.Diff(before, machine(t, l)); diff != "" {
				t.Errorf("the machine is not as before (-before +after):\n%s", diff)
			}
			if removed, err := l.Down(); err != nil || removed {
				t.Errorf("down of nothing: %v, %v", removed, err)
			}
		})
	}
}

// checkWaysOut checks that packets to addresses outside of the lab end on the router. A node without a kube-proxy rule
// for a port of a ClusterIP, for example, sends them along its default route.
func checkWaysOut(t *testing.T, l *Lab) {
	t.Helper()
	on := func(place string, argv ...string) (string, error) {
		cmd, err := l.Command(t.Context(), place, argv...)
		if err != nil {
			t.Fatal(err)
		}
		out, err := cmd.CombinedOutput()
		return string(out), err
	}
	for _, f := range l.config.Families() {
		nobody := nth(f.Services.Addr(), 200)
		for _, to := range []netip.Addr{nobody, f.PodRange(1).Addr().Next(), netip.MustParseAddr("8.8.8.8"), netip.MustParseAddr("2001:4860:4860::8888")} {
			if out, err := on("router", "ip", "route", "get", to.String()); err == nil || !strings.Contains(out, "unreachable") {
				t.Errorf("the router has a route to %v: %s", to, out)
			}
		}
	}
	out, err := on("router", "ip", "-o", "link", "show", "type", "veth")
	if err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	for line := range strings.Lines(out) {
		if _, peer, found := strings.Cut(line, "link-netns "); !found || !strings.HasPrefix(peer, l.config.Name+"-") {
			t.Errorf("the router has a link out of the lab: %s", line)
		}
	}
	nobody := nth(l.config.Families()[0].Services.Addr(), 200).String()
	if out, err := on("node1", "curl", "-sS", "-v", "--max-time", "3", "http://"+nobody+":4444/"); err == nil || strings.Contains(out, "Connected to") {
		t.Errorf("a server answers as %s: %s", nobody, out)
	}
}

// TestInterruptedLabCanBeRemoved interrupts the start of a lab at every step, and checks that the lab can be removed
// and started.
func TestInterruptedLabCanBeRemoved(t *testing.T) {
	for _, mode := range []ProxyMode{ProxyIPTables, ProxyIPVS} {
		t.Run(string(mode), func(t *testing.T) { breakOff(t, Config{Name: "broken", Nodes: 1, ProxyMode: mode}) })
	}
}

func breakOff(t *testing.T, c Config) {
	t.Helper()
	l := lifecycleLab(t, c)
	before := machine(t, l)
	for _, step := range []string{"starting etcd", "starting kubelets"} {
		for _, after := range []time.Duration{0, 300 * time.Millisecond} {
			ctx, cancel := context.WithCancel(t.Context())
			interrupted := l.config
			interrupted.Progress = &stepWatcher{Writer: l.config.Progress, step: step, then: func() { time.AfterFunc(after, cancel) }}
			err := New(interrupted).Up(ctx)
			cancel()
			if !errors.Is(err, context.Canceled) {
				t.Errorf("interrupted %s after %q: %v", after, step, err)
			}
			if diff := cmp.Diff(before, machine(t, l)); diff != "" {
				t.Errorf("interrupted %s after %q, the machine is not as before (-before +after):\n%s", after, step, diff)
			}
		}
	}
	// An abrupt end leaves processes that must not disturb the next start.
	half := New(l.config)
	unlock, err := half.lock()
	if err != nil {
		t.Fatal(err)
	}
	if half.cgroups, err = newCgroups(half.config.Name); err != nil {
		t.Fatal(err)
	}
	for _, step := range []func() error{
		half.chooseKernel, func() error { return half.Build(t.Context()) }, half.prepare, half.createNetwork, half.startEtcd,
		func() error { return half.startNode(t.Context(), 1) },
		func() error { return os.Remove(half.stateFile()) }, // the remains still identify the lab
	} {
		if err := step(); err != nil {
			unlock()
			t.Fatal(err)
		}
	}
	if up, err := half.alreadyUp(); up || err != nil {
		t.Fatalf("after an interrupted start: %v, %v", up, err)
	}
	unlock()
	if diff := cmp.Diff(before, machine(t, l)); diff != "" {
		t.Errorf("the machine is not as before (-before +after):\n%s", diff)
	}
}

// TestLabsCanBeJoined starts and joins two labs: each laptop reaches both API servers, and no pod of either.
func TestLabsCanBeJoined(t *testing.T) {
	one := lifecycleLab(t, Config{Name: "one", Nodes: 1})
	two := lifecycleLab(t, Config{Name: "two", Nodes: 1, Ranges: 2})
	before := machine(t, one)
	for _, l := range []*Lab{one, two} {
		if err := l.Up(t.Context()); err != nil {
			t.Fatal(err)
		}
	}
	if err := one.Join(one); err == nil || !strings.Contains(err.Error(), "same address ranges") {
		t.Errorf("joining with itself: %v", err)
	}
	for range 2 { // the second time changes nothing
		if err := one.Join(two); err != nil {
			t.Fatal(err)
		}
	}
	for _, pair := range [][2]*Lab{{one, one}, {one, two}, {two, one}, {two, two}} {
		from, to := pair[0], pair[1]
		server := netip.AddrPortFrom(to.config.Families()[0].Node(1), APIPort)
		if err := reach(t, from, "laptop", server); err != nil {
			t.Errorf("from %s: %v", from.config.Name, err)
		}
		for _, pod := range pods(t, to) {
			if reach(t, from, "laptop", netip.AddrPortFrom(pod, 8080)) == nil {
				t.Errorf("%s's laptop reaches pod %s of %s", from.config.Name, pod, to.config.Name)
			}
		}
	}
	for _, l := range []*Lab{one, two} {
		if removed, err := l.Down(); err != nil || !removed {
			t.Errorf("down: %v, %v", removed, err)
		}
	}
	if diff := cmp.Diff(before, machine(t, one)); diff != "" {
		t.Errorf("the machine is not as before (-before +after):\n%s", diff)
	}
}

// checkLaptop checks what the laptop reaches and what it does not.
func checkLaptop(t *testing.T, l *Lab) {
	t.Helper()
	for _, f := range l.config.Families() {
		if err := reach(t, l, "laptop", netip.AddrPortFrom(l.config.APIServer(f), APIPort)); err != nil {
			t.Errorf("the API server: %v", err)
		}
		if page := output(t, l, "laptop", "curl", "--silent", "--max-time", "5", fmt.Sprintf("http://%s/x", netip.AddrPortFrom(f.Outside, 80))); !strings.HasPrefix(page, "outside: GET ") {
			t.Errorf("the outside web server says %q", page)
		}
		for _, a := range []netip.Addr{f.Kubernetes, f.ClusterDNS} {
			for _, port := range []uint16{53, 443} {
				if reach(t, l, "laptop", netip.AddrPortFrom(a, port)) == nil {
					t.Errorf("the laptop reaches ClusterIP %s", a)
				}
			}
		}
	}
	for _, pod := range pods(t, l) {
		if reach(t, l, "laptop", netip.AddrPortFrom(pod, 8080)) == nil {
			t.Errorf("the laptop reaches pod %s", pod)
		}
		if err := reach(t, l, "node1", netip.AddrPortFrom(pod, 8080)); err != nil {
			t.Errorf("node 1 does not reach pod %s: %v", pod, err)
		}
	}
	f := l.config.Families()
	if got := output(t, l, "laptop", "getent", "ahostsv4", "www.outside.test"); !strings.HasPrefix(got, f[0].Outside.String()+" ") {
		t.Errorf("www.outside.test is %q", got)
	}
	if command, err := l.Command(t.Context(), "laptop", "getent", "hosts", "web.default.svc.cluster.local"); err != nil {
		t.Error(err)
	} else if command.Run() == nil {
		t.Error("the laptop resolves a cluster name")
	}
	queries, err := l.Queries()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range [][2]string{{"www.outside.test.", "NOERROR"}, {"web.default.svc.cluster.local.", "NXDOMAIN"}} {
		if !slices.ContainsFunc(queries, func(q Query) bool {
			return q.Name == want[0] && q.Rcode == want[1] && strings.HasPrefix(q.From, f[0].Laptop.String()+":")
		}) {
			t.Errorf("the router has not logged %v of the laptop", want)
		}
	}
	if got, want := output(t, l, "laptop", "cat", "/etc/resolv.conf"), "nameserver "+f[0].Gateway.String()+"\n"; !strings.HasPrefix(got, want) {
		t.Errorf("the laptop's resolv.conf is %q", got)
	}
}

// checkCluster checks that pods are spread over the nodes, and that Services work, or do not work with mode none.
func checkCluster(t *testing.T, l *Lab) {
	t.Helper()
	nodes := strings.Fields(kubectl(t, l, Admin, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[*].spec.nodeName}"))
	slices.Sort(nodes)
	if nodes = slices.Compact(nodes); len(nodes) != min(2, l.config.Nodes) {
		t.Errorf("the pods are on %v", nodes)
	}
	services := strings.Fields(kubectl(t, l, Admin, "get", "service", "web", "-o", "jsonpath={.spec.clusterIPs[*]}"))
	if len(services) != len(l.config.Families()) {
		t.Errorf("Service web has %v", services)
	}
	for _, s := range services {
		target := netip.AddrPortFrom(netip.MustParseAddr(s), 80)
		err := reach(t, l, "node1", target)
		if works := err == nil; works != (l.config.ProxyMode != ProxyNone) {
			t.Errorf("mode %s: node 1 to %s: %v", l.config.ProxyMode, target, err)
		}
	}
	for n := 1; n <= l.config.Nodes; n++ {
		ranges := kubectl(t, l, Admin, "get", "node", l.config.NodeName(n), "-o", "jsonpath={.spec.podCIDRs[*]}")
		if want := strings.ReplaceAll(joined(l.config.Families(), func(f Family) netip.Prefix { return f.PodRange(n) }), ",", " "); ranges != want {
			t.Errorf("node %d has pod ranges %q, want %q", n, ranges, want)
		}
	}
	if names := output(t, l, "node1", "ctr", "--namespace", "k8s.io", "images", "ls", "-q"); !strings.Contains(names, EchoImage) {
		t.Errorf("node 1's containerd has %q", names)
	}
	if host := output(t, l, "node1", "hostname"); strings.TrimSpace(host) != l.config.NodeName(1) {
		t.Errorf("node 1's host name is %q", host)
	}
}

// checkUsers checks the permissions of the users.
func checkUsers(t *testing.T, l *Lab) {
	t.Helper()
	for _, user := range []string{Developer, Token} {
		for _, test := range []struct {
			question []string
			want     string
		}{
			{[]string{"create", "deployments"}, "yes"},
			{[]string{"create", "pods/portforward"}, "yes"},
			{[]string{"create", "pods", "-n", "kube-system"}, "no"},
			{[]string{"list", "nodes"}, "no"},
			{[]string{"create", "rolebindings"}, "no"},
			{[]string{"create", "namespaces"}, "no"},
		} {
			kubeconfig, err := l.Kubeconfig(user)
			if err != nil {
				t.Fatal(err)
			}
			command, err := l.Command(t.Context(), "laptop", append([]string{l.programs.Kube, "kubectl", "--kubeconfig=" + kubeconfig, "auth", "can-i"}, test.question...)...)
			if err != nil {
				t.Fatal(err)
			}
			answer, _ := command.Output() // "no" is an exit code of 1
			if got := strings.TrimSpace(string(answer)); got != test.want {
				t.Errorf("may %s %v? %q, want %q", user, test.question, got, test.want)
			}
		}
	}
}

func reach(t *testing.T, l *Lab, place string, target netip.AddrPort) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), time.Second)
	defer cancel()
	conn, err := l.Dial(ctx, place, "tcp", target.String())
	if err == nil {
		conn.Close()
	}
	return err
}

func output(t *testing.T, l *Lab, place string, argv ...string) string {
	t.Helper()
	command, err := l.Command(t.Context(), place, argv...)
	if err != nil {
		t.Fatal(err)
	}
	var stderr bytes.Buffer
	command.Stderr = &stderr
	out, err := command.Output()
	if err != nil {
		t.Errorf("%v on %s: %v\n%s", argv, place, err, stderr.String())
	}
	return string(out)
}

func kubectl(t *testing.T, l *Lab, user string, args ...string) string {
	t.Helper()
	command, err := l.Kubectl(t.Context(), user, args...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := command.CombinedOutput()
	if err != nil {
		t.Errorf("kubectl %v: %v\n%s", args, err, out)
	}
	return string(out)
}

// pods returns the addresses of the echo server's pods.
func pods(t *testing.T, l *Lab) []netip.Addr {
	t.Helper()
	var list struct {
		Items []struct {
			Status struct{ PodIPs []struct{ IP netip.Addr } }
		}
	}
	if err := json.Unmarshal([]byte(kubectl(t, l, Admin, "get", "pods", "-l", "app=web", "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	var addresses []netip.Addr
	for _, pod := range list.Items {
		if len(pod.Status.PodIPs) != len(l.config.Families()) {
			t.Errorf("a pod has the addresses %v", pod.Status.PodIPs)
		}
		for _, ip := range pod.Status.PodIPs {
			addresses = append(addresses, ip.IP)
		}
	}
	if len(addresses) < 2 {
		t.Fatalf("the pods have the addresses %v", addresses)
	}
	return addresses
}

// machine lists the state that a lab could leave behind on this machine. It leaves out other labs, which may start and
// end during the test.
func machine(t *testing.T, l *Lab) map[string][]string {
	t.Helper()
	found := map[string][]string{}
	links, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range links {
		found["links"] = append(found["links"], link.Attrs().Name)
	}
	points, err := mounts()
	if err != nil {
		t.Fatal(err)
	}
	ours := func(s string) bool {
		return strings.Contains(s, l.config.Name) || !strings.Contains(s, "kubevpn-lab") && !below(s, netnsDir)
	}
	for _, m := range points {
		if ours(m.path) {
			found["mounts"] = append(found["mounts"], m.path)
		}
	}
	for _, name := range []string{"vm/overcommit_memory", "vm/panic_on_oom", "kernel/panic", "kernel/panic_on_oops", "kernel/keys/root_maxkeys", "net/ipv4/ip_forward"} {
		b, err := os.ReadFile("/proc/sys/" + name)
		if err != nil {
			t.Fatal(err)
		}
		found["settings"] = append(found["settings"], name+"="+strings.TrimSpace(string(b)))
	}
	for _, dir := range []string{"/var/lib/kubelet", "/var/lib/containerd", "/var/lib/cni", "/run/containerd", "/etc/cni", "/var/log/pods", "/var/log/containers", "/opt/containerd", "/opt/cni"} {
		if _, err := os.Stat(dir); err == nil {
			found["directories"] = append(found["directories"], dir)
		}
	}
	if left, err := l.leftovers(); err != nil {
		t.Fatal(err)
	} else {
		found["leftovers"] = left
	}
	return found
}

// leftovers searches for the lab by other means than Down uses.
func (l *Lab) leftovers() ([]string, error) {
	var left []string
	for _, pattern := range []string{"/run/netns/*", "/etc/netns/*", "/var/lib/kubevpn-lab/*"} {
		names, err := filepath.Glob(pattern)
		if err != nil {
			return nil, err
		}
		for _, name := range names {
			if strings.HasPrefix(filepath.Base(name), l.config.Name) {
				left = append(left, name)
			}
		}
	}
	err := filepath.WalkDir(cgroupRoot, func(path string, d fs.DirEntry, err error) error {
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return err
		}
		if d != nil && d.IsDir() && strings.HasSuffix(path, "kubevpn-lab-"+l.config.Name) {
			left = append(left, path)
		}
		return nil
	})
	if err != nil {
		return nil, err
	}
	processes, err := filepath.Glob("/proc/[0-9]*")
	if err != nil {
		return nil, err
	}
	for _, dir := range processes {
		line, err := os.ReadFile(filepath.Join(dir, "cmdline"))
		if err != nil {
			if errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.ESRCH) {
				continue
			}
			return nil, err
		}
		if bytes.Contains(line, []byte("kubevpn-lab/"+l.config.Name+"/")) {
			left = append(left, dir+" "+string(bytes.ReplaceAll(line, []byte{0}, []byte(" "))))
		}
	}
	return left, nil
}
