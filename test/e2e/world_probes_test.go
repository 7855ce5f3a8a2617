//go:build e2e && linux

package e2e

import (
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// probesManifest has pods that the kubelet probes in every way, and pods with a proxy in front of the application.
const probesManifest = `
apiVersion: v1
kind: Namespace
metadata: {name: probed}
---
apiVersion: v1
kind: Secret
metadata: {name: tls, namespace: probed}
type: kubernetes.io/tls
data: {tls.crt: PAIR_CERT, tls.key: PAIR_KEY}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: probed, namespace: probed}
spec:
  selector: {matchLabels: {app: probed}}
  template:
    metadata: {labels: {app: probed}}
    spec:
      terminationGracePeriodSeconds: 1
      volumes: [{name: tls, secret: {secretName: tls}}]
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        env: [{name: TLS_CERT, value: /tls/tls.crt}, {name: TLS_KEY, value: /tls/tls.key}]
        volumeMounts: [{name: tls, mountPath: /tls}]
        ports: [{containerPort: 8080, name: http}, {containerPort: 8443, name: https}, {containerPort: 9001, name: raw}]
        startupProbe: {tcpSocket: {port: raw}, periodSeconds: 1}
        livenessProbe: {httpGet: {path: /live, port: https, scheme: HTTPS}, periodSeconds: 1, failureThreshold: 3}
        readinessProbe:
          httpGet: {path: "/moved?a=b", port: http, httpHeaders: [{name: User-Agent, value: hc}, {name: x-check, value: "1"}, {name: Accept, value: ""}]}
          periodSeconds: 1
          failureThreshold: 1
        lifecycle: {preStop: {httpGet: {path: /, port: http}}} # a postStart hook would race the application's start
---
apiVersion: v1
kind: Service
metadata: {name: probed, namespace: probed}
spec: {type: NodePort, selector: {app: probed}, ports: [{name: http, port: 80, targetPort: http}, {name: https, port: 443, targetPort: https}]}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: calls, namespace: probed}
spec:
  selector: {matchLabels: {app: calls}}
  template:
    metadata: {labels: {app: calls}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        ports: [{containerPort: 9090, name: grpc}, {containerPort: 9001, name: raw}]
        startupProbe: {exec: {command: [/app, -get, "http://127.0.0.1:8080/live"]}, timeoutSeconds: 10}
        livenessProbe: {grpc: {port: 9090}, periodSeconds: 1, failureThreshold: 3}
        readinessProbe: {tcpSocket: {port: raw}, periodSeconds: 1, failureThreshold: 1}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: front, namespace: probed}
spec: &front
  selector: {matchLabels: {app: front}}
  template:
    metadata: {labels: {app: front}}
    spec: &pod
      terminationGracePeriodSeconds: 1
      containers:
      - name: front
        image: APP_IMAGE
        imagePullPolicy: Never
        args: [-http, "8000"]
        securityContext: {runAsUser: 1001}
        ports: [{containerPort: 8000, name: web}]
        readinessProbe: {httpGet: {path: "/via?to=http://127.0.0.1:8080/", port: web}, periodSeconds: 1, failureThreshold: 1}
      - name: app
        image: APP_IMAGE
        imagePullPolicy: Never
        securityContext: {runAsUser: 1000}
        ports: [{containerPort: 8080, name: http}]
        livenessProbe: {exec: {command: [/app, -get, "http://127.0.0.1:8080/live"]}, timeoutSeconds: 10, periodSeconds: 1, failureThreshold: 1}
---
apiVersion: apps/v1
kind: Deployment
metadata: {name: front-lo, namespace: probed}
spec:
  selector: {matchLabels: {app: front-lo}}
  template:
    metadata: {labels: {app: front-lo}}
    spec:
      terminationGracePeriodSeconds: 1
      containers:
      - {name: front, image: APP_IMAGE, imagePullPolicy: Never, args: [-http, "8000"], ports: [{containerPort: 8000, name: web}]}
      - {name: app, image: APP_IMAGE, imagePullPolicy: Never, args: [-host, 127.0.0.1], livenessProbe: {exec: {command: [/app, -h]}, timeoutSeconds: 10}}
---
apiVersion: v1
kind: Service
metadata: {name: front, namespace: probed}
spec: {selector: {app: front}, ports: [{port: 80, targetPort: web}]}
---
apiVersion: v1
kind: Service
metadata: {name: front-lo, namespace: probed}
spec: {selector: {app: front-lo}, ports: [{port: 80, targetPort: 8000}]}
`

// worldProbes checks that the kubelet's probes see the application, whatever the laptop does, and that calls within a
// pod are intercepted.
func worldProbes(t *testing.T, l *laptop) {
	cert, key := certificate(t, "probed.test")
	encode := base64.StdEncoding.EncodeToString
	l.apply(t, strings.NewReplacer("APP_IMAGE", appRef, "PAIR_CERT", encode(cert), "PAIR_KEY", encode(key), " &front", "", " &pod", "").Replace(probesManifest))
	shops := map[string]*probedShop{}
	for _, name := range []string{"probed", "calls", "front", "front-lo"} {
		shops[name] = &probedShop{&shop{l.world, "probed", "deployment/" + name}, name}
	}
	for _, s := range shops {
		s.rolledOut(t)
	}
	t.Run("probes", func(t *testing.T) { shops["probed"].probes(t, l) })
	t.Run("node_port_is_intercepted", func(t *testing.T) { shops["probed"].nodePort(t, l) })
	t.Run("probes_by_sockets_and_grpc", func(t *testing.T) { shops["calls"].sockets(t, l) })
	t.Run("calls_within_the_pod", func(t *testing.T) {
		for _, name := range []string{"front", "front-lo"} {
			t.Run(name, func(t *testing.T) { shops[name].within(t, l) })
		}
	})
	t.Run("sidecar_cannot_take_calls_within_the_pod", func(t *testing.T) { shops["front"].noSidecar(t, l) })
}

type probedShop struct {
	*shop
	name string
}

// state returns the pod's address, whether it is ready, and how often its containers were restarted.
func (s *probedShop) state(t *testing.T) (ip, state string) {
	t.Helper()
	out := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app="+s.name, "-o",
		`jsonpath={.items[0].status.podIP} {.items[0].status.conditions[?(@.type=="Ready")].status} {.items[0].status.containerStatuses[*].restartCount}`)
	ip, state, _ = strings.Cut(out, " ")
	return ip, state
}

// probed waits until the application has seen three more of each of these requests, by User-Agent and path.
func (s *probedShop) probed(t *testing.T, v *visitor, ip string, requests ...string) {
	t.Helper()
	began := s.seen(t, v, ip)
	testenv.Eventually(t, soon, func() error {
		now := s.seen(t, v, ip)
		for _, r := range requests {
			if n := now[r] - began[r]; n < 3 {
				return fmt.Errorf("%q came %d times: %v", r, n, now)
			}
		}
		return nil
	})
}

// seen returns how many requests the application has seen, by User-Agent, without a version, and path.
func (s *probedShop) seen(t *testing.T, v *visitor, ip string) map[string]int {
	t.Helper()
	req, err := http.NewRequest(http.MethodGet, "http://"+net.JoinHostPort(ip, "8080")+"/seen", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	req.Header.Set("User-Agent", "kube-probe/1") // to the application
	resp, err := v.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer resp.Body.Close()
	var all map[string]int
	if err := json.NewDecoder(resp.Body).Decode(&all); err != nil {
		t.Fatal(err)
	}
	seen := make(map[string]int)
	for request, n := range all {
		agent, path, _ := strings.Cut(request, " /")
		agent, _, _ = strings.Cut(agent, "/")
		seen[agent+" /"+path] += n
	}
	return seen
}

// listenOn accepts connections to a port of the laptop, and counts them. It does not answer.
func (l *laptop) listenOn(t *testing.T, port string) *atomic.Int64 {
	t.Helper()
	var listener net.Listener
	if err := inside(l.network(), func() (err error) {
		listener, err = net.Listen("tcp", "127.0.0.1:"+port)
		return err
	}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { listener.Close() })
	var n atomic.Int64
	go func() {
		for {
			c, err := listener.Accept()
			if err != nil {
				return
			}
			n.Add(1)
			go func() { _, _ = io.Copy(io.Discard, c) }()
		}
	}()
	return &n
}

func (s *probedShop) probes(t *testing.T, l *laptop) {
	v := s.visitor(t)
	stopped := l.listenOn(t, "7002")
	for _, tt := range []struct {
		name  string
		ports string
		flags []string
	}{
		{"absent", "7001:8080,7001:8443,7001:9001", nil},
		{"stopped", "7002:8080,7002:8443,7002:9001", nil},
		{"headers", "7002:8080,7002:8443,7002:9001", []string{"--headers", mine + "=" + me}},
		{"tls_secret", "7002:8080,7002:8443,7002:9001", []string{"--tls-secret", "tls"}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			ip, before := s.state(t)
			l.proxy(t, s.shop, append(tt.flags, "--port", tt.ports)...)
			s.probed(t, v, ip, "tls kube-probe /live", "hc /moved", "hc /login")
			if _, after := s.state(t); after != before || !strings.HasPrefix(after, "True") {
				t.Errorf("the pod was %q, and is %q", before, after)
			}
			if r := l.intercept(t).Requests; r != 0 || stopped.Load() != 0 {
				t.Errorf("the laptop got %d requests, %d connections", r, stopped.Load())
			}
			l.leave(t, s.shop)
		})
	}
}

// nodePort checks that what goes through the pod's node is intercepted, although it comes from the kubelet's address.
func (s *probedShop) nodePort(t *testing.T, l *laptop) {
	v := s.visitor(t)
	node := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app="+s.name, "-o", "jsonpath={.items[0].status.hostIP}")
	port := s.kubectl(t, "-n", s.namespace, "get", "service", s.name, "-o", "jsonpath={.spec.ports[0].nodePort}")
	l.proxy(t, s.shop, "--port", "8080")
	defer l.leave(t, s.shop)
	url := "http://" + net.JoinHostPort(node, port)
	testenv.Eventually(t, soon, func() error {
		return errors.Join(v.want(url+"/", "laptop"), v.want(url+"/login", "laptop", "User-Agent", "hc", "X-Check", "1"))
	})
	ip, _ := s.state(t)
	if err := s.onNode(t, true).want("http://"+net.JoinHostPort(ip, "8080")+"/login", "laptop", "User-Agent", "hc"); err != nil {
		t.Error(err)
	}
}

// onNode returns a visitor on the pod's node, or on another one.
func (s *probedShop) onNode(t *testing.T, pods bool) *visitor {
	t.Helper()
	node := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app="+s.name, "-o", "jsonpath={.items[0].spec.nodeName}")
	v := s.visitor(t)
	if on := "/run/netns/" + node; pods != (v.network == on) {
		v.network = strings.NewReplacer("-node1", "-node2", "-node2", "-node1").Replace(v.network)
	}
	return v
}

func (s *probedShop) sockets(t *testing.T, l *laptop) {
	v := s.visitor(t)
	n := l.listenOn(t, "7002")
	l.proxy(t, s.shop, "--port", "7002:9090,7002:9001")
	defer l.leave(t, s.shop)
	ip, before := s.state(t)
	began := n.Load()
	resp, err := v.http.Get("http://" + net.JoinHostPort(ip, "8080") + "/deafen")
	if err != nil {
		t.Fatal(err)
	}
	resp.Body.Close()
	testenv.Eventually(t, soon, func() error {
		if _, now := s.state(t); now != "False 0" {
			return fmt.Errorf("the pod was %q, and is %q although the application does not listen", before, now)
		}
		return nil
	})
	if got := n.Load() - began; got != 0 {
		t.Errorf("%d connections of the kubelet came to the laptop", got)
	}
	connections := n.Load() // another client
	c, err := dialIn(s.onNode(t, false).network, net.JoinHostPort(ip, "9001"))
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	if _, err := io.WriteString(c, "\x00hello\n"); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, soon, func() error {
		if n.Load() == connections {
			return errors.New("no connection came to the laptop")
		}
		return nil
	})
}

func (s *probedShop) within(t *testing.T, l *laptop) {
	v := s.visitor(t)
	ip, state := s.state(t)
	pod := s.kubectl(t, "-n", s.namespace, "get", "pods", "-l", "app="+s.name, "-o", "jsonpath={.items[0].metadata.name}")
	ways := []string{"127.0.0.1"}
	if s.name == "front" {
		ways = append(ways, "[::1]", ip)
	}
	ask := func(want string, header ...string) error {
		var errs []error
		for _, to := range ways {
			url := "http://" + s.clusterIP(t, s.namespace, s.name) + "/via?drop=none&to=http://" + to + ":8080/"
			errs = append(errs, v.want(url, want, header...))
		}
		return errors.Join(errs...)
	}
	if err := ask(pod); err != nil {
		t.Fatal(err)
	}
	r := l.proxy(t, s.shop, "-c", "app", "--port", "8080")
	// In the other pod, the application runs as another user.
	if warns := strings.Contains(r.stderr+r.stdout, "livenessProbe of container app"); warns != (s.name == "front-lo") {
		t.Errorf("warns of the command of a probe: %v\n%s%s", warns, r.stdout, r.stderr)
	}
	if err := ask("laptop"); err != nil {
		t.Error(err)
	}
	l.proxy(t, s.shop, "-c", "app", "--port", "8080", "--headers", mine+"="+me)
	if err := errors.Join(ask("laptop", mine, me), ask(pod)); err != nil {
		t.Error(err)
	}
	why := l.run(t, "kubevpn", "why", "http://"+s.name+".probed/via?drop=none&to=http://127.0.0.1:8080/", "-H", mine+": "+me)
	if why.code != 0 || !strings.Contains(why.stdout, "sends it to this machine") {
		t.Error(why)
	}
	l.proxy(t, s.shop, "-c", "app", "--port", "7001:8080") // nothing listens
	if err := ask("laptop"); err == nil || !strings.Contains(err.Error(), "502") {
		t.Errorf("without a program: %v", err)
	}
	if s.name == "front" { // one probe passes through the proxy, the other one is a command
		s.probed(t, v, ip, "kube-probe /", "Go-http-client /live")
	}
	if _, now := s.state(t); now != state {
		t.Errorf("the pod was %q, and is %q", state, now)
	}
	l.leave(t, s.shop)
	if err := ask(pod); err != nil {
		t.Error(err)
	}
}

func (s *probedShop) noSidecar(t *testing.T, l *laptop) {
	before := s.template(t)
	failure{code: api.ExitIntercept, message: "port 8000 of the container front, to which the Service front sends", hint: "--mode ephemeral", within: soon}.
		check(t, l.run(t, "kubevpn", "proxy", s.workload, "-n", s.namespace, "-c", "app", "--port", "8080", "--mode", "sidecar"))
	if after := s.template(t); after != before {
		t.Errorf("the template was\n%s\nand is\n%s", before, after)
	}
}
