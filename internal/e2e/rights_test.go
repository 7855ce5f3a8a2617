//go:build e2e && linux

package e2e

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"github.com/vishvananda/netns"

	"kubevpn/internal/api"
	"kubevpn/internal/lab"
	"kubevpn/internal/testenv"
)

// ours selects everything that kubevpn installs.
const ours = "app.kubernetes.io/name=kubevpn"

// rightsSuite: whoever may little gets what they may have and is told what they lack; and the manager may next to
// nothing itself.
func rightsSuite(t *testing.T, w *world) {
	admin := w.newUser(t, lab.Admin)
	if out := w.installed(t); out != "" {
		// An earlier suite's. What dev gets from nothing is of interest first.
		admin.must(t, "kubevpn", "uninstall")
	}
	t.Run("developer", func(t *testing.T) { developerAlone(t, w) })
	t.Run("restricted_namespace", func(t *testing.T) { restrictedNamespace(t, w) })
	t.Run("manifest", func(t *testing.T) { manifestApplies(t, w, admin) })
	t.Run("install_what_is_there", func(t *testing.T) {
		if out := admin.must(t, "kubevpn", "install"); !strings.Contains(out, "already") || !strings.Contains(out, "kubevpn/kubevpn-traffic-manager-") {
			t.Errorf("it does not name the pod that is there: %q", out)
		}
	})
	t.Run("manager_s_pod", func(t *testing.T) { managerPod(t, w) })
	t.Run("manager_s_rights", func(t *testing.T) { managerRights(t, w) })
	t.Run("developer_with_the_admin_s_manager", func(t *testing.T) { developerBound(t, w) })
	t.Run("uninstall", func(t *testing.T) {
		admin.must(t, "kubevpn", "uninstall")
		if out := w.installed(t); out != "" {
			t.Errorf("left:\n%s", out)
		}
		if out, err := w.tryKubectl(t.Context(), "get", "namespace", "kubevpn"); err == nil {
			t.Errorf("the namespace is left: %s", out)
		}
		if r := admin.run(t, "kubevpn", "uninstall"); r.code != 0 {
			t.Errorf("uninstalling nothing: %v", r)
		}
	})
}

// installed lists what has our labels, whatever it is and wherever.
func (w *world) installed(t *testing.T) string {
	t.Helper()
	kinds := w.kubectl(t, "api-resources", "--verbs=list", "-o", "name")
	out := w.kubectl(t, "get", strings.Join(strings.Fields(kinds), ","), "-A", "-l", ours, "-o", "name", "--ignore-not-found")
	var left []string
	for line := range strings.SplitSeq(out, "\n") {
		// What the cluster itself makes of a Deployment goes with it, a moment later.
		if line != "" && !strings.HasPrefix(line, "Warning:") && !strings.HasPrefix(line, "pod/") && !strings.HasPrefix(line, "replicaset.") && !strings.HasPrefix(line, "event") && !strings.HasPrefix(line, "controllerrevision.") {
			left = append(left, line)
		}
	}
	return strings.Join(left, "\n")
}

// developerAlone: the role edit in one namespace, and no admin has done anything.
func developerAlone(t *testing.T, w *world) {
	dev := w.newUser(t, lab.Developer)
	before := dev.snapshot(t)
	r := dev.connect(t)
	t.Cleanup(func() { uninstall(t, dev, "default") })

	c := dev.connection(t)
	if c.ManagerNamespace != "default" || c.Status != api.StatusConnected {
		t.Errorf("%+v", c)
	}
	if !strings.HasPrefix(c.Services, "dialled as they are: ") {
		t.Errorf("status says of Services %q", c.Services)
	}
	// What is lost, and what to ask for.
	for _, want := range []string{"ClusterIPs", "names of Services", "kubevpn install", "kubevpn-traffic-manager-user"} {
		if !strings.Contains(r.stdout+r.stderr, want) {
			t.Errorf("connect says nothing of %q:\n%v", want, r)
		}
		if !strings.Contains(strings.Join(c.Warnings, "\n"), want) {
			t.Errorf("status has no warning about %q: %q", want, c.Warnings)
		}
	}
	pods, vip := w.pods(t, "default", "app=web"), w.clusterIP(t, "default", "web")
	for _, a := range append(pods, netip.MustParseAddr(vip)) {
		if !slices.ContainsFunc(c.CIDRs, func(p netip.Prefix) bool { return p.Contains(a) }) {
			t.Errorf("%s is not routed: %v", a, c.CIDRs)
		}
	}
	for _, url := range []string{
		"http://" + pods[0].String() + ":8080/", "http://" + pods[1].String() + ":8080/", "http://" + vip + "/",
		"http://web/", "http://web.default/", "http://web.default.svc.cluster.local/", "http://web-headless:8080/",
	} {
		if _, err := dev.get(t, url); err != nil {
			t.Error(err)
		}
	}
	dev.must(t, "ping", "-n", "-c", "1", "-W", "3", pods[1].String())
	if r := dev.sh(t, "printf hello | nc -u -w 2 %s 9001", vip); r.stdout != "hello" {
		t.Error(r)
	}
	// The name of a Service that comes later.
	w.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: later, namespace: default}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
`)
	testenv.Eventually(t, 10*time.Second, func() error { _, err := dev.get(t, "http://later/"); return err })
	if out := dev.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/"); out == "" {
		t.Error("an empty page")
	}
	dev.must(t, "kubevpn", "disconnect", "--all")
	dev.sameAs(t, before)
}

// uninstall takes a manager out after a test.
func uninstall(t *testing.T, l *laptop, namespace string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 60*time.Second)
	defer cancel()
	if r := l.runContext(ctx, t, "kubevpn", "uninstall", "--manager-namespace", namespace); r.code != 0 {
		t.Error(r)
	}
}

// restrictedNamespace: the manager's pod is admitted where pod security enforces "restricted".
func restrictedNamespace(t *testing.T, w *world) {
	w.apply(t, `
apiVersion: v1
kind: Namespace
metadata: {name: e2e-restricted, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: dev-edit, namespace: e2e-restricted}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: edit}
subjects: [{apiGroup: rbac.authorization.k8s.io, kind: User, name: dev}]
`)
	dev := w.newUser(t, lab.Developer)
	// Without a pod in the namespace, the pods' network can only be named.
	pods := w.Config().Families()[0].Pods.String()
	dev.connect(t, "-n", "e2e-restricted", "--extra-cidr", pods)
	if c := dev.connection(t); c.ManagerNamespace != "e2e-restricted" || c.Namespace != "e2e-restricted" {
		t.Errorf("%+v", c)
	}
	if _, err := dev.get(t, "http://web.default.svc.cluster.local/"); err != nil {
		t.Error(err)
	}
	dev.must(t, "kubevpn", "disconnect", "--all")
	dev.must(t, "kubevpn", "uninstall", "--manager-namespace", "e2e-restricted")
	if out := w.installed(t); out != "" {
		t.Errorf("left:\n%s", out)
	}
	// The namespace is not ours to delete.
	w.kubectl(t, "get", "namespace", "e2e-restricted")
}

// manifestApplies: what `install --dry-run` prints needs no cluster, can be applied by other means, and is found then.
func manifestApplies(t *testing.T, w *world, admin *laptop) {
	nowhere := *admin
	nowhere.kubeconfig = "/nosuch"
	file := filepath.Join(t.TempDir(), "kubevpn.yaml")
	manifest := nowhere.must(t, "kubevpn", "install", "--dry-run")
	if err := os.WriteFile(file, []byte(manifest), 0o644); err != nil {
		t.Fatal(err)
	}
	if out := w.installed(t); out != "" {
		t.Errorf("a dry run installed:\n%s", out)
	}
	w.kubectl(t, "apply", "-f", file)
	if again := w.kubectl(t, "apply", "-f", file); strings.Contains(again, "configured") || strings.Contains(again, "created") {
		t.Errorf("applying it twice changes something:\n%s", again)
	}
	r := admin.connect(t)
	c := admin.connection(t)
	if c.ManagerNamespace != "kubevpn" || c.Services != "resolved by kubevpn" || len(c.Warnings) != 0 {
		t.Errorf("%+v\n%v", c, r)
	}
	admin.must(t, "kubevpn", "disconnect", "--all")
}

// developerBound: an admin has installed the manager, and lets dev use it.
func developerBound(t *testing.T, w *world) {
	dev := w.newUser(t, lab.Developer)
	t.Run("not_bound_yet", func(t *testing.T) {
		r := dev.connect(t)
		t.Cleanup(func() { uninstall(t, dev, "default") })
		if c := dev.connection(t); c.ManagerNamespace != "default" || !strings.Contains(r.stdout+r.stderr, "kubectl create rolebinding") {
			t.Errorf("%+v\n%v", c, r)
		}
		dev.must(t, "kubevpn", "disconnect", "--all")
	})
	w.kubectl(t, "-n", "kubevpn", "create", "rolebinding", "e2e-dev", "--role=kubevpn-traffic-manager-user", "--user=dev")
	dev.connect(t)
	c := dev.connection(t)
	if c.ManagerNamespace != "kubevpn" || c.Services != "resolved by kubevpn" || len(c.Warnings) != 0 {
		t.Errorf("%+v", c)
	}
	for _, url := range []string{"http://web/", "http://web.default/", "http://" + w.clusterIP(t, "default", "web") + "/"} {
		if _, err := dev.get(t, url); err != nil {
			t.Error(err)
		}
	}
	t.Run("may_not_uninstall", func(t *testing.T) {
		r := dev.run(t, "kubevpn", "uninstall")
		failure{code: api.ExitPermission, message: `may not \w+ \S+`, hint: "."}.check(t, r)
		if c := dev.connection(t); c.Status != api.StatusConnected {
			t.Errorf("%+v", c)
		}
	})
	t.Run("an_admin_does_not_uninstall_it_unawares", func(t *testing.T) {
		admin := w.newUser(t, lab.Admin)
		if r := admin.run(t, "kubevpn", "uninstall"); r.code == 0 || !strings.Contains(r.stderr, "--force") {
			t.Errorf("it took another user's session away: %v", r)
		}
	})
	dev.must(t, "kubevpn", "disconnect", "--all")
}

// managerPod: what the manager's process may do, seen from its node.
func managerPod(t *testing.T, w *world) {
	pid := w.podProcess(t, "kubevpn", "app.kubernetes.io/component=traffic-manager")
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	if err != nil {
		t.Fatal(err)
	}
	fields := map[string]string{}
	for line := range strings.Lines(string(status)) {
		name, value, _ := strings.Cut(line, ":")
		fields[name] = strings.Join(strings.Fields(value), " ")
	}
	const none = "0000000000000000"
	for name, want := range map[string]string{
		"Uid": "65532 65532 65532 65532", "Gid": "65532 65532 65532 65532", "NoNewPrivs": "1", "Seccomp": "2",
		"CapInh": none, "CapPrm": none, "CapEff": none, "CapBnd": none, "CapAmb": none,
	} {
		if fields[name] != want {
			t.Errorf("%s of the manager is %q, want %q", name, fields[name], want)
		}
	}
	if name := filepath.Join(fmt.Sprintf("/proc/%d/root", pid), "e2e"); os.WriteFile(name, nil, 0o666) == nil {
		t.Error("the manager's root file system can be written to")
	}

	network := fmt.Sprintf("/proc/%d/ns/net", pid)
	var listening bytes.Buffer
	r := w.newUser(t, lab.Admin).run(t, "nsenter", "--net="+network, "ss", "-H", "-l", "-n", "-t", "-u")
	for line := range strings.Lines(r.stdout) {
		if f := strings.Fields(line); len(f) > 4 {
			fmt.Fprintln(&listening, f[0], f[4])
		}
	}
	got := strings.Split(strings.TrimSpace(listening.String()), "\n")
	slices.Sort(got)
	if d := cmp.Diff([]string{"tcp *:10801", "tcp *:10802", "tcp 127.0.0.1:10800"}, got); d != "" {
		t.Errorf("the manager's sockets (-want +got):\n%s", d)
	}

	// Another pod, and the node, get no further than the health check.
	ip := w.kubectl(t, "-n", "kubevpn", "get", "pods", "-l", ours, "-o", "jsonpath={.items[0].status.podIP}")
	other := fmt.Sprintf("/proc/%d/ns/net", w.podProcess(t, "default", "app=web"))
	if _, err := dialIn(other, net.JoinHostPort(ip, strconv.Itoa(api.ManagerPort))); !errors.Is(err, syscall.ECONNREFUSED) {
		t.Errorf("another pod dials the manager's port: %v", err)
	}
	for path, want := range map[string]int{"/readyz": 200, "/livez": 200, "/": 404, "/debug/pprof/": 404, "/metrics": 404} {
		client := http.Client{Timeout: 5 * time.Second, Transport: &http.Transport{
			DisableKeepAlives: true,
			DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
				return dialIn(other, address)
			},
		}}
		resp, err := client.Get("http://" + net.JoinHostPort(ip, strconv.Itoa(api.HealthPort)) + path)
		if err != nil {
			t.Error(err)
			continue
		}
		if resp.StatusCode != want {
			text, _ := io.ReadAll(io.LimitReader(resp.Body, 200))
			t.Errorf("GET %s on the health port: %s, want %d: %s", path, resp.Status, want, text)
		}
		resp.Body.Close()
	}
}

// managerRights: RBAC lets the manager's ServiceAccount do what docs/security.md says, and nothing else.
func managerRights(t *testing.T, w *world) {
	const account = "system:serviceaccount:kubevpn:kubevpn-traffic-manager"
	var rules []struct{ APIGroups, Resources, Verbs []string }
	out := w.kubectl(t, "get", "clusterrole", "kubevpn-traffic-manager-kubevpn", "-o", "jsonpath={.rules}")
	if err := json.Unmarshal([]byte(out), &rules); err != nil {
		t.Fatal(err)
	}
	got := map[string]string{}
	for _, r := range rules {
		for _, group := range r.APIGroups {
			for _, resource := range r.Resources {
				if group != "" {
					resource += "." + group
				}
				slices.Sort(r.Verbs)
				got[resource] = strings.Join(r.Verbs, " ")
			}
		}
	}
	want := map[string]string{}
	documented, err := os.ReadFile(filepath.Join("..", "..", "docs", "security.md"))
	if err != nil {
		t.Fatal(err)
	}
	_, table, _ := strings.Cut(string(documented), "| resources | verbs | for |\n")
	table, _, _ = strings.Cut(table, "\n\n")
	for line := range strings.Lines(table) {
		cells := strings.Split(strings.Trim(strings.TrimSpace(line), "|"), "|")
		if len(cells) != 3 || strings.HasPrefix(cells[0], "---") {
			continue
		}
		for resource := range strings.SplitSeq(cells[0], ",") {
			want[strings.Trim(resource, " `")] = strings.ReplaceAll(strings.TrimSpace(cells[1]), ",", "")
		}
	}
	if d := cmp.Diff(want, got); d != "" || len(want) == 0 {
		t.Errorf("the manager's ClusterRole is not what docs/security.md says (-documented +there):\n%s", d)
	}
	can := func(args ...string) bool {
		t.Helper()
		cmd, err := w.Kubectl(t.Context(), lab.Admin, append([]string{"auth", "can-i", "--as=" + account, "-q"}, args...)...)
		if err != nil {
			t.Fatal(err)
		}
		return cmd.Run() == nil
	}
	for _, yes := range [][]string{{"list", "services", "-A"}, {"watch", "endpointslices.discovery.k8s.io", "-A"}, {"list", "nodes"}, {"watch", "servicecidrs.networking.k8s.io"}} {
		if !can(yes...) {
			t.Errorf("the manager may not %v", yes)
		}
	}
	for _, no := range [][]string{
		{"get", "secrets", "-A"}, {"get", "secrets", "-n", "kubevpn"}, {"list", "pods", "-A"}, {"list", "pods", "-n", "kubevpn"},
		{"create", "pods", "-n", "kubevpn"}, {"create", "pods", "--subresource=exec", "-n", "kubevpn"}, {"create", "pods", "--subresource=portforward", "-n", "kubevpn"},
		{"get", "configmaps", "-n", "kubevpn"}, {"update", "services", "-A"}, {"patch", "nodes"}, {"get", "nodes"}, {"get", "nodes", "--subresource=proxy"},
		{"list", "namespaces"}, {"create", "serviceaccounts", "--subresource=token", "-n", "kubevpn"}, {"impersonate", "users"}, {"*", "*"},
	} {
		if can(no...) {
			t.Errorf("the manager may %v", no)
		}
	}
}

// podProcess is the process of the one container of a pod, on this machine.
func (w *world) podProcess(t *testing.T, namespace, selector string) int {
	t.Helper()
	uid := w.kubectl(t, "-n", namespace, "get", "pods", "-l", selector, "--field-selector=status.phase=Running", "-o", "jsonpath={.items[0].metadata.uid}")
	all, err := os.ReadDir("/proc")
	if err != nil {
		t.Fatal(err)
	}
	for _, entry := range all {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		groups, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "cgroup"))
		if err != nil || !strings.Contains(string(groups), "pod"+uid) {
			continue
		}
		if command, err := os.ReadFile(filepath.Join("/proc", entry.Name(), "cmdline")); err == nil && len(command) > 0 && !strings.HasPrefix(string(command), "/pause") {
			return pid
		}
	}
	t.Fatalf("no process of pod %s (%s in %s)", uid, selector, namespace)
	return 0
}

// inside runs f on a thread of its own in a network namespace. Sockets that f makes stay there.
func inside(path string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // for good: the thread ends with the goroutine
		ns, err := netns.GetFromPath(path)
		if err != nil {
			done <- err
			return
		}
		err = netns.Set(ns)
		if err == nil {
			err = f()
		}
		done <- errors.Join(err, ns.Close())
	}()
	return <-done
}

// dialIn makes a TCP connection out of a network namespace.
func dialIn(path, address string) (net.Conn, error) {
	var conn net.Conn
	err := inside(path, func() (err error) {
		d := net.Dialer{Timeout: 10 * time.Second, KeepAlive: -1}
		conn, err = d.Dial("tcp", address)
		return err
	})
	return conn, err
}
