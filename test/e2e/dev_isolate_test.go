//go:build e2e && linux

package e2e

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/url"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"golang.org/x/sys/unix"
	"k8s.io/client-go/tools/clientcmd"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// eve is a user of the laptop who cannot use sudo and is not in the laptop's passwd file.
var eve = person{name: "kveve", uid: 64020}

// withDevice returns a command that runs its arguments in a mount namespace with a /dev/net/tun and a /dev/fuse of that
// mode, because the machine's own may be restricted to root. Mode 0 means no device.
func withDevice(mode int) []string {
	script := `mount -t tmpfs tmpfs /dev/net; [ MODE = 0 ] || { mknod -m MODE /dev/net/tun c 10 200
mknod -m MODE /dev/net/fuse c 10 229; mount --bind /dev/net/fuse /dev/fuse; }; exec "$@"`
	return []string{"unshare", "-m", "--propagation", "private", "sh", "-euc", strings.ReplaceAll(script, "MODE", strconv.FormatInt(int64(mode), 8)), "sh"}
}

// isolateSuite checks that one unprivileged program gets the cluster's network and that nothing else on the laptop
// changes.
func isolateSuite(t *testing.T, w *world) {
	w.loadApp(t)
	w.apply(t, strings.ReplaceAll(devManifest, "APP_IMAGE", appRef))
	s := &shop{world: w, namespace: "deved", workload: "deployment/web"}
	s.rolledOut(t)
	root := w.newLaptop(t, lab.Admin)
	before := root.snapshot(t)
	l := w.laptopOf(t, eve)

	t.Run("missing_device_is_reported", func(t *testing.T) { isolateErrors(t, l, s) })
	l.within = withDevice(0o666)
	t.Run("program_has_the_cluster_s_network", func(t *testing.T) { isolateProgram(t, l, s) })
	t.Run("service_account_token_works", func(t *testing.T) {
		r := l.isolate(t, s, "--", "sh", "-c", `cd /var/run/secrets/kubernetes.io/serviceaccount && curl -sS --cacert ca.crt -H "Authorization: Bearer $(cat token)" -H 'Content-Type: application/json' \
			-d '{"apiVersion":"authentication.k8s.io/v1","kind":"SelfSubjectReview"}' https://kubernetes.default/apis/authentication.k8s.io/v1/selfsubjectreviews`)
		if r.code != 0 || !strings.Contains(r.stdout, `"system:serviceaccount:deved:robot"`) {
			t.Error(r)
		}
	})
	t.Run("laptop_is_unchanged", func(t *testing.T) {
		p := l.isolated(t, s)
		root.sameAs(t, before)
		if r := root.run(t, "curl", "-sS", "--max-time", "3", "http://"+w.clusterIP(t, "deved", "web")); r.code == 0 {
			t.Errorf("the laptop reaches the cluster: %v", r)
		}
		for _, role := range []string{theDaemon, theHelper} {
			if found := l.processes(t, role); len(found) > 0 {
				t.Errorf("a %s runs: %v", role, found)
			}
		}
		if code := p.end(t); code != 0 {
			t.Errorf("exit %d", code)
		}
	})
	t.Run("exit_code_is_the_program_s", func(t *testing.T) {
		for _, tt := range []struct {
			script string
			code   int
		}{{"exit 7", 7}, {"kill -TERM $$", 128 + 15}} {
			if r := l.isolate(t, s, "--", "sh", "-c", tt.script); r.code != tt.code {
				t.Error(r)
			}
		}
		failure{code: api.ExitUsage, message: "no-such-program", within: time.Minute}.checkProgress(t, l.isolate(t, s, "--", "no-such-program"))
	})
	t.Run("program_receives_requests", func(t *testing.T) { isolateRequests(t, l, s, w.visitor(t)) })
	t.Run("kill_9_ends_the_program", func(t *testing.T) { isolateKilled(t, l, s, w.visitor(t)) })
	t.Run("two_programs_run_at_once", func(t *testing.T) {
		a, b := l.isolated(t, s), l.isolated(t, s)
		for _, p := range []*isolated{a, b} {
			p.reaches(t, "web-")
		}
		if code := a.end(t); code != 0 {
			t.Errorf("exit %d", code)
		}
		b.reaches(t, "web-")
		if code := b.end(t); code != 0 {
			t.Errorf("exit %d", code)
		}
	})
	t.Run("works_beside_the_daemon", func(t *testing.T) {
		root.connect(t)
		p := l.isolated(t, s)
		p.reaches(t, "web-")
		root.reachesWeb(t, w)
		if code := p.end(t); code != 0 {
			t.Errorf("exit %d", code)
		}
		root.reachesWeb(t, w)
		root.must(t, "kubevpn", "disconnect", "--all")
	})
	other := s.twin(t)
	t.Run("two_clusters_with_the_same_addresses", func(t *testing.T) { isolateTwoClusters(t, l, s, other) })
	t.Run("connected_to_both", func(t *testing.T) { mappedTwins(t, root, other) })
	root.must(t, "kubevpn", "quit")
	root.sameAs(t, before)
}

// isolateReachSuite checks that the program reaches what connect reaches, in each netstack and address family, and the
// outside as before.
func isolateReachSuite(t *testing.T, w *world) {
	root := w.newLaptop(t, lab.Admin)
	before := root.snapshot(t)
	// As in distributions: every user may ping.
	was := root.must(t, "sysctl", "-n", "net.ipv4.ping_group_range")
	root.must(t, "sysctl", "-qw", "net.ipv4.ping_group_range=0 2147483647")
	l := w.laptopOf(t, eve)
	l.within = withDevice(0o666)
	type check struct{ what, command string }
	const page = "curl -sSf --max-time 10 -o /dev/null http://"
	checks := []check{{"by name", page + "web.default/"}, {"outside by name", page + "www.outside.test/"}}
	for n, family := range w.Config().Families() {
		vip := w.kubectl(t, "get", "service", "web", "-o", fmt.Sprintf("jsonpath={.spec.clusterIPs[%d]}", n))
		pod := w.kubectl(t, "get", "pods", "-l", "app=web", "-o", fmt.Sprintf("jsonpath={.items[0].status.podIPs[%d].ip}", n))
		outside := family.Outside.String()
		checks = append(checks,
			check{"ClusterIP " + vip, page + net.JoinHostPort(vip, "80")},
			check{"pod " + pod, page + net.JoinHostPort(pod, "8080")},
			check{"UDP to " + vip, `[ "$(printf hello | nc -u -w 2 ` + vip + ` 9001)" = hello ]`},
			check{"ping of the pod " + pod, "ping -n -c 1 -W 10 " + pod},
			check{"a closed port", "curl -sS --max-time 10 http://" + net.JoinHostPort(pod, "4444") + " || [ $? = 7 ]"}, // refused
			check{"outside " + outside, page + net.JoinHostPort(outside, "80")},
			check{"ping of " + outside, "ping -n -c 1 -W 10 " + outside},
		)
	}
	script, want := "", ""
	for _, c := range checks {
		script += fmt.Sprintf("if said=$({ %s; } 2>&1); then echo '%s: reached'; else echo \"%[2]s: $said\"; fi\n", c.command, c.what)
		want += c.what + ": reached\n"
	}
	r := l.run(t, "kubevpn", "dev", "deployment/web", "-n", "default", "--isolate", "--", "sh", "-c", script)
	if d := cmp.Diff(want, r.stdout); d != "" || r.code != 0 {
		t.Errorf("(-want +got)\n%s\n%v", d, r)
	}
	root.must(t, "sysctl", "-qw", "net.ipv4.ping_group_range="+was)
	root.sameAs(t, before)
}

func (l *laptop) isolate(t *testing.T, s *shop, args ...string) result {
	t.Helper()
	return l.dev(t, s, append([]string{"--isolate"}, args...)...)
}

// checkProgress is check for a command that has already printed its progress.
func (f failure) checkProgress(t *testing.T, r result) {
	t.Helper()
	if at := strings.Index(r.stderr, "Error: "); at >= 0 {
		r.stderr = r.stderr[at:]
	}
	f.check(t, r)
}

func isolateErrors(t *testing.T, l *laptop, s *shop) {
	for _, tt := range []struct {
		mode    int
		message string
	}{
		{0, `/dev/net/tun does not exist: .*sudo modprobe tun`},
		{0o600, `/dev/net/tun: permission denied; .*sudo chmod 0666 /dev/net/tun`},
	} {
		l.within = withDevice(tt.mode)
		failure{code: api.ExitNoTUN, message: tt.message, hint: "without --isolate", within: 30 * time.Second}.check(t, l.isolate(t, s, "--", "true"))
	}
}

// staticProgram returns a Go program without libc that every user may run.
func staticProgram(t *testing.T) string {
	t.Helper()
	dir, err := os.MkdirTemp("", "kubevpn-e2e-static-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	path := filepath.Join(dir, "probe")
	build := exec.CommandContext(t.Context(), "go", "build", "-o", path, "kubevpn/pkg/host/sandbox/testdata/probe")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	if err := os.Chmod(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func isolateProgram(t *testing.T, l *laptop, s *shop) {
	outside := ""
	for line := range strings.Lines(l.must(t, "getent", "ahostsv4", "www.outside.test")) {
		outside, _, _ = strings.Cut(line, " ")
	}
	static := staticProgram(t)
	ping := `import socket, struct, sys
s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM, socket.IPPROTO_ICMP); s.settimeout(10)
body = struct.pack("!BBHHH", 8, 0, 0, 0, 7) + b"payload"
n = sum(struct.unpack("!%dH" % (len(body + b"\0") // 2), body + b"\0")); n = (n >> 16) + (n & 0xffff); n = ~(n + (n >> 16)) & 0xffff
s.sendto(body[:2] + struct.pack("!H", n) + body[4:], (sys.argv[1], 0)); print(s.recv(100)[8:].decode())`
	for _, tt := range []struct {
		name string
		args []string
		want string
	}{
		{"environment", []string{"sh", "-c", `echo "$GREETING|$PASSWORD|$COLOR"`}, "hello from $(NODE)|hunter2|blue\n"},
		{"files", []string{"sh", "-c", "cat /settings/page /srv/pages/page /keys/password; stat -f -c ' %T' /keys"}, "welcome\nwelcome\nhunter2 tmpfs\n"},
		{"user", []string{"id", "-u"}, fmt.Sprintln(eve.uid)},
		{"interfaces", []string{"sh", "-c", "ip -o link | wc -l"}, "2\n"},
		{"service_by_name", []string{"curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "http://web"}, "200"},
		{"service_by_address", []string{"curl", "-sS", "-o", "/dev/null", "-w", "%{http_code}", "http://" + s.clusterIP(t, s.namespace, "web")}, "200"},
		{"outside_by_name", []string{"curl", "-sS", "http://www.outside.test/"}, "outside: GET"},
		{"outside_by_address", []string{"curl", "-sS", "http://" + outside + "/"}, "outside: GET"},
		{"static_service", []string{static, "get", "http://web.deved.svc.cluster.local"}, `"name":"web-`},
		{"static_outside", []string{static, "get", "http://www.outside.test/"}, "outside: GET"},
		{"name_over_tcp", []string{"dig", "+tcp", "+short", "web.deved.svc.cluster.local"}, s.clusterIP(t, s.namespace, "web") + "\n"},
		{"ping_pod", []string{"python3", "-c", ping, s.pods(t, s.namespace, "app=shop")[0].String()}, "payload\n"},
		{"ping", []string{"ping", "-c", "1", "-W", "10", s.pods(t, s.namespace, "app=shop")[0].String()}, "ttl="},
		{"refused", []string{"sh", "-c", "curl -s http://" + outside + ":1; echo $?"}, "7\n"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := l.isolate(t, s, append([]string{"--"}, tt.args...)...)
			if r.code != 0 || !strings.Contains(r.stdout, tt.want) {
				t.Errorf("%v\nwant %q", r, tt.want)
			}
		})
	}
	t.Run("busybox", func(t *testing.T) {
		testenv.NeedPrograms(t, "busybox")
		if r := l.isolate(t, s, "--", "busybox", "wget", "-q", "-O", "-", "http://web.deved"); r.code != 0 || !strings.Contains(r.stdout, `"name":"web-`) {
			t.Error(r)
		}
	})
	for _, path := range []string{"/settings", "/keys", "/scratch", "/srv/pages"} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s exists on the laptop", path)
		}
	}
}

// isolated is a running program that reads commands from its input: fetch a URL, or end.
type isolated struct {
	cmd  *exec.Cmd
	in   io.WriteCloser
	out  *os.File
	dir  string
	once sync.Once
	code int
}

// isolated starts a program and returns when it runs.
func (l *laptop) isolated(t *testing.T, s *shop, args ...string) *isolated {
	t.Helper()
	dir := t.TempDir()
	out, err := os.Create(filepath.Join(dir, "out"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { out.Close() })
	argv := append([]string{"kubevpn", "dev", s.workload, "-n", s.namespace, "--isolate"}, args...)
	p := &isolated{dir: dir, out: out}
	p.cmd = l.command(t.Context(), t, append(argv, "--", "sh", "-c", `echo began; while read url; do echo "$url $(curl -sS --max-time 10 "$url" 2>&1)"; done`)...)
	p.cmd.Stdout, p.cmd.Stderr = out, out
	if p.in, err = p.cmd.StdinPipe(); err != nil {
		t.Fatal(err)
	}
	if err := p.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { p.wait() })
	t.Cleanup(func() { p.in.Close() })
	p.shows(t, "began\n")
	return p
}

func (p *isolated) shows(t *testing.T, what string) {
	t.Helper()
	testenv.Eventually(t, 60*time.Second, func() error {
		text, err := os.ReadFile(p.out.Name())
		if err == nil && !strings.Contains(string(text), what) {
			err = fmt.Errorf("the output does not contain %q:\n%s", what, text)
		}
		return err
	})
}

// reaches has the program fetch a page of the Service and checks that a pod with this prefix answers.
func (p *isolated) reaches(t *testing.T, prefix string) {
	t.Helper()
	page := "http://web/?" + strconv.FormatInt(time.Now().UnixNano(), 10)
	fmt.Fprintln(p.in, page)
	p.shows(t, page+` {"name":"`+prefix)
}

// end ends the program and returns its exit code.
func (p *isolated) end(t *testing.T) int {
	t.Helper()
	p.in.Close()
	return p.wait()
}

func (p *isolated) wait() int {
	p.once.Do(func() {
		_ = p.cmd.Wait() // wait returns the exit code
		p.code = p.cmd.ProcessState.ExitCode()
	})
	return p.code
}

func isolateRequests(t *testing.T, l *laptop, s *shop, v *visitor) {
	service := "http://" + s.clusterIP(t, s.namespace, "web") + "/"
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	cmd := l.command(ctx, t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--isolate", "--headers", mine+"="+me, "--", filepath.Join(bin, "app"), "-name", "developer", "-host", "127.0.0.1")
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, time.Minute, func() error { return v.want(service, "developer", mine, me) })
	if err := v.of(service, "web-"); err != nil {
		t.Error(err)
	}
	if err := cmd.Process.Signal(syscall.SIGTERM); err != nil { // kubevpn forwards it to the program
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Errorf("after SIGTERM: %v", err)
	}
	if err := v.of(service, "web-", mine, me); err != nil {
		t.Errorf("after the program ended: %v", err)
	}
}

// isolateKilled checks that kill -9 of the command, or of the sandbox's first process, ends the program, and that the
// application receives the requests again.
func isolateKilled(t *testing.T, l *laptop, s *shop, v *visitor) {
	service := "http://" + s.clusterIP(t, s.namespace, "web") + "/"
	for _, victim := range []string{"command", "init"} {
		t.Run(victim, func(t *testing.T) {
			cmd := l.command(t.Context(), t, "kubevpn", "dev", s.workload, "-n", s.namespace, "--isolate", "--headers", mine+"="+me, "--",
				filepath.Join(bin, "app"), "-name", "doomed-"+victim, "-host", "127.0.0.1")
			if err := cmd.Start(); err != nil {
				t.Fatal(err)
			}
			ended := make(chan struct{})
			go func() {
				defer close(ended)
				_ = cmd.Wait() // the signal makes it fail
			}()
			testenv.Eventually(t, 60*time.Second, func() error { return v.want(service, "doomed-"+victim, mine, me) })
			pid := cmd.Process.Pid
			if victim == "init" {
				var all []string // each thread lists the children that it started
				for _, task := range tasks(t, pid) {
					more, err := os.ReadFile(fmt.Sprintf("/proc/%d/task/%s/children", pid, task))
					if err == nil {
						all = append(all, strings.Fields(string(more))...)
					}
				}
				if len(all) == 0 {
					t.Fatal("the command has no child")
				}
				var err error
				if pid, err = strconv.Atoi(all[0]); err != nil {
					t.Fatal(err)
				}
			}
			if err := unix.Kill(pid, unix.SIGKILL); err != nil {
				t.Fatal(err)
			}
			<-ended
			testenv.Eventually(t, time.Minute, func() error {
				if r := l.run(t, "pgrep", "-f", "doomed-"+victim); r.code == 0 {
					return fmt.Errorf("the program is left: %s", r.stdout)
				}
				return v.of(service, "web-", mine, me)
			})
		})
	}
}

func tasks(t *testing.T, pid int) (names []string) {
	t.Helper()
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
	if err != nil {
		t.Fatal(err)
	}
	for _, e := range entries {
		names = append(names, e.Name())
	}
	return names
}

// isolateTwoClusters runs a program in each of two clusters. The other lab has the same ranges and the same API server
// address, so a relay on this laptop forwards to that API server.
func isolateTwoClusters(t *testing.T, l *laptop, s *shop, other *world) {
	other.loadApp(t)
	other.apply(t, strings.ReplaceAll(strings.ReplaceAll(devManifest, "APP_IMAGE", appRef), "color: blue", "color: red"))
	there := &shop{world: other, namespace: s.namespace, workload: s.workload}
	there.rolledOut(t)
	// Both clusters get the same Service address.
	for _, x := range []*shop{s, there} {
		x.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: twin, namespace: deved}
spec: {clusterIP: 10.96.200.200, selector: {app: shop}, ports: [{port: 80, targetPort: http}]}
`)
	}
	far := *l
	far.kubeconfig = l.relayed(t, other)
	a, b := l.isolated(t, s), far.isolated(t, there)
	for _, x := range []struct {
		p *isolated
		s *shop
	}{{a, s}, {b, there}, {a, s}} {
		pods := x.s.ready(t)
		for _, page := range []string{"http://twin/", "http://10.96.200.200/"} {
			page += "?" + strconv.FormatInt(time.Now().UnixNano(), 10)
			fmt.Fprintln(x.p.in, page)
			x.p.shows(t, page+` {"name":"`)
			text, err := os.ReadFile(x.p.out.Name())
			if err != nil {
				t.Fatal(err)
			}
			_, answer, _ := strings.Cut(string(text), page+` {"name":"`)
			name, _, _ := strings.Cut(answer, `"`)
			if _, there := pods[name]; !there {
				t.Errorf("%s is answered by %s, want one of %v", page, name, pods)
			}
		}
	}
	for _, p := range []*isolated{a, b} {
		if code := p.end(t); code != 0 {
			t.Errorf("exit %d", code)
		}
	}
}

// twin returns another lab with the same address ranges.
func (w *world) twin(t *testing.T) *world {
	t.Helper()
	c := lab.Config{Name: w.Config().Name + "-same", Nodes: 1, Ranges: w.Config().Ranges, Progress: os.Stderr}
	l, err := lab.Attach(c)
	if errors.Is(err, lab.ErrNotUp) {
		l = lab.New(c)
		err = start(t, l)
	}
	if err != nil {
		t.Fatal(err)
	}
	other := &world{Lab: l}
	other.loadImage(t)
	return other
}

// relayed returns a kubeconfig for another lab's cluster that uses a relay on this laptop.
func (l *laptop) relayed(t *testing.T, other *world) string {
	t.Helper()
	admin, err := other.Kubeconfig(lab.Admin)
	if err != nil {
		t.Fatal(err)
	}
	cfg, err := clientcmd.LoadFromFile(admin)
	if err != nil {
		t.Fatal(err)
	}
	var listener net.Listener
	if err := inside(l.network(), func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	var server *url.URL
	for _, c := range cfg.Clusters {
		if server, err = url.Parse(c.Server); err != nil {
			t.Fatal(err)
		}
		c.Server, c.TLSServerName = "https://"+listener.Addr().String(), server.Hostname()
	}
	ctx, cancel := context.WithCancel(context.Background())
	var relays sync.WaitGroup
	relays.Go(func() {
		for {
			near, err := listener.Accept()
			if err != nil {
				return
			}
			relays.Go(func() { relayTo(ctx, near, other, server.Host) })
		}
	})
	t.Cleanup(func() { listener.Close(); cancel(); relays.Wait() })
	path := filepath.Join(l.home, "kubeconfig-of-the-other")
	if err := errors.Join(clientcmd.WriteToFile(*cfg, path), os.Chown(path, int(l.uid), int(l.uid))); err != nil {
		t.Fatal(err)
	}
	return path
}

// relayTo copies bytes between near and an address that the other lab's laptop reaches.
func relayTo(ctx context.Context, near net.Conn, other *world, address string) {
	defer near.Close()
	far, err := other.Dial(ctx, "laptop", "tcp", address)
	if err != nil {
		return // the client sees a closed connection
	}
	defer far.Close()
	stop := context.AfterFunc(ctx, func() { near.Close(); far.Close() })
	defer stop()
	var both sync.WaitGroup
	both.Go(func() { _, _ = io.Copy(far, near); far.Close() })
	both.Go(func() { _, _ = io.Copy(near, far); near.Close() })
	both.Wait()
}
