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
	batchv1 "k8s.io/api/batch/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// ours selects everything that kubevpn installs.
const ours = "app.kubernetes.io/name=kubevpn"

// rightsSuite checks that users with few permissions get what they may have and are told what is missing, and that the
// manager itself has almost no permissions.
func rightsSuite(t *testing.T, w *world) {
	admin := w.newUser(t, lab.Admin)
	if out := w.installed(t); out != "" {
		// Remove the manager of an earlier suite: the first test needs a cluster without one.
		admin.must(t, "kubevpn", "uninstall")
	}
	t.Run("namespace_editor_connects", func(t *testing.T) { developerAlone(t, w) })
	t.Run("restricted_namespace_admits_the_manager", func(t *testing.T) { restrictedNamespace(t, w) })
	t.Run("dry_run_manifest_can_be_applied", func(t *testing.T) { manifestApplies(t, w, admin) })
	t.Run("second_install_names_the_running_pod", func(t *testing.T) {
		if out := admin.must(t, "kubevpn", "install"); !strings.Contains(out, "already") || !strings.Contains(out, "kubevpn/kubevpn-traffic-manager-") {
			t.Errorf("the output does not name the running pod: %q", out)
		}
	})
	t.Run("manager_s_process_is_confined", func(t *testing.T) { managerPod(t, w) })
	t.Run("manager_has_only_documented_rights", func(t *testing.T) { managerRights(t, w) })
	t.Run("bound_developer_uses_the_admin_s_manager", func(t *testing.T) { developerBound(t, w) })
	t.Run("bound_developer_has_the_admin_s_defaults", func(t *testing.T) { defaultsBound(t, w) })
	t.Run("uninstall_leaves_nothing", func(t *testing.T) {
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

// installed lists the objects with our labels, of any kind and in any namespace.
func (w *world) installed(t *testing.T) string {
	t.Helper()
	kinds := w.kubectl(t, "api-resources", "--verbs=list", "-o", "name")
	out := w.kubectl(t, "get", strings.Join(strings.Fields(kinds), ","), "-A", "-l", ours, "-o", "name", "--ignore-not-found")
	var left []string
	for line := range strings.SplitSeq(out, "\n") {
		// The cluster deletes the objects of a Deployment later.
		if line != "" && !strings.HasPrefix(line, "Warning:") && !strings.HasPrefix(line, "pod/") && !strings.HasPrefix(line, "replicaset.") && !strings.HasPrefix(line, "event") && !strings.HasPrefix(line, "controllerrevision.") {
			left = append(left, line)
		}
	}
	return strings.Join(left, "\n")
}

// developerAlone uses the role edit in one namespace, without any preparation by an admin.
func developerAlone(t *testing.T, w *world) {
	dev := w.newUser(t, lab.Developer)
	before := dev.snapshot(t)
	r := dev.connect(t)
	t.Cleanup(func() { uninstall(t, dev, "default") })

	c := dev.connection(t)
	if c.ManagerNamespace != "default" || c.Status != api.StatusConnected {
		t.Errorf("%+v", c)
	}
	if !strings.HasPrefix(c.Services, "dialed as they are: ") {
		t.Errorf("status says of Services %q", c.Services)
	}
	// It says that the manager is temporary, and no list of what it cannot do, except for networks that it guesses.
	if said := r.stdout + r.stderr; !strings.Contains(said, "while laptops use it") || strings.Contains(said, "ask") {
		t.Errorf("connect says\n%v", said)
	}
	for _, warning := range c.Warnings {
		if !strings.Contains(warning, "guessed from pods' addresses") {
			t.Errorf("status warns: %s", warning)
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
	// The name of a later Service resolves.
	w.apply(t, `
apiVersion: v1
kind: Service
metadata: {name: later, namespace: default}
spec: {selector: {app: web}, ports: [{port: 80, targetPort: 8080}]}
`)
	testenv.Eventually(t, time.Minute, func() error { _, err := dev.get(t, "http://later/"); return err })
	if out := dev.must(t, "curl", "-sS", "--max-time", "5", "http://www.outside.test/"); out == "" {
		t.Error("an empty page")
	}
	// A manager whose lease has ended, as after a long sleep of the laptop, is installed again.
	first := w.kubectl(t, "-n", "default", "get", "deployment", "kubevpn-traffic-manager", "-o", "jsonpath={.metadata.uid}")
	w.kubectl(t, "-n", "default", "patch", "job", "kubevpn-traffic-manager", "--type=merge", "-p", `{"spec":{"activeDeadlineSeconds":1}}`)
	testenv.Eventually(t, time.Minute, func() error {
		if now, err := w.tryKubectl(t.Context(), "-n", "default", "get", "deployment", "kubevpn-traffic-manager", "-o", "jsonpath={.metadata.uid}"); err != nil || now == first {
			return fmt.Errorf("the former manager is there: %s %w", now, err)
		}
		_, err := dev.get(t, "http://web.default/")
		return err
	})
	dev.must(t, "kubevpn", "disconnect", "--all")
	dev.sameAs(t, before)
	leaseEnds(t, w, "default")
}

// leaseEnds checks that the lease of a temporary manager ends soon after the last laptop has left, and that the manager
// goes with it.
func leaseEnds(t *testing.T, w *world, namespace string) {
	var job batchv1.Job
	if err := json.Unmarshal([]byte(w.kubectl(t, "-n", namespace, "get", "job", "kubevpn-traffic-manager", "-o", "json")), &job); err != nil {
		t.Fatal(err)
	}
	if left := time.Until(job.CreationTimestamp.Add(time.Duration(*job.Spec.ActiveDeadlineSeconds) * time.Second)); left > 50*time.Second {
		t.Errorf("the manager stays for %v after the last laptop has left", left)
	}
	w.kubectl(t, "-n", namespace, "patch", "job", job.Name, "--type=merge", "-p", `{"spec":{"activeDeadlineSeconds":1}}`)
	testenv.Eventually(t, time.Minute, func() error {
		if out := w.installed(t); out != "" {
			return fmt.Errorf("left:\n%s", out)
		}
		return nil
	})
}

// uninstall removes a manager after a test.
func uninstall(t *testing.T, l *laptop, namespace string) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.WithoutCancel(t.Context()), 60*time.Second)
	defer cancel()
	if r := l.runContext(ctx, t, "kubevpn", "uninstall", "--manager-namespace", namespace); r.code != 0 {
		t.Error(r)
	}
}

// restrictedNamespace checks that pod security level "restricted" admits the manager's pod.
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
	// Without a pod in the namespace, the user must name the pod network.
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
	// kubevpn must not delete the namespace.
	w.kubectl(t, "get", "namespace", "e2e-restricted")
}

// manifestApplies checks that `install --dry-run` works without a cluster, and that connect finds what others apply.
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

// developerBound uses a manager that an admin installed and allowed dev to use.
func developerBound(t *testing.T, w *world) {
	dev := w.newUser(t, lab.Developer)
	t.Run("unbound_developer_installs_their_own", func(t *testing.T) {
		dev.connect(t)
		t.Cleanup(func() { uninstall(t, dev, "default") })
		dev.connect(t, "--keep") // what is temporary stays
		if out := w.kubectl(t, "-n", "default", "get", "job", "-l", ours, "-o", "name"); out != "" {
			t.Errorf("the lease is left: %s", out)
		}
		if out := w.kubectl(t, "-n", "default", "get", "deployment,serviceaccount", "-l", ours, "-o", "jsonpath={.items[*].metadata.ownerReferences}"); out != "" {
			t.Errorf("somebody owns what stays: %s", out)
		}
		r := dev.connect(t, "--reconnect")
		if c := dev.connection(t); c.ManagerNamespace != "default" || !strings.Contains(r.stdout+r.stderr, "kubectl create rolebinding") {
			t.Errorf("%+v\n%v", c, r)
		}
		dev.must(t, "kubevpn", "disconnect", "--all")
	})
	w.kubectl(t, "-n", "kubevpn", "create", "rolebinding", "e2e-dev", "--role=kubevpn-traffic-manager-user", "--user=dev")
	t.Run("first_use_of_the_admin_s_manager_needs_consent", func(t *testing.T) {
		careful := w.newUser(t, lab.Developer)
		careful.asks = true
		r := careful.run(t, "kubevpn", "connect")
		failure{code: api.ExitConsent, message: "the traffic manager in the namespace kubevpn was not installed by you", hint: "--yes", within: 20 * time.Second}.check(t, r)
		if out := careful.must(t, "kubevpn", "trust", "list"); out != "" {
			t.Errorf("connect used the manager without consent: %q", out)
		}
		careful.connect(t, "--yes")
		careful.must(t, "kubevpn", "disconnect", "--all")
		uid := w.kubectl(t, "get", "namespace", "kubevpn", "-o", "jsonpath={.metadata.uid}")
		if out := careful.must(t, "kubevpn", "trust", "list", "-o", "json"); !strings.Contains(out, uid) {
			t.Errorf("the namespace's UID %s is not stored: %s", uid, out)
		}
		careful.connect(t)
		careful.must(t, "kubevpn", "disconnect", "--all")
	})
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
	t.Run("developer_cannot_uninstall_it", func(t *testing.T) {
		r := dev.run(t, "kubevpn", "uninstall")
		failure{code: api.ExitPermission, message: `may not \w+ \S+`, hint: "."}.check(t, r)
		if c := dev.connection(t); c.Status != api.StatusConnected {
			t.Errorf("%+v", c)
		}
	})
	t.Run("uninstall_of_a_used_manager_is_rejected", func(t *testing.T) {
		admin := w.newUser(t, lab.Admin)
		if r := admin.run(t, "kubevpn", "uninstall"); r.code == 0 || !strings.Contains(r.stderr, "--force") {
			t.Errorf("uninstall ended another user's session: %v", r)
		}
	})
	dev.must(t, "kubevpn", "disconnect", "--all")
}

// defaultsBound checks the client defaults with the rights of the user Role, which developerBound has bound. The
// ConfigMap ends with the namespace.
func defaultsBound(t *testing.T, w *world) {
	w.apply(t, `
apiVersion: v1
kind: ConfigMap
metadata: {name: kubevpn-client-defaults, namespace: kubevpn}
data:
  config.yaml: |
    extraCIDRs: [10.77.0.0/16, 127.0.0.0/8]
    extraDomains: [corp.test, co.uk]
    mode: sidecar
    requireMatch: [default]
    netstak: gvisor
`)
	dev := w.newUser(t, lab.Developer)
	dev.asks = true
	dev.connect(t, "--extra-cidr", "", "--extra-domain", "", "--yes") // trusts the manager, no network and no domain
	if c := dev.connection(t); slices.Contains(c.CIDRs, netip.MustParsePrefix("10.77.0.0/16")) || c.DNS.ExtraDomains != nil {
		t.Errorf("empty flags do not replace the networks and domains of the cluster: %v, %q", c.CIDRs, c.DNS.ExtraDomains)
	}
	dev.must(t, "kubevpn", "disconnect", "--all")

	r := dev.run(t, "kubevpn", "connect")
	failure{code: api.ExitConsent, message: `the client defaults of the cluster add networks.*10\.77\.0\.0/16`, hint: "--extra-cidr ''", within: 20 * time.Second}.check(t, r)
	for _, want := range []string{`unknown key "netstak"`, "extraCIDRs: 127.0.0.0/8 is ignored: it is loopback", `extraDomains: ignored: domain "co.uk"`} {
		if !strings.Contains(r.stderr, want) {
			t.Errorf("no warning %q: %v", want, r)
		}
	}
	r = dev.run(t, "kubevpn", "connect", "--extra-cidr", "")
	failure{code: api.ExitConsent, message: `the client defaults of the cluster add domains.*corp\.test`, hint: "--extra-domain ''", within: 20 * time.Second}.check(t, r)
	dev.connect(t, "--yes")
	dev.must(t, "kubevpn", "disconnect", "--all")
	dev.connect(t) // the answers are stored
	c := dev.connection(t)
	if !slices.Contains(c.CIDRs, netip.MustParsePrefix("10.77.0.0/16")) {
		t.Errorf("10.77.0.0/16 is not routed: %v", c.CIDRs)
	}
	dev.resolves(t, dbName, dbAddress)
	want := api.Setting{Key: "extraCIDRs", Value: "10.77.0.0/16", Origin: api.OriginCluster, Source: "ConfigMap kubevpn/kubevpn-client-defaults"}
	if !slices.Contains(c.Settings, want) {
		t.Errorf("the settings are %+v, want %+v", c.Settings, want)
	}
	if out := dev.must(t, "kubevpn", "config", "view", "--show-origin"); !strings.Contains(out, "cluster (ConfigMap kubevpn/kubevpn-client-defaults)") {
		t.Errorf("config view does not name the ConfigMap:\n%s", out)
	}
	failure{code: api.ExitMatch, message: "an intercept in the namespace default requires a match", hint: "--require-match=false"}.
		check(t, dev.run(t, "kubevpn", "proxy", "deployment/web"))
	dev.must(t, "kubevpn", "disconnect", "--all")
}

// managerPod checks on the node what the manager's process is allowed to do.
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

	// Another pod, and the node, reach only the health check.
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

// managerRights checks that RBAC allows the manager's ServiceAccount exactly what docs/security.md lists.
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
	for _, yes := range [][]string{{"list", "services", "-A"}, {"watch", "endpointslices.discovery.k8s.io", "-A"}, {"list", "nodes"}, {"get", "pods", "-A"}, {"watch", "servicecidrs.networking.k8s.io"}} {
		if !can(yes...) {
			t.Errorf("the manager may not %v", yes)
		}
	}
	for _, no := range [][]string{
		{"get", "secrets", "-A"}, {"get", "secrets", "-n", "kubevpn"}, {"list", "pods", "-A"}, {"list", "pods", "-n", "kubevpn"}, {"watch", "pods", "-A"}, {"get", "pods", "--subresource=log", "-A"},
		{"create", "pods", "-n", "kubevpn"}, {"create", "pods", "--subresource=exec", "-n", "kubevpn"}, {"create", "pods", "--subresource=portforward", "-n", "kubevpn"},
		{"get", "configmaps", "-n", "kubevpn"}, {"update", "services", "-A"}, {"patch", "nodes"}, {"get", "nodes"}, {"get", "nodes", "--subresource=proxy"},
		{"list", "namespaces"}, {"create", "serviceaccounts", "--subresource=token", "-n", "kubevpn"}, {"impersonate", "users"}, {"*", "*"},
	} {
		if can(no...) {
			t.Errorf("the manager may %v", no)
		}
	}
}

// podProcess returns the process of the only container of a pod, on this machine.
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

// inside runs f on its own thread in a network namespace. Sockets that f creates stay there.
func inside(path string, f func() error) error {
	done := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // never unlocked, so the thread ends with the goroutine
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

// dialIn opens a TCP connection from a network namespace.
func dialIn(path, address string) (net.Conn, error) {
	var conn net.Conn
	err := inside(path, func() (err error) {
		d := net.Dialer{Timeout: 10 * time.Second, KeepAlive: -1}
		conn, err = d.Dial("tcp", address)
		return err
	})
	return conn, err
}
