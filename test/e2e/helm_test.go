//go:build e2e && linux

package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/e2e/build"
	"kubevpn/test/lab"
)

// helmNamespace is prepared as docs/how-to/helm.md says. It contains the account of a user whom only the chart
// gives rights.
const helmNamespace = `
apiVersion: v1
kind: Namespace
metadata: {name: e2e-helm, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: ann, namespace: e2e-helm}
`

// chartRelease is a release of the chart in the lab.
type chartRelease struct {
	*world
	program    string // helm
	kubeconfig string
}

// helm runs a helm command for the namespace of the release.
func (r chartRelease) helm(t *testing.T, args ...string) (string, error) {
	t.Helper()
	argv := append([]string{r.program, "--kubeconfig=" + r.kubeconfig, "--namespace=e2e-helm"}, args...)
	cmd, err := r.Command(t.Context(), "laptop", argv...)
	if err != nil {
		t.Fatal(err)
	}
	out, err := cmd.CombinedOutput()
	return string(out), err
}

func (r chartRelease) must(t *testing.T, args ...string) {
	t.Helper()
	start := time.Now()
	if out, err := r.helm(t, args...); err != nil {
		t.Fatalf("helm %s: %v: %s", strings.Join(args, " "), err, out)
	}
	t.Logf("helm %s: %v", args[0], time.Since(start).Round(100*time.Millisecond))
}

// helmSuite installs the chart with the previous traffic manager where pod security is restricted, connects as a user
// whom only the chart gives rights, upgrades while that user is connected, connects with the previous kubevpn, and
// uninstalls.
func helmSuite(t *testing.T, w *world) {
	const old = "docker.io/kubevpn/kubevpn:helm"
	admin := w.newUser(t, lab.Admin)
	if out := w.installed(t); out != "" {
		admin.must(t, "kubevpn", "uninstall", "--force")
	}
	program, err := w.Helm(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	chart, err := filepath.Abs("../../charts/kubevpn")
	if err != nil {
		t.Fatal(err)
	}
	previous := w.loadPrevious(t, old)
	w.apply(t, helmNamespace)
	r := chartRelease{world: w, program: program, kubeconfig: admin.kubeconfig}
	values := []string{"--set", "access.users={system:serviceaccount:e2e-helm:ann}", "--set", "networkPolicy.enabled=true",
		"--set", "image.repository=docker.io/kubevpn/kubevpn"}
	r.must(t, append([]string{"lint", "--strict", chart}, values...)...)
	t.Run("wrong_values_install_nothing", func(t *testing.T) {
		out, err := r.helm(t, "install", "vpn", chart, "--set", "image.repository=a,replicas=2")
		if err == nil || !strings.Contains(out, "replicas") {
			t.Errorf("got %v: %s", err, out)
		}
		if out := w.installed(t); out != "" {
			t.Errorf("installed:\n%s", out)
		}
	})
	r.must(t, append([]string{"install", "vpn", chart, "--wait", "--timeout", "60s", "--set", "image.tag=helm"}, values...)...)
	ann := w.newUser(t, lab.Admin)
	token := w.kubectl(t, "-n", "e2e-helm", "create", "token", "ann")
	ann.kubeconfig = ann.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
		*u = clientcmdapi.AuthInfo{Token: token}
	})
	t.Run("user_with_only_the_user_role_connects", func(t *testing.T) { helmUser(t, w, ann) })
	t.Run("kubevpn_does_not_change_the_release", func(t *testing.T) { helmOwns(t, w, admin) })
	t.Run("session_survives_helm_upgrade", func(t *testing.T) {
		r.must(t, "upgrade", "vpn", chart, "--reset-then-reuse-values", "--wait", "--timeout", "60s", "--set", "image.tag=e2e",
			"--set", "metrics.enabled=true,metrics.dashboard.enabled=true")
		testenv.Eventually(t, soon, func() error {
			if c := ann.connection(t); c.Status != api.StatusConnected || c.ManagerVersion == previousVersion {
				return fmt.Errorf("status %s, version %s", c.Status, c.ManagerVersion)
			}
			_, err := ann.get(t, "http://web.default.svc.cluster.local/")
			return err
		})
		if c := ann.connection(t); len(c.Warnings) != 0 {
			t.Errorf("status has the warnings %q", c.Warnings)
		}
	})
	t.Run("metrics_count_what_passes", func(t *testing.T) { helmMetrics(t, w, ann) })
	t.Run("prometheus_answers_the_dashboard", func(t *testing.T) { prometheusAnswers(t, r, chart) })
	t.Run("manager_watches_one_namespace", func(t *testing.T) { helmWatchesOne(t, r, chart, ann) })
	t.Run("laptops_reach_one_namespace", func(t *testing.T) { helmAllowsOne(t, r, chart, ann) })
	t.Run("users_reach_what_they_may_forward", func(t *testing.T) { helmAuthorizes(t, r, chart, ann) })
	ann.must(t, "kubevpn", "disconnect", "--all")
	t.Run("previous_kubevpn_uses_the_new_manager", func(t *testing.T) { helmPrevious(t, w, ann, previous) })
	t.Run("uninstall_leaves_nothing", func(t *testing.T) {
		r.must(t, "uninstall", "vpn", "--wait", "--timeout", "60s")
		testenv.Eventually(t, soon, func() error {
			if out := w.installed(t) + w.kubectl(t, "-n", "e2e-helm", "get", "secrets,pods", "-o", "name"); out != "" {
				return errors.New("left: " + out)
			}
			return nil
		})
	})
}

// helmUser checks the connection of a user who has the chart's Role and no other.
func helmUser(t *testing.T, w *world, ann *laptop) {
	if out, err := w.tryKubectl(t.Context(), "auth", "can-i", "get", "services", "--as=system:serviceaccount:e2e-helm:ann"); err == nil {
		t.Fatalf("the user has more than the Role: %s", out)
	}
	// without the clean-up of (*laptop).connect: the connection outlives this test
	if r := ann.run(t, "kubevpn", "connect", "--manager-namespace", "e2e-helm"); r.code != 0 {
		t.Fatal(r)
	}
	c := ann.connection(t)
	if c.Status != api.StatusConnected || c.ManagerVersion != previousVersion || c.Services != "resolved by kubevpn" {
		t.Errorf("%+v", c)
	}
	for _, host := range []string{"web.default.svc.cluster.local", w.clusterIP(t, "default", "web")} {
		if _, err := ann.get(t, "http://"+host+"/"); err != nil {
			t.Error(err)
		}
	}
}

// helmPrevious checks that a user who has not upgraded kubevpn can use the new manager.
func helmPrevious(t *testing.T, w *world, ann *laptop, program string) {
	l := w.newUser(t, lab.Admin)
	l.program, l.kubeconfig = program, ann.kubeconfig
	if out := l.must(t, "kubevpn", "version", "-o", "json"); !strings.Contains(out, previousVersion) {
		t.Errorf("the previous kubevpn says that it is %s", out)
	}
	l.connect(t, "--manager-namespace", "e2e-helm")
	c := l.connection(t)
	if c.Status != api.StatusConnected || c.ManagerVersion == previousVersion {
		t.Errorf("%+v", c)
	}
	if _, err := l.get(t, "http://web.default.svc.cluster.local/"); err != nil {
		t.Error(err)
	}
	if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, c.ID) {
		t.Errorf("%s", out)
	}
}

// previousVersion is the version that the programs of loadPrevious report.
const previousVersion = "0.0.9"

// loadPrevious builds the previous revision of the source. It loads the image of its traffic manager into the cluster
// and returns the path of its kubevpn.
func (w *world) loadPrevious(t *testing.T, ref string) (program string) {
	t.Helper()
	dir, err := os.MkdirTemp(bin, "previous-")
	if err != nil {
		t.Fatal(err)
	}
	used, err := build.Previous(t.Context(), dir, ref, previousVersion)
	if err != nil {
		t.Fatal(err)
	}
	t.Logf("the previous version is built from %s", used)
	if err := w.Load(t.Context(), filepath.Join(dir, "image.tar")); err != nil {
		t.Fatal(err)
	}
	return filepath.Join(dir, "kubevpn")
}

// helmOwns checks that commands that would change the release name those of Helm instead.
func helmOwns(t *testing.T, w *world, admin *laptop) {
	state := func() string {
		return w.kubectl(t, "-n", "e2e-helm", "get", "deployment,serviceaccount,role,rolebinding", "-l", ours, "-o", "jsonpath={range .items[*]}{.kind} {.metadata.uid} {.metadata.generation}{end}")
	}
	before := state()
	for _, tt := range []struct {
		code    api.ExitCode
		message string
		hint    string
		args    []string
	}{
		{api.ExitManaged, "Helm release vpn", "helm upgrade vpn CHART .*image.tag=e2e.* --namespace e2e-helm", []string{"install", "--upgrade"}},
		{api.ExitManaged, "Helm release vpn", "helm upgrade vpn CHART", []string{"connect", "--upgrade"}},
		{api.ExitManaged, "Helm release vpn", "helm uninstall vpn --namespace e2e-helm", []string{"uninstall", "--force"}},
	} {
		r := admin.run(t, append(append([]string{"kubevpn"}, tt.args...), "--manager-namespace", "e2e-helm")...)
		failure{code: tt.code, message: tt.message, hint: tt.hint, within: soon}.check(t, r)
	}
	if out := admin.must(t, "kubevpn", "install", "--manager-namespace", "e2e-helm"); !strings.Contains(out, "helm upgrade") {
		t.Errorf("install does not mention Helm: %s", out)
	}
	if after := state(); after != before {
		t.Errorf("before %s\nafter  %s", before, after)
	}
}

// hiddenService is a Service in a namespace that the manager does not watch. Its EndpointSlice names no pod.
const hiddenService = `
apiVersion: v1
kind: Service
metadata: {name: hidden, namespace: e2e-helm}
spec: {ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: hidden, namespace: e2e-helm, labels: {kubernetes.io/service-name: hidden}}
addressType: IPv4
endpoints: [{addresses: [%s], conditions: {ready: true}}]
ports: [{name: http, port: 8080, protocol: TCP}]
`

// helmWatchesOne lets the manager watch only the namespace default. kube-proxy serves the Services of other namespaces.
func helmWatchesOne(t *testing.T, r chartRelease, chart string, ann *laptop) {
	w := r.world
	w.apply(t, fmt.Sprintf(hiddenService, w.pods(t, "default", "app=web")[0]))
	r.must(t, "upgrade", "vpn", chart, "--reset-then-reuse-values", "--wait", "--timeout", "60s", "--set",
		"watchNamespaces={default}")
	const account = "--as=system:serviceaccount:e2e-helm:kubevpn-traffic-manager"
	for namespace, want := range map[string]bool{"default": true, "e2e-helm": false} {
		_, err := w.tryKubectl(t.Context(), "auth", "can-i", "watch", "services", "-n", namespace, account)
		if (err == nil) != want {
			t.Errorf("whether the manager may watch Services in %s: %v, want %v", namespace, err, want)
		}
	}
	const services = "resolved by kubevpn in default; dialed as they are in other namespaces"
	hosts := []string{"web", "web.default", w.clusterIP(t, "default", "web"), "hidden.e2e-helm.svc",
		w.clusterIP(t, "e2e-helm", "hidden")}
	testenv.Eventually(t, soon, func() error {
		if c := ann.connection(t); c.Status != api.StatusConnected || c.Services != services {
			return fmt.Errorf("status %s, Services %s", c.Status, c.Services)
		}
		for _, host := range hosts {
			if _, err := ann.get(t, "http://"+host+"/"); err != nil {
				return err
			}
		}
		return nil
	})
	if c := ann.connection(t); len(c.Warnings) != 0 {
		t.Errorf("status has the warnings %q", c.Warnings)
	}
}

// helmAllowsOne lets laptops reach only the namespace default, in which a user may write EndpointSlices.
func helmAllowsOne(t *testing.T, r chartRelease, chart string, ann *laptop) {
	w := r.world
	w.apply(t, fmt.Sprintf(hiddenService, w.pods(t, "default", "app=web")[0]))
	dns := w.pods(t, "kube-system", "k8s-app=kube-dns")[0]
	w.apply(t, fmt.Sprintf(`
apiVersion: v1
kind: Service
metadata: {name: stolen, namespace: default}
spec: {ports: [{name: http, port: 80, targetPort: 8080}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: stolen, namespace: default, labels: {kubernetes.io/service-name: stolen}}
addressType: IPv4
endpoints: [{addresses: [%s], conditions: {ready: true}, targetRef: {kind: Pod, namespace: default, name: %s}}]
ports: [{name: http, port: 8080, protocol: TCP}]
`, dns, w.kubectl(t, "get", "pods", "-l", "app=web", "-o", "jsonpath={.items[0].metadata.name}")))
	upgrade := func(values string) {
		r.must(t, "upgrade", "vpn", chart, "--reset-then-reuse-values", "--wait", "--timeout", "60s", "--set-json", values)
	}
	allowed := []string{"web/", w.clusterIP(t, "default", "web") + "/", w.pods(t, "default", "app=web")[0].String() + ":8080/"}
	rejected := []string{w.clusterIP(t, "e2e-helm", "hidden") + "/", w.clusterIP(t, "default", "stolen") + "/health",
		dns.String() + ":8080/health"}
	curl := func(url string) result {
		return ann.run(t, "curl", "-sS", "-f", "-o", "/dev/null", "--max-time", "5", "http://"+url)
	}
	testenv.Eventually(t, soon, func() error {
		for _, url := range append(allowed, rejected...) {
			if r := curl(url); r.code != 0 {
				return errors.New(r.String())
			}
		}
		return nil
	})
	upgrade(`watchNamespaces=[],allowNamespaces=["default"]`)
	check := func() error {
		if c := ann.connection(t); c.Status != api.StatusConnected || c.Netstack != api.NetstackGVisor ||
			c.Services != "resolved by kubevpn in default; rejected in other namespaces" {
			return fmt.Errorf("status %s, netstack %s, Services %s", c.Status, c.Netstack, c.Services)
		}
		for _, url := range allowed {
			if r := curl(url); r.code != 0 {
				return errors.New(r.String())
			}
		}
		for _, url := range rejected {
			if curl(url).code == 0 {
				return fmt.Errorf("%s answers", url)
			}
		}
		return nil
	}
	testenv.Eventually(t, soon, check)
	ann.must(t, "kubevpn", "disconnect", "--all")
	failure{code: api.ExitNetstack, message: "this traffic manager limits what laptops reach, which needs `--netstack gvisor`",
		hint: "--netstack gvisor", within: soon}.check(t, ann.run(t, "kubevpn", "connect", "--manager-namespace", "e2e-helm",
		"--netstack", "system"))
	ann.must(t, "kubevpn", "connect", "--manager-namespace", "e2e-helm")
	testenv.Eventually(t, soon, check)
	upgrade("allowNamespaces=[]")
	testenv.Eventually(t, soon, func() error {
		_, err := ann.get(t, "http://"+w.clusterIP(t, "e2e-helm", "hidden")+"/")
		return err
	})
}

// forwardRight lets ann forward ports of pods in the namespace default. bob may use the manager, but not tell it who he
// is.
const forwardRight = `
apiVersion: rbac.authorization.k8s.io/v1
kind: Role
metadata: {name: forward, namespace: default}
rules: [{apiGroups: [""], resources: [pods/portforward], verbs: [create]}]
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: forward, namespace: default}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: forward}
subjects: [{kind: ServiceAccount, name: ann, namespace: e2e-helm}]
---
apiVersion: v1
kind: ServiceAccount
metadata: {name: bob, namespace: e2e-helm}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: RoleBinding
metadata: {name: bob, namespace: e2e-helm}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: Role, name: kubevpn-traffic-manager-user}
subjects: [{kind: ServiceAccount, name: bob, namespace: e2e-helm}]
`

// helmAuthorizes lets each user reach the pods of which they may forward ports.
func helmAuthorizes(t *testing.T, r chartRelease, chart string, ann *laptop) {
	w := r.world
	upgrade := func(values string) {
		r.must(t, "upgrade", "vpn", chart, "--reset-then-reuse-values", "--wait", "--timeout", "60s", "--set", values)
	}
	web := []string{w.clusterIP(t, "default", "web") + "/", w.pods(t, "default", "app=web")[0].String() + ":8080/"}
	dns := w.pods(t, "kube-system", "k8s-app=kube-dns")[0].String() + ":8080/health"
	reaches := func(want map[string]bool) error {
		const services = "resolved by kubevpn for pods of which you may forward ports; the others are rejected"
		if c := ann.connection(t); c.Status != api.StatusConnected || c.Netstack != api.NetstackGVisor || c.Services != services {
			return fmt.Errorf("status %s, netstack %s, Services %s", c.Status, c.Netstack, c.Services)
		}
		for host, want := range want {
			if r := ann.run(t, "curl", "-sS", "-f", "-o", "/dev/null", "--max-time", "5", "http://"+host); want != (r.code == 0) {
				return errors.New(r.String())
			}
		}
		return nil
	}
	upgrade("authorize=true")
	testenv.Eventually(t, soon, func() error { return reaches(map[string]bool{web[0]: false, web[1]: false, dns: false}) })
	if r := ann.run(t, "kubevpn", "why", "http://"+web[0]); r.code != int(api.ExitPermission) || !strings.Contains(r.String(), "its admin limits what laptops reach") {
		t.Error(r)
	}
	w.apply(t, forwardRight)
	testenv.Eventually(t, soon, func() error { return reaches(map[string]bool{web[0]: true, web[1]: true, dns: false}) })
	bob := w.newUser(t, lab.Admin)
	token := w.kubectl(t, "-n", "e2e-helm", "create", "token", "bob")
	bob.kubeconfig = bob.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
		*u = clientcmdapi.AuthInfo{Token: token}
	})
	failure{code: api.ExitPermission, message: "the traffic manager asks who you are", hint: "access.users", within: soon}.check(t,
		bob.run(t, "kubevpn", "connect", "--manager-namespace", "e2e-helm"))
	w.kubectl(t, "-n", "default", "delete", "role,rolebinding", "forward")
	upgrade("authorize=false")
	testenv.Eventually(t, soon, func() error {
		_, err := ann.get(t, "http://"+web[0])
		return err
	})
}
