//go:build e2e && linux

package e2e

import (
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"kubevpn/internal/testenv"
)

// worldNamesManifest has two namespaces with a Service of the same name, and Services that lead out of the cluster.
const worldNamesManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: names-a}
---
apiVersion: v1
kind: Namespace
metadata: {name: names-b}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: names-a}
spec: {ports: [{port: 80}]}
---
apiVersion: v1
kind: Service
metadata: {name: db, namespace: names-b}
spec: {ports: [{port: 80}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: idle, namespace: names-a}
spec:
  replicas: 0
  selector: {matchLabels: {app: idle}}
  template:
    metadata: {labels: {app: idle}}
    spec:
      dnsConfig: {searches: [default.svc.cluster.local], options: [{name: ndots, value: "4"}]}
      containers: [{name: app, image: APP_IMAGE, imagePullPolicy: Never}]
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: idle, namespace: names-b}
spec:
  replicas: 0
  selector: {matchLabels: {app: idle}}
  template:
    metadata: {labels: {app: idle}}
    spec:
      containers: [{name: app, image: APP_IMAGE, imagePullPolicy: Never}]
---
apiVersion: v1
kind: Service
metadata: {name: alias, namespace: names-a}
spec: {type: ExternalName, externalName: db.corp.test}
---
apiVersion: v1
kind: Service
metadata: {name: chain, namespace: names-a}
spec: {type: ExternalName, externalName: alias.names-a.svc.cluster.local.}
---
apiVersion: v1
kind: Service
metadata: {name: by-hand, namespace: names-a}
spec: {clusterIP: None, ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: by-hand-1, namespace: names-a, labels: {kubernetes.io/service-name: by-hand}}
addressType: IPv4
ports: [{name: http, port: 80}]
endpoints: [{addresses: [10.95.0.7], hostname: first}]
---
apiVersion: v1
kind: Service
metadata: {name: virtual, namespace: names-a}
spec: {ports: [{name: http, port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: virtual-1, namespace: names-a, labels: {kubernetes.io/service-name: virtual}}
addressType: IPv4
ports: [{name: http, port: 80}]
endpoints: [{addresses: [10.95.0.7]}]
---
apiVersion: v1
kind: Service
metadata: {name: here, namespace: names-a}
spec: {clusterIP: None, ports: [{port: 80}]}
---
apiVersion: discovery.k8s.io/v1
kind: EndpointSlice
metadata: {name: here-1, namespace: names-a, labels: {kubernetes.io/service-name: here}}
addressType: IPv4
ports: [{port: 80}]
endpoints: [{addresses: [GATEWAY]}]
`

// worldNames checks that names and addresses mean what they mean in the pod.
func worldNames(t *testing.T, w *world, l *laptop) {
	gateway := strings.Fields(l.must(t, "ip", "-4", "route", "show", "default"))[2]
	w.serveBehind(t)
	w.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "GATEWAY", gateway).Replace(worldNamesManifest))
	t.Run("services_that_lead_out_of_the_cluster", func(t *testing.T) { worldBehind(t, l, gateway) })
	programs := resolvers(t)
	t.Run("short_names_belong_to_the_workload", func(t *testing.T) { worldShortNames(t, l, programs) })
	t.Run("each_row_of_the_table", func(t *testing.T) { worldNameTable(t, w, l, programs) })
}

// resolvers are commands that print the address of a name, each by the resolver of another library.
func resolvers(t *testing.T) map[string][]string {
	t.Helper()
	testenv.NeedPrograms(t, "musl-gcc", "getent")
	dir := t.TempDir()
	byGo, byMusl := filepath.Join(dir, "go"), filepath.Join(dir, "musl")
	for _, argv := range [][]string{
		{"go", "build", "-o", byGo, "./lookup"}, {"musl-gcc", "-static", "-o", byMusl, "lookup/lookup.c"}, {"chmod", "755", dir, filepath.Dir(dir)},
	} {
		cmd := exec.CommandContext(t.Context(), argv[0], argv[1:]...)
		cmd.Env = append(os.Environ(), "CGO_ENABLED=0")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("%q: %v\n%s", argv, err, out)
		}
	}
	return map[string][]string{"glibc": {"getent", "ahostsv4"}, "Go": {byGo}, "musl": {byMusl}}
}

// checkNames resolves names with each of the programs, which within starts, and compares the addresses. An empty
// address means that the program fails.
func (l *laptop) checkNames(t *testing.T, within []string, programs map[string][]string, want map[string]string) {
	t.Helper()
	var runs sync.WaitGroup
	for library, argv := range programs {
		for name, address := range want {
			runs.Go(func() {
				r := l.run(t, slices.Concat(within, argv, []string{name})...)
				if got, _, _ := strings.Cut(strings.TrimSpace(r.stdout), " "); got != address {
					t.Errorf("by %s, %s is %q, want %q: %v", library, name, got, address, r)
				}
			})
		}
	}
	runs.Wait()
}

// worldShortNames runs programs in two namespaces at once, beside a connection whose namespace is default.
func worldShortNames(t *testing.T, l *laptop, programs map[string][]string) {
	a, b, web := l.clusterIP(t, "names-a", "db"), l.clusterIP(t, "names-b", "db"), l.clusterIP(t, "default", "web")
	outside := l.must(t, "dig", "+short", "www.outside.test")
	var runs sync.WaitGroup
	for namespace, want := range map[string]map[string]string{
		"names-a": {"db": a, "db.names-b": b, "web": web}, // the last by the pod's dnsConfig
		// as in a pod, although the connection's namespace has web
		"names-b": {"db": b, "db.names-a.svc": a, "db.names-a.svc.cluster.local": a, "web": "", "www.outside.test": outside},
	} {
		within := []string{"kubevpn", "dev", "deployment/idle", "-n", namespace, "--"}
		runs.Go(func() { l.checkNames(t, within, map[string][]string{"glibc": programs["glibc"]}, want) })
		runs.Go(func() { l.checkNames(t, within, programs, map[string]string{"db": want["db"]}) })
	}
	runs.Wait()
	if out := l.must(t, "getent", "ahostsv4", "web"); !strings.HasPrefix(out, web+" ") {
		t.Errorf("beside the programs, web is %s", out)
	}
}

// worldNameTable checks the rows of the table of names in docs/connect.md, on this machine and in a container behind
// it.
func worldNameTable(t *testing.T, w *world, l *laptop, programs map[string][]string) {
	a, web := l.clusterIP(t, "names-a", "db"), l.clusterIP(t, "default", "web")
	outside := l.must(t, "dig", "+short", "www.outside.test")
	l.checkNames(t, nil, programs, map[string]string{
		"web": web, "web.default": web, "web.default.svc": web, "WEB.default.svc.cluster.local": web, "db.names-a": a, "db": "",
		"nosuch.default.svc.cluster.local": "", "www.outside.test": outside,
	})
	root := &laptop{world: w, home: t.TempDir(), program: l.program} // root on the same machine, without a daemon
	root.must(t, "sysctl", "-qw", "net.ipv4.ip_forward=1")
	root.finally(t, "sysctl", "-qw", "net.ipv4.ip_forward=0")
	root.must(t, "nft", "add table ip world; add chain ip world post { type nat hook postrouting priority srcnat; }; "+
		"add rule ip world post ip saddr 172.30.9.0/24 masquerade")
	root.finally(t, "nft", "delete table ip world")
	container := root.container(t, netip.MustParsePrefix("172.30.9.0/24"))
	gateway := strings.Fields(l.must(t, "ip", "-4", "route", "show", "default"))[2]
	for conf, want := range map[string]map[string]string{
		"nameserver " + gateway: {"web.default.svc.cluster.local": "", "www.outside.test": outside},
		"nameserver " + l.connection(t).DNS.Programs.String() + "\nsearch names-a.svc.cluster.local svc.cluster.local cluster.local\noptions ndots:5": {
			"db": a, "web.default": web, "web": "", "www.outside.test": outside},
	} {
		file := filepath.Join(root.home, "resolv.conf")
		if err := os.WriteFile(file, []byte(conf+"\n"), 0o644); err != nil {
			t.Fatal(err)
		}
		within := slices.Concat(container, []string{"unshare", "--mount", "sh", "-c", `mount --bind "$0" /etc/resolv.conf && exec "$@"`, file})
		root.checkNames(t, within, programs, want)
	}
}

// worldBehind checks that names of Services lead to a host that only nodes and pods reach, but not to a host of the
// laptop's own network.
func worldBehind(t *testing.T, l *laptop, gateway string) {
	for _, name := range []string{"alias", "chain", "by-hand", "first.by-hand", "virtual"} {
		url := "http://" + name + ".names-a.svc/"
		testenv.Eventually(t, soon, func() error {
			if r := l.run(t, "curl", "-sS", "--max-time", "5", url); r.stdout != "behind" {
				return fmt.Errorf("%s: %v", url, r)
			}
			return nil
		})
	}
	if r := l.run(t, "kubevpn", "why", "http://by-hand.names-a/"); r.code != 0 {
		t.Errorf("%v", r)
	}
	if r := l.run(t, "kubevpn", "run", "--socks", "127.0.0.1:0", "--", "curl", "-sS", "--max-time", "20",
		"http://alias.names-a.svc/"); r.stdout != "behind" {
		t.Errorf("by the proxy: %v", r)
	}
	if r := l.run(t, "getent", "ahostsv4", "here.names-a.svc"); r.code == 0 {
		t.Errorf("a Service has the address of the laptop's gateway: %v", r)
	}
	says := "here.names-a.svc.cluster.local leads to " + gateway
	if out := l.must(t, "kubevpn", "status"); !strings.Contains(out, says) || !strings.Contains(out, "--exclude-cidr "+gateway) {
		t.Errorf("the status does not say that %s:\n%s", says, out)
	}
	if r := l.run(t, "kubevpn", "why", "http://here.names-a.svc/"); !strings.Contains(r.stdout+r.stderr, gateway) {
		t.Errorf("%v", r)
	}
}
