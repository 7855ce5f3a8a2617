//go:build e2e && linux

package e2e

import (
	"context"
	"crypto/tls"
	"fmt"
	"log"
	"net"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	clientcmdapi "k8s.io/client-go/tools/clientcmd/api"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/test/lab"
)

// transportsSuite checks that kubevpn finds and uses the better transport, reports what blocks it, and falls back to
// the other without losing the session.
func transportsSuite(t *testing.T, w *world) {
	w = w.by("")
	l := w.newUser(t, lab.Admin)
	l.connect(t) // installs the manager for users who cannot

	t.Run("auto_chooses_api_proxy", func(t *testing.T) {
		l.transportIs(t, api.TransportAPIProxy, api.TransportInUse, "")
		if c := l.connection(t); c.Transport != api.TransportAPIProxy || c.Transports[0].State != api.TransportStandby {
			t.Errorf("%q, %+v", c.Transport, c.Transports)
		}
		l.reachesWeb(t, w)
	})
	t.Run("client_without_a_ticket_learns_nothing", func(t *testing.T) {
		c := l.connection(t)
		ip := w.kubectl(t, "-n", c.ManagerNamespace, "get", "pod", c.ManagerPod, "-o", "jsonpath={.status.podIP}")
		for name, request := range map[string]string{
			"no_upgrade":   "GET / HTTP/1.1\r\nHost: x\r\n\r\n",
			"no_ticket":    "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: kubevpn\r\n\r\n",
			"wrong_ticket": "GET / HTTP/1.1\r\nHost: x\r\nConnection: Upgrade\r\nUpgrade: kubevpn\r\nKubevpn-Ticket: " + strings.Repeat("ab", 16) + "." + strings.Repeat("A", 43) + "\r\n\r\n",
			"garbage":      "\x16\x03\x01\x00\x05hello",
		} {
			t.Run(name, func(t *testing.T) {
				conn, err := dialIn("/run/netns/"+w.Config().Name+"-node2", net.JoinHostPort(ip, "10802"))
				if err != nil {
					t.Fatal(err)
				}
				learnsNothing(t, conn, request)
			})
		}
		raw := fmt.Sprintf("/api/v1/namespaces/%s/pods/%s:10802/proxy/", c.ManagerNamespace, c.ManagerPod)
		if out, err := w.tryKubectl(t.Context(), "get", "--raw", raw); err == nil {
			t.Errorf("a client with pods/proxy and without a ticket was answered %q", out)
		}
		l.reachesWeb(t, w)
	})
	t.Run("flows_continue_after_api_server_restarts", func(t *testing.T) { l.apiServerRestarts(t) })
	t.Run("api_proxy_returns_after_manager_restarts", func(t *testing.T) {
		managerDeleted(t, l, w.clusterIP(t, "default", "web"))
		l.transportIs(t, api.TransportAPIProxy, api.TransportInUse, "") // the new manager has another key, so the ticket changes
		l.reachesWeb(t, w)
	})
	l.must(t, "kubevpn", "disconnect", "--all")

	t.Run("port_forward_can_be_forced", func(t *testing.T) {
		l.connect(t, "--transport", "port-forward")
		c := l.connection(t)
		if !strings.HasPrefix(c.Transport, "port-forward (") || c.Transports[1].State != api.TransportOff {
			t.Errorf("%q, %+v", c.Transport, c.Transports)
		}
		l.reachesWeb(t, w)
		l.must(t, "kubevpn", "disconnect", "--all")
	})
	t.Run("api_proxy_can_be_forced", func(t *testing.T) {
		r := l.connect(t, "--transport", "api-proxy")
		if c := l.connection(t); c.Transport != api.TransportAPIProxy || !strings.Contains(r.stderr, "Opening the tunnel: api-proxy") {
			t.Errorf("%q, %v", c.Transport, r)
		}
		l.reachesWeb(t, w)
		l.must(t, "kubevpn", "disconnect", "--all")
	})
	directTransport(t, w, l)
	t.Run("denied_pods_proxy_falls_back_to_port_forward", func(t *testing.T) {
		l.apply(t, `
apiVersion: v1
kind: ServiceAccount
metadata: {name: forwarder, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRole
metadata: {name: forwarder}
rules:
- apiGroups: ["", apps, discovery.k8s.io]
  resources: [pods, services, endpoints, nodes, namespaces, configmaps, deployments, daemonsets, replicasets, endpointslices, events]
  verbs: [get, list, watch]
- {apiGroups: [""], resources: [pods/portforward], verbs: [create, get]}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: forwarder}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: forwarder}
subjects: [{kind: ServiceAccount, name: forwarder, namespace: default}]
`)
		token := l.kubectl(t, "create", "token", "forwarder")
		kubeconfig := l.variant(t, func(_ *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) { *u = clientcmdapi.AuthInfo{Token: token} })
		l.connect(t, "--kubeconfig", kubeconfig, "--netstack", "gvisor")
		l.transportIs(t, api.TransportAPIProxy, api.TransportFailing, "pods/proxy")
		if c := l.connection(t); !strings.HasPrefix(c.Transport, "port-forward (") || c.Status != api.StatusConnected {
			t.Errorf("%s by %q", c.Status, c.Transport)
		}
		l.reachesWeb(t, w)
		l.must(t, "kubevpn", "disconnect", "--all")
		failure{code: api.ExitPermission, message: "the transport api-proxy does not work: .*pods/proxy", hint: "--transport port-forward"}.
			check(t, l.run(t, "kubevpn", "connect", "--kubeconfig", kubeconfig, "--netstack", "gvisor", "--transport", "api-proxy"))
	})
	t.Run("blocked_upgrade_falls_back", func(t *testing.T) {
		l.connect(t, "--kubeconfig", w.behindProxy(t, l, nil))
		l.transportIs(t, api.TransportAPIProxy, api.TransportFailing, "")
		if c := l.connection(t); c.Transport != "port-forward (websocket)" || c.Status != api.StatusConnected {
			t.Errorf("%s by %q", c.Status, c.Transport)
		}
		l.reachesWeb(t, w)
		l.must(t, "kubevpn", "disconnect", "--all")
	})
}

// apiServerRestarts restarts the API server while flows run at full speed. They wait and continue, first by either
// transport, and then by api-proxy again.
func (l *laptop) apiServerRestarts(t *testing.T) {
	address := net.JoinHostPort(l.clusterIP(t, "default", "web"), "9001")
	flows := make([]*flow, 4)
	for i := range flows {
		flows[i] = l.startPaced(t, address, 0)
	}
	sent := func() (bytes uint64) {
		for _, tr := range l.connection(t).Transports {
			if tr.Name == api.TransportAPIProxy {
				bytes = tr.Sent
			}
		}
		return bytes
	}
	before := sent()
	for _, f := range flows {
		f.goesOn(t, soon)
	}
	testenv.Eventually(t, time.Minute, func() error {
		if more := sent() - before; more < 32<<20 {
			return fmt.Errorf("%d bytes sent by api-proxy", more)
		}
		return nil
	})
	if err := l.Kill(t.Context(), "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	l.reconnecting(t, soon)
	if err := l.Restart(t.Context(), "kube-apiserver"); err != nil {
		t.Fatal(err)
	}
	t.Logf("connected %v after its restart", l.connectedAgain(t, 40*time.Second).Round(100*time.Millisecond))
	for i, f := range flows {
		t.Logf("flow %d continued after %v", i, f.goesOn(t, soon).Round(time.Millisecond))
	}
	l.ready(t)
	for _, f := range flows {
		f.goesOn(t, soon)
		f.finish(t)
	}
	l.transportIs(t, api.TransportAPIProxy, api.TransportInUse, "")
}

// transportIs waits until a transport has a state, for a reason that contains a text.
func (l *laptop) transportIs(t *testing.T, name string, state api.TransportState, reason string) {
	t.Helper()
	l.transportIsWithin(t, time.Minute, name, state, reason)
}

func (l *laptop) transportIsWithin(t *testing.T, within time.Duration, name string, state api.TransportState, reason string) {
	t.Helper()
	testenv.Eventually(t, within, func() error {
		all := l.connection(t).Transports
		for _, tr := range all {
			if tr.Name == name && tr.State == state && strings.Contains(tr.Reason, reason) {
				return nil
			}
		}
		return fmt.Errorf("%s is not %s for %q: %+v", name, state, reason, all)
	})
}

// behindProxy returns a kubeconfig that reaches the API server through a reverse proxy on the laptop. The proxy
// terminates TLS and supports WebSockets but no other upgrade. It changes answers with change, unless that is nil.
func (w *world) behindProxy(t *testing.T, l *laptop, change func(*http.Response) error) string {
	t.Helper()
	w.apply(t, `
apiVersion: v1
kind: ServiceAccount
metadata: {name: behind-proxy, namespace: default}
---
apiVersion: rbac.authorization.k8s.io/v1
kind: ClusterRoleBinding
metadata: {name: behind-proxy}
roleRef: {apiGroup: rbac.authorization.k8s.io, kind: ClusterRole, name: cluster-admin}
subjects: [{kind: ServiceAccount, name: behind-proxy, namespace: default}]
`)
	token := w.kubectl(t, "create", "token", "behind-proxy")
	var target *url.URL
	kubeconfig := l.variant(t, func(c *clientcmdapi.Cluster, u *clientcmdapi.AuthInfo) {
		var err error
		if target, err = url.Parse(c.Server); err != nil {
			t.Fatal(err)
		}
		server := w.serveProxy(t, l, target, change)
		c.Server, c.InsecureSkipTLSVerify, c.CertificateAuthorityData = server, true, nil
		*u = clientcmdapi.AuthInfo{Token: token}
	})
	return kubeconfig
}

func (w *world) serveProxy(t *testing.T, l *laptop, target *url.URL, change func(*http.Response) error) string {
	t.Helper()
	proxy := &httputil.ReverseProxy{
		Rewrite: func(r *httputil.ProxyRequest) {
			r.SetURL(target)
			if !strings.EqualFold(r.In.Header.Get("Upgrade"), "websocket") {
				r.Out.Header.Del("Upgrade")
				r.Out.Header.Del("Connection")
			}
		},
		ModifyResponse: change,
		FlushInterval:  -1,
		ErrorLog:       log.New(t.Output(), "", 0),
		Transport: &http.Transport{
			TLSClientConfig: &tls.Config{InsecureSkipVerify: true}, // the lab's own API server
			DialContext: func(_ context.Context, _, address string) (net.Conn, error) {
				return dialIn(l.network(), address)
			},
		},
	}
	server := httptest.NewUnstartedServer(proxy)
	server.Config.ErrorLog = proxy.ErrorLog
	if err := inside(l.network(), func() (err error) {
		server.Listener.Close()
		server.Listener, err = net.Listen("tcp", "127.0.0.1:0")
		return err
	}); err != nil {
		t.Fatal(err)
	}
	server.StartTLS()
	t.Cleanup(server.Close)
	return server.URL
}
