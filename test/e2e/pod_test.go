//go:build e2e && linux

package e2e

import (
	"encoding/base64"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"
	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/test/lab"
)

const (
	podNamespace           = "podded"
	podRestrictedNamespace = "podded-restricted" // with the Pod Security level restricted
)

// podObjects are the workloads of the suite. The pods of web may use ping sockets, and are the only ones that the
// NetworkPolicy of store admits to PostgreSQL. The pods of meshed have the proxy of a mesh, whose certificate the port
// 8443 of store requires.
const podObjects = `
apiVersion: v1
kind: Namespace
metadata: {name: podded}
---
apiVersion: v1
kind: Namespace
metadata: {name: podded-restricted, labels: {pod-security.kubernetes.io/enforce: restricted}}
---
apiVersion: v1
kind: Secret
metadata: {name: pair, namespace: podded}
type: kubernetes.io/tls
data: {tls.crt: PAIR_CERT, tls.key: PAIR_KEY}
---
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata: {name: store, namespace: podded}
spec:
  podSelector: {matchLabels: {app: store}}
  policyTypes: [Ingress]
  ingress:
  - from: [{podSelector: {matchLabels: {app: shop}}}]
    ports: [{port: 5432, protocol: TCP}]
---
apiVersion: v1
kind: Service
metadata: {name: store, namespace: podded}
spec:
  selector: {app: store}
  ports: [{name: https, port: 8443}, {name: first, port: 9004}, {name: postgres, port: 5432}]
---
` + podStore + podMeshed + podPair

const podStore = `
apiVersion: v1
kind: Pod
metadata: {name: store, namespace: podded, labels: {app: store}}
spec:
  terminationGracePeriodSeconds: 1
  volumes: [{name: pair, secret: {secretName: pair}}]
  containers:
  - name: app
    image: APP_IMAGE
    imagePullPolicy: Never
    env:
    - {name: TLS_CERT, value: /pair/tls.crt}
    - {name: TLS_KEY, value: /pair/tls.key}
    - {name: TLS_CLIENTS, value: /pair/tls.crt}
    volumeMounts: [{name: pair, mountPath: /pair}]
    readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1, timeoutSeconds: 10}
---
`

const podMeshed = `
apiVersion: apps/v1
kind: Deployment
metadata: {name: meshed, namespace: podded}
spec:
  selector: {matchLabels: {app: meshed}}
  template:
    metadata: {labels: {app: meshed}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes: [{name: pair, secret: {secretName: pair}}]
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1, timeoutSeconds: 10}
      - name: istio-proxy
        image: APP_IMAGE
        imagePullPolicy: Never
        args: [-mesh]
        env: [{name: TLS_CERT, value: /pair/tls.crt}, {name: TLS_KEY, value: /pair/tls.key}]
        volumeMounts: [{name: pair, mountPath: /pair}]
        securityContext: {runAsUser: 1337, runAsGroup: 1337}
`

// podPair is a workload with another container beside that of the program.
const podPair = `
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: pair, namespace: podded}
spec:
  selector: {matchLabels: {app: pair}}
  template:
    metadata: {labels: {app: pair}}
    spec:
      terminationGracePeriodSeconds: 1
      hostAliases: [{ip: 10.1.2.3, hostnames: [alias.test, other.test]}]
      dnsConfig: {searches: [default.svc.cluster.local], options: [{name: ndots, value: "3"}]}
      volumes:
      - {name: pair, secret: {secretName: pair, defaultMode: 0440}}
      - {name: down, downwardAPI: {items: [{path: name, fieldRef: {fieldPath: metadata.name}}]}}
      - {name: held, emptyDir: {}}
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        workingDir: /srv
        env:
        - {name: GREETING, value: "hello from $(NODE) \\"}
        - {name: NODE, valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
        - {name: ADDRESS, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
        - {name: CPUS, valueFrom: {resourceFieldRef: {resource: limits.cpu}}}
        - {name: CERT, valueFrom: {secretKeyRef: {name: pair, key: tls.crt}}}
        resources: {limits: {cpu: "1", memory: 128Mi}}
        volumeMounts:
        - {name: pair, mountPath: /pair}
        - {name: down, mountPath: /down}
        - {name: held, mountPath: /held}
        readinessProbe: {httpGet: {path: /, port: 8080}, periodSeconds: 1, timeoutSeconds: 10}
      - {name: side, image: "docker.io/kubevpn-lab/pause:1", imagePullPolicy: Never}
`

// podWeb is a workload that complies with the Pod Security level restricted.
const podWeb = `---
apiVersion: apps/v1
kind: Deployment
metadata: {name: web, namespace: NAMESPACE}
spec:
  replicas: REPLICAS
  selector: {matchLabels: {app: shop}}
  template:
    metadata: {labels: {app: shop}}
    spec:
      terminationGracePeriodSeconds: 1
      securityContext:
        runAsNonRoot: true
        seccompProfile: {type: RuntimeDefault}
        sysctls: [{name: net.ipv4.ping_group_range, value: 0 2147483647}]
      hostAliases: [{ip: 10.1.2.3, hostnames: [alias.test]}]
      dnsConfig: {searches: [default.svc.cluster.local], options: [{name: ndots, value: "3"}, {name: edns0}]}
      volumes: [{name: data, emptyDir: {}}]
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          runAsUser: 65532
          capabilities: {drop: [ALL]}
        ports: [{containerPort: 8080, name: http}]
        volumeMounts: [{name: data, mountPath: /data}]
        readinessProbe: {httpGet: {path: /, port: http}, periodSeconds: 1, timeoutSeconds: 10}
`

// podded is the namespace of the suite, with the workload through whose pods connections leave.
type podded struct {
	*shop
	root  *laptop    // connected through a pod of the workload
	eve   *laptop    // without sudo: each program has its own network
	store netip.Addr // the address of the pod store
	echo  string     // the address of an echo server of the lab
	disk  string     // what the claim kept holds, on the nodes
}

// podSuite checks that connections through a pod have what the pod has: its address, its permissions, its mesh, and
// its failures.
func podSuite(t *testing.T, w *world) {
	p := newPodded(t, w)
	before, started := p.root.snapshot(t), p.restarts(t)
	p.root.connect(t, "-n", podNamespace, "--via", p.workload)
	t.Run("while_the_pod_lives", func(t *testing.T) {
		for name, check := range map[string]func(*testing.T, *podded){
			"network_policy_admits_the_pod": podPolicy,
			"peers_see_the_pod":             podSeen,
			"failures_are_those_of_the_pod": podFailures,
			"ping_needs_the_pod_s_sysctl":   podPing,
			"restricted_pods_serve":         podRestricted,
			"mesh_of_the_pod_is_used":       podMesh,
			"metadata_needs_pods_exec":      podRights,
			"names_are_those_of_the_pod":    podNames,
			"all_leaves_from_the_pod":       podEgress,
			"localhost_is_that_of_the_pod":  podLocalhost,
			"volumes_are_those_of_the_pod":  podVolumes,
		} {
			t.Run(name, func(t *testing.T) {
				t.Parallel()
				check(t, p)
			})
		}
	})
	t.Run("kill_9_leaves_nothing", func(t *testing.T) { podKilled(t, p) })
	if now := p.restarts(t); now != started {
		t.Errorf("the pods were\n%s\nand are\n%s", started, now)
	}
	t.Run("another_pod_takes_over", func(t *testing.T) {
		t.Run("volume", func(t *testing.T) {
			t.Parallel()
			podVolumeMoves(t, p)
		})
		podDeleted(t, p)
	})
	p.root.must(t, "kubevpn", "disconnect", "--all")
	p.root.must(t, "kubevpn", "quit")
	p.root.sameAs(t, before)
}

// newPodded creates the workloads.
func newPodded(t *testing.T, w *world) *podded {
	t.Helper()
	w.loadApp(t)
	cert, key := certificate(t, "mesh.test")
	encode := base64.StdEncoding.EncodeToString
	manifest := podObjects + strings.NewReplacer("NAMESPACE", podNamespace, "REPLICAS", "2").Replace(podWeb) +
		strings.NewReplacer("NAMESPACE", podRestrictedNamespace, "REPLICAS", "1").Replace(podWeb)
	w.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "PAIR_CERT", encode(cert), "PAIR_KEY", encode(key)).
		Replace(manifest))
	p := &podded{shop: &shop{w, podNamespace, "deployment/web"}, root: w.newUser(t, lab.Admin),
		eve: w.laptopOf(t, eve), echo: w.pods(t, "default", "app=web")[0].String()}
	p.eve.within = withDevice(0o666)
	p.keep(t)
	for _, s := range []*shop{p.shop, {w, podNamespace, "deployment/meshed"},
		{w, podNamespace, "deployment/pair"}, p.restricted(), p.kept(), p.shell()} {
		s.rolledOut(t)
	}
	w.kubectl(t, "-n", podNamespace, "wait", "--for=condition=Ready", "--timeout=60s", "pod/store")
	p.store = w.pods(t, podNamespace, "app=store")[0]
	p.within(t, podNamespace, "app=store").startPostgres(t, "0.0.0.0")
	p.enforce(t, "store")
	meshed := p.placeOf(t, p.pods(t, podNamespace, "app=meshed")[0])
	meshed.must(t, "sh", "-c", `printf '%s' "$1" | iptables-restore --noflush`, "sh", istioRules)
	return p
}

// restricted is the workload in the namespace with the Pod Security level restricted.
func (p *podded) restricted() *shop { return &shop{p.world, podRestrictedNamespace, "deployment/web"} }

// within returns a laptop whose commands run in the network namespace of a pod.
func (w *world) within(t *testing.T, namespace, selector string) *laptop {
	t.Helper()
	network := fmt.Sprintf("--net=/proc/%d/ns/net", w.podProcess(t, namespace, selector))
	return &laptop{world: w, home: t.TempDir(), within: []string{"nsenter", network, "--"}}
}

// enforce makes the nodes drop what a NetworkPolicy with one rule does not admit to the ports that the rule names. The
// lab has no network plugin that does. It applies to the pods that exist now.
func (p *podded) enforce(t *testing.T, name string) {
	t.Helper()
	var policy networkingv1.NetworkPolicy
	text := p.kubectl(t, "-n", p.namespace, "get", "networkpolicy", name, "-o", "json")
	if err := json.Unmarshal([]byte(text), &policy); err != nil {
		t.Fatal(err)
	}
	chosen := func(selector *metav1.LabelSelector) string {
		addrs := fmt.Sprint(p.pods(t, p.namespace, metav1.FormatLabelSelector(selector)))
		return strings.ReplaceAll(strings.Trim(addrs, "[]"), " ", ", ")
	}
	rule := policy.Spec.Ingress[0]
	var rules []string
	for _, port := range rule.Ports {
		rules = append(rules, fmt.Sprintf("ip daddr { %s } ip saddr != { %s } tcp dport %s drop",
			chosen(&policy.Spec.PodSelector), chosen(rule.From[0].PodSelector), port.Port))
	}
	for n := range p.Config().Nodes {
		p.nft(t, fmt.Sprintf("node%d", n+1), "forward", rules...)
	}
}

// restarts describes each pod of the suite: it changes when a pod is replaced or its container restarts.
func (p *podded) restarts(t *testing.T) string {
	t.Helper()
	var all []string
	for _, namespace := range []string{podNamespace, podRestrictedNamespace} {
		var pods corev1.PodList
		text := p.kubectl(t, "-n", namespace, "get", "pods", "-o", "json")
		if err := json.Unmarshal([]byte(text), &pods); err != nil {
			t.Fatal(err)
		}
		for _, pod := range pods.Items {
			for _, c := range pod.Status.ContainerStatuses {
				all = append(all, fmt.Sprintf("%s %s %s %d", namespace, pod.UID, c.Name, c.RestartCount))
			}
		}
	}
	slices.Sort(all)
	return strings.Join(all, "\n")
}

// via runs a command through a pod of a workload of the namespace.
func (p *podded) via(t *testing.T, workload string, command ...string) result {
	t.Helper()
	return p.eve.run(t, append([]string{"kubevpn", "run", "-n", p.namespace, "--via", workload, "--"}, command...)...)
}

// plainly runs a command in the cluster's network, as `kubevpn run` does without --via.
func (p *podded) plainly(t *testing.T, command ...string) result {
	t.Helper()
	return p.eve.run(t, append([]string{"kubevpn", "run", "-n", p.namespace, "--"}, command...)...)
}

// podPolicy checks that PostgreSQL sees the pod, and that its NetworkPolicy blocks what does not leave through the pod.
func podPolicy(t *testing.T, p *podded) {
	query := []string{"psql", "-At", "-d", "host=store user=postgres connect_timeout=2",
		"-c", "select host(inet_client_addr())"}
	admitted := func(t *testing.T, r result) {
		t.Helper()
		if from := strings.TrimSpace(r.stdout); r.code != 0 || p.podAt(t, from) == "" {
			t.Errorf("%v\nwant the address of a pod of %s", r, p.workload)
		}
	}
	blocked := func(t *testing.T, r result) {
		t.Helper()
		if r.code != 2 || !strings.Contains(r.stderr, "timeout expired") {
			t.Errorf("%v\nwant a timeout", r)
		}
	}
	through := append([]string{"--via-pod", "--"}, query...)
	for _, tt := range []struct {
		name string
		run  func(*testing.T) result
		want func(*testing.T, result)
	}{
		{"dev_via_pod", func(t *testing.T) result { return p.eve.dev(t, p.shop, through...) }, admitted},
		{"dev_isolate", func(t *testing.T) result { return p.eve.isolate(t, p.shop, through[1:]...) }, blocked},
		{"run_via", func(t *testing.T) result { return p.via(t, p.workload, query...) }, admitted},
		{"run", func(t *testing.T) result { return p.plainly(t, query...) }, blocked},
		{"connect_via", func(t *testing.T) result { return p.root.run(t, query...) }, admitted},
	} {
		t.Run(tt.name, func(t *testing.T) {
			t.Parallel()
			tt.want(t, tt.run(t))
		})
	}
}

// podAt returns the name of the workload's ready pod with an address, or nothing.
func (p *podded) podAt(t *testing.T, address string) string {
	t.Helper()
	for name, ip := range p.ready(t) {
		if ip == address {
			return name
		}
	}
	return ""
}

// seen returns the client's address in the answer of the lab's echo server, or nothing.
func (r result) seen() string {
	var e echoed
	if err := json.Unmarshal([]byte(r.stdout), &e); err != nil {
		return ""
	}
	from, _, _ := net.SplitHostPort(e.Remote)
	return from
}

// podSeen checks that the server of a connection sees the pod that status names.
func podSeen(t *testing.T, p *podded) {
	urls := []string{"http://" + p.echo + ":8080/", "http://" + p.clusterIP(t, "default", "web") + "/",
		"http://web.default/"}
	manager := p.pods(t, "kubevpn", managerLabels)[0].String()
	connected := func(t *testing.T, url string) {
		r := p.root.run(t, "curl", "-sS", "--max-time", "20", url)
		if pod := p.leaving(t); p.podAt(t, r.seen()) != pod {
			t.Errorf("the server does not see the pod %s: %v", pod, r)
		}
	}
	proxied := func(t *testing.T, url string) {
		r := p.eve.run(t, "kubevpn", "run", "-n", p.namespace, "--via", p.workload, "--socks", "127.0.0.1:0", "--",
			"curl", "-sS", "--max-time", "20", url)
		if p.podAt(t, r.seen()) == "" {
			t.Errorf("the server does not see a pod: %v", r)
		}
	}
	plain := func(t *testing.T, url string) {
		if r := p.plainly(t, "curl", "-sS", "--max-time", "20", url); r.seen() != manager {
			t.Errorf("the server does not see the traffic manager %s: %v", manager, r)
		}
	}
	for name, check := range map[string]func(*testing.T, string){
		"connect_via": connected, "run_via_with_a_proxy": proxied, "run": plain,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			for _, url := range urls {
				check(t, url)
			}
		})
	}
}

// leaving returns the pod from which the connections of root leave, as each form of status names it.
func (p *podded) leaving(t *testing.T) string {
	t.Helper()
	via := p.root.connection(t).Via
	if via == nil || via.Pod == "" || via.Error != "" || via.Namespace != p.namespace || via.Workload != p.workload {
		t.Fatalf("status names %+v, want a pod of %s", via, p.workload)
	}
	want := fmt.Sprintf("connections leave through pod %s of %s", via.Pod, p.workload)
	if text := p.root.must(t, "kubevpn", "status"); !strings.Contains(text, want) {
		t.Errorf("status does not say %q:\n%s", want, text)
	}
	return via.Pod
}

// podFailures checks that a connection fails as one of the pod does, and that rules of the pod apply to it.
func podFailures(t *testing.T, p *podded) {
	p.root.isFaithful(t, true)
	store := p.store.String()
	for _, ip := range p.ready(t) {
		pod := p.placeOf(t, netip.MustParseAddr(ip))
		pod.must(t, "nft", "table inet closed { chain c { type filter hook output priority 0; "+
			"ip daddr "+store+" tcp dport 9004 reject with icmp host-unreachable; }; }")
		t.Cleanup(func() { pod.must(t, "nft", "delete table inet closed") })
	}
	greet := []string{"nc", "-v", "-w", "2", "-d", store, "9004"}
	t.Run("unreachable_host_is_reported", func(t *testing.T) {
		t.Parallel()
		if r := p.root.run(t, greet...); r.code == 0 || !strings.Contains(r.stderr, "No route to host") {
			t.Errorf("the pod cannot reach the host: %v", r)
		}
		if r := p.plainly(t, greet...); !strings.Contains(r.stdout, "220 store") {
			t.Errorf("the traffic manager can reach the host: %v", r)
		}
	})
	t.Run("answer_arrives_after_a_half_close", func(t *testing.T) {
		t.Parallel()
		r := p.root.sh(t, `printf 'delay 1s\nx' | nc -N -w 20 %s 9005`, p.echo)
		if strings.TrimSpace(r.stdout) != "10" {
			t.Error(r)
		}
	})
	t.Run("datagrams_are_answered", func(t *testing.T) {
		t.Parallel()
		if r := p.root.sh(t, "printf hello | nc -u -w 2 %s 9001", p.echo); r.stdout != "hello" {
			t.Error(r)
		}
	})
}

// podPing checks that a ping needs the sysctl with which the pod's processes may ping.
func podPing(t *testing.T, p *podded) {
	ping := []string{"ping", "-n", "-c", "1", "-W", "5", p.echo}
	if r := p.root.run(t, ping...); r.code != 0 {
		t.Error(r)
	}
	if r := p.via(t, "deployment/meshed", ping...); r.code == 0 || !strings.Contains(r.stdout, "Packet filtered") {
		t.Errorf("%v\nwant %q", r, "Packet filtered")
	}
}

// podRestricted checks that a namespace with the Pod Security level restricted admits an agent that only dials.
func podRestricted(t *testing.T, p *podded) {
	s := p.restricted()
	pod, ip := first(s.ready(t))
	r := p.eve.dev(t, s, "--via-pod", "--", "curl", "-sS", "--max-time", "20", "http://"+p.echo+":8080/")
	if r.seen() != ip {
		t.Errorf("%v\nwant a connection from %s", r, ip)
	}
	added := p.kubectl(t, "-n", s.namespace, "get", "pod", pod, "-o",
		"jsonpath={.spec.ephemeralContainers[*].securityContext.capabilities}")
	if slices.ContainsFunc(strings.Fields(added), func(c string) bool { return c != `{"drop":["ALL"]}` }) || added == "" {
		t.Errorf("the agent, or what serves a volume, has the capabilities %s", added)
	}
	failure{code: api.ExitInject, message: "restricted", hint: "--mode sidecar", within: 20 * time.Second}.
		check(t, p.root.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "--mode", "ephemeral",
			"--headers", mine+"="+me))
}

// podMesh checks that the mesh of the pod encrypts connections, with its own certificate.
func podMesh(t *testing.T, p *podded) {
	if r := p.via(t, "deployment/meshed", "curl", "-sS", "--max-time", "20", "http://store:8443/"); r.code != 0 ||
		!strings.Contains(r.stdout, `"name":"store"`) {
		t.Error(r)
	}
	for url, said := range map[string]string{"http://store:8443/": "HTTP request to an HTTPS server",
		"https://store:8443/": "handshake failure"} {
		// In TLS 1.3, the server's refusal may come after the request, which then fails in other ways.
		r := p.plainly(t, "curl", "-sSk", "--tls-max", "1.2", "--max-time", "20", url)
		if !strings.Contains(r.stdout+r.stderr, said) {
			t.Errorf("%v\nwant %q, because the connection does not have the certificate of the mesh", r, said)
		}
	}
}
