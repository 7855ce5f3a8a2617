//go:build linux

package page_test

import (
	"net/http"
	"net/netip"
	"time"

	"kubevpn/internal/api"
)

// now is the time of the states.
var now = time.Now()

func empty() api.PageUpdate {
	return api.PageUpdate{
		Status: api.Status{Version: "1.0.0", Connections: []api.Connection{}, Intercepts: []api.Intercept{}},
		Flows:  api.FlowList{Time: now, Items: []api.Flow{}}, DNS: []api.DNSQuery{}, Log: []string{},
	}
}

// state sets the state of a laptop that is in use.
func state(u *api.PageUpdate) {
	u.Status.Connections = []api.Connection{connection()}
	u.Status.Intercepts = intercepts()
	u.Flows.Items = []api.Flow{
		{Connection: "shop", Program: "curl", PID: 4711, Protocol: "tcp", Source: netip.MustParseAddrPort("198.18.0.1:51442"),
			Destination: netip.MustParseAddrPort("10.96.101.1:80"), Name: api.ObjectName{Kind: "service", Namespace: "shop", Name: "web"},
			Since: now, Counted: true, Sent: 34_000, Received: 12_700_000, SentRate: 1200, ReceivedRate: 2_400_000, Seconds: 0.0123,
			RoundTripTo: api.RoundTripManager, Transport: "port-forward (spdy)"},
		{Connection: "shop", Program: "psql", PID: 4712, Protocol: "tcp", Source: netip.MustParseAddrPort("198.18.0.1:51443"),
			Destination: netip.MustParseAddrPort("10.244.1.9:5432"), Name: api.ObjectName{Kind: "pod", Namespace: "shop", Name: "db-0"},
			Since: now, Counted: true, Sent: 2100, Received: 88_000, Seconds: 0.0119, Stall: api.StallProgram, StallSeconds: 4,
			Transport: "port-forward (spdy)"},
		{Connection: "shop", Protocol: "udp", Source: netip.MustParseAddrPort("198.18.0.1:41627"),
			Destination: netip.MustParseAddrPort("10.96.0.10:53"), Name: api.ObjectName{Kind: "service", Namespace: "kube-system", Name: "kube-dns"},
			Since: now, Counted: true, Sent: 67, Received: 160, Seconds: 0.011, Transport: "port-forward (spdy)"},
	}
	u.Flows.Total = api.FlowTotal{Flows: 3, Stalled: 1, SentRate: 1200, ReceivedRate: 2_400_000}
	u.DNS = []api.DNSQuery{
		{Time: now, Name: "web.shop.svc.cluster.local", Type: "A", Network: "udp", From: "cluster", Server: netip.MustParseAddrPort("10.96.0.10:53"),
			Connection: "shop", Domain: "cluster.local", Rcode: "NOERROR", Answers: []string{"A 10.96.101.1"}, Records: 1, Seconds: 0.0131},
		{Time: now, Name: "cart.shop.svc.cluster.local", Type: "A", Network: "udp", From: "cluster", Connection: "shop", Rcode: "NXDOMAIN", Seconds: 0.0128},
	}
	u.Log = []string{
		`time=2026-01-02T10:00:00.000Z level=INFO msg="daemon begins" version=1.0.0 pid=4700`,
		`time=2026-01-02T10:00:01.250Z level=INFO msg=connected connection=shop transport="port-forward (spdy)"`,
	}
}

func connection() api.Connection {
	return api.Connection{
		ID: "shop", Cluster: "kind-shop", Server: "https://203.0.113.7:6443", Context: "kind-shop", Namespace: "shop",
		Status: api.StatusConnected, Netstack: api.NetstackGVisor, NetstackReason: "kube-proxy is iptables", Transport: "port-forward (spdy)",
		Transports: []api.Transport{
			{Name: api.TransportPortForward, State: api.TransportInUse, Since: now, Seconds: 0.0121, Sent: 36_100, Received: 12_800_000},
			{Name: api.TransportAPIProxy, State: api.TransportFailing, Since: now, Reason: "you may not get pods/proxy"},
			{Name: api.TransportDirect, State: api.TransportFailing, Since: now, Reason: "no answer from 10.244.1.2:10802 within 3s"},
		},
		Seconds: 0.0118, Device: "kubevpn0", Addresses: []netip.Addr{netip.MustParseAddr("198.18.0.1")}, Since: now.Add(-42 * time.Minute),
		CIDRs:            []netip.Prefix{netip.MustParsePrefix("10.244.0.0/16"), netip.MustParsePrefix("10.96.0.0/16")},
		ManagerNamespace: "kubevpn", ManagerPod: "kubevpn-traffic-manager-7c9f5d4b8-x2x9p", ManagerVersion: "1.0.0", Services: "resolved by kubevpn",
		DNS: api.DNSStatus{Mode: api.ResolverResolved, Domain: "cluster.local"},
		Checks: []api.Check{
			{What: "name", Target: "kubernetes.default", OK: true, Seen: "10.96.0.1", Seconds: 0.013},
			{What: "pod", Target: "10.244.1.5:8080", OK: true, Seen: "connected in 14ms", Seconds: 0.014},
			{What: "clusterIP", Target: "10.96.0.1:443", OK: true, Seen: "connected in 13ms", Seconds: 0.013},
		},
		Warnings: []string{"the API server answers slowly: 420 ms for the last request"},
	}
}

func intercepts() []api.Intercept {
	return []api.Intercept{
		{ID: "shop-web", Connection: "shop", Namespace: "shop", Workload: "deployment/web", State: api.InterceptActive, Mode: api.ModeEphemeral,
			Match: "x-user=ann", Ports: []api.PortMap{{Protocol: "tcp", Container: 8080, Local: 8080}}, Owner: "ann@laptop", Since: now, Requests: 118,
			Pods: []api.InterceptedPod{{Name: "web-898fcff7c-qv6kz", Intercepted: true}, {Name: "web-898fcff7c-x7k2p", Reason: "the pod is not ready"}}},
		{ID: "shop-cart", Connection: "shop", Namespace: "shop", Workload: "deployment/cart", State: api.InterceptActive, Mode: api.ModeEphemeral,
			Match: "x-user=ann", Owner: "ann@laptop", Since: now, Pods: []api.InterceptedPod{{Name: "cart-5d9c7b-2mmvz", Intercepted: true}},
			Clone: &api.Clone{Namespace: "shop", Name: "cart-ann", State: api.CloneRunning, Host: "cart-ann.shop",
				Pods: []api.ClonePod{{Name: "cart-ann-0-k8s2d", IP: "10.244.2.9", Ready: true}},
				Sync: []api.Synced{{SyncPair: api.SyncPair{Local: "/home/ann/cart", Remote: "/app"}, Synced: true, Files: 214, Last: now}}}},
	}
}

// exchange returns one of three exchanges.
func exchange(n int) api.Exchange {
	status := []int{http.StatusOK, http.StatusNotFound, http.StatusInternalServerError}[n]
	return api.Exchange{
		Began: now, Wait: 0.013, Seconds: 0.015, Namespace: "shop", Workload: "deployment/web", Pod: "web-898fcff7c-qv6kz", Match: "x-user=ann",
		To: api.ToLaptop, Redacted: []string{"Cookie"}, Client: netip.MustParseAddrPort("10.244.2.3:40312"), Server: netip.MustParseAddrPort("10.244.1.7:8080"),
		Request: api.ExchangeRequest{Method: "GET", Scheme: "http", Host: "web.shop", Path: []string{"/cart", "/price?sku=4711", "/checkout"}[n],
			Proto: "HTTP/1.1", Headers: http.Header{"X-User": {"ann"}, "Cookie": {"[redacted]"}}},
		Response: &api.ExchangeResponse{Status: status, Headers: http.Header{"Content-Type": {"application/json"}},
			Body: api.ExchangeBody{Size: 15, Data: []byte(`{"total": 10.5}`)}},
	}
}

func diagnosis() api.Diagnosis {
	return api.Diagnosis{
		Findings: []api.Finding{
			{Section: "This machine", Name: "kernel", Verdict: api.VerdictOK, Seen: "Linux 6.12"},
			{Section: "This machine", Name: "device", Verdict: api.VerdictFailed, Cause: "/dev/net/tun does not exist",
				Effect: "connect cannot create its network device", Fix: "sudo modprobe tun", Code: api.ExitPrivilege},
			{Section: "API server", Name: "clock", Verdict: api.VerdictWarning, Cause: "the clocks differ by 42 s", Effect: "tokens may seem expired",
				Fix: "timedatectl set-ntp true"},
			{Section: "Cluster", Name: "rights", Verdict: api.VerdictOK, Seen: "you have 1 of these 2 rights", Notes: []string{"yes: connect",
				"no: proxy without a restart (you may not patch pods/ephemeralcontainers)"}},
			{Section: "Cluster", Name: "networks", Verdict: api.VerdictSkipped, Seen: `the check "answer" failed`},
		},
	}
}
