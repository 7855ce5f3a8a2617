package why

import (
	"fmt"
	"net/http"
	"net/netip"
	"net/url"
	"strings"
	"testing"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"sigs.k8s.io/yaml"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/why/trip"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wire/transport"
)

var (
	vip     = netip.MustParseAddrPort("10.96.0.80:80")
	atPod   = netip.MustParseAddrPort("10.244.1.7:8080")
	ok      = trip.Step{Done: true, Seconds: 0.002}
	refused = trip.Step{Failure: transport.CodeRefused, Error: "connection refused", Seconds: 0.002}
	silence = trip.Step{Failure: transport.CodeTimeout, Error: "i/o timeout", Seconds: 2}
)

func decode[T any](t *testing.T, text string) (v T) {
	t.Helper()
	if err := yaml.UnmarshalStrict([]byte(text), &v); err != nil {
		t.Fatal(err)
	}
	return v
}

// healthy returns the facts of a request to http://web.shop/ that a pod answers.
func healthy(t *testing.T) *facts {
	t.Helper()
	request, err := http.NewRequest(http.MethodGet, "http://web.shop/", http.NoBody)
	if err != nil {
		t.Fatal(err)
	}
	f := &facts{
		Config: Config{Request: request,
			Connection: api.Connection{Device: "kubevpn0", Netstack: api.NetstackGVisor, ManagerNamespace: "kubevpn",
				CIDRs: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("10.244.0.0/16")}}},
		Port: 80,
		Trip: trip.Result{
			Lookup: ok, Addresses: []netip.Addr{vip.Addr()}, Nameservers: []string{"127.0.0.53:53"}, To: vip,
			Device: "kubevpn0", Dial: ok, Answer: ok, Status: 200,
		},
		Namespace: "shop", Name: "web", Certain: true,
		Dials: map[netip.AddrPort]trip.Step{atPod: ok}, Missing: map[object]string{},
	}
	f.ClusterDNS.Addresses, f.ClusterDNS.Lookup = []netip.Addr{vip.Addr()}, ok
	service := decode[corev1.Service](t, `
{metadata: {name: web, namespace: shop}, spec: {clusterIP: 10.96.0.80, clusterIPs: [10.96.0.80], selector: {app: web}, ports: [{name: http, port: 80, targetPort: http}]}}`)
	f.Service = &service
	f.Slices = decode[[]discoveryv1.EndpointSlice](t, `
- ports: [{name: http, port: 8080}]
  endpoints: [{addresses: [10.244.1.7], nodeName: node1, conditions: {ready: true}, targetRef: {kind: Pod, name: web-1}}]`)
	f.Pods = decode[[]corev1.Pod](t, `
- metadata: {name: web-1, namespace: shop, labels: {app: web}}
  spec: {nodeName: node1, containers: [{name: app, ports: [{name: http, containerPort: 8080}]}]}
  status: {podIPs: [{ip: 10.244.1.7}], conditions: [{type: Ready, status: "True"}], containerStatuses: [{name: app, ready: true, state: {running: {}}}]}`)
	manager := decode[corev1.Pod](t, `
{metadata: {name: manager, namespace: kubevpn, labels: {app.kubernetes.io/name: kubevpn}}, spec: {nodeName: node1}, status: {podIPs: [{ip: 10.244.1.2}]}}`)
	f.Source = &manager
	return f
}

// fails makes the request end at the connection.
func (f *facts) fails(s trip.Step) {
	f.Trip.Dial, f.Trip.Answer, f.Trip.Status = s, trip.Step{}, 0
}

// otherPod adds a second pod that is not ready.
func (f *facts) otherPod(t *testing.T) {
	f.Pods = append(f.Pods, decode[corev1.Pod](t, `
metadata: {name: web-2, namespace: shop, labels: {app: web}}
spec: {nodeName: node2, containers: [{name: app}]}
status: {podIPs: [{ip: 10.244.2.7}], conditions: [{type: Ready, status: "False"}], containerStatuses: [{name: app, ready: false, state: {running: {}}}]}`))
	f.Slices = append(f.Slices, decode[[]discoveryv1.EndpointSlice](t, `
- ports: [{name: http, port: 8080}]
  endpoints: [{addresses: [10.244.2.7], nodeName: node2, conditions: {ready: false}, targetRef: {kind: Pod, name: web-2}}]`)...)
}

func (f *facts) policy(t *testing.T, ingress string) {
	f.Policies = decode[[]networkingv1.NetworkPolicy](t, `
- {metadata: {name: guard, namespace: shop}, spec: {podSelector: {}, policyTypes: [Ingress], ingress: [`+ingress+`]}}`)
}

// planted are causes, each with the hop and the words that name it.
var planted = map[string]struct {
	plant func(*testing.T, *facts)
	code  api.ExitCode
	hop   string
	says  string
}{
	"a name that does not exist": {func(_ *testing.T, f *facts) {
		f.Trip = trip.Result{Lookup: trip.Step{Failure: transport.CodeFailed, Error: "no such host"}, Nameservers: []string{"1.1.1.1:53"}}
		f.Service, f.Slices, f.Pods, f.ClusterDNS.Addresses = nil, nil, nil, nil
	}, api.ExitNameMissing, "name", "no Service web in the namespace shop"},
	"a name captured by another VPN": {func(_ *testing.T, f *facts) {
		f.Trip.Addresses, f.Trip.Nameservers = []netip.Addr{netip.MustParseAddr("172.31.9.9")}, []string{"172.31.9.1:53"}
		f.Trip.To, f.Trip.Device = netip.MustParseAddrPort("172.31.9.9:80"), "office0"
	}, api.ExitNameTaken, "name", "172.31.9.1:53 says that web.shop is 172.31.9.9, and the cluster has 10.96.0.80"},
	"a name that another VPN denies": {func(_ *testing.T, f *facts) {
		f.Trip = trip.Result{Lookup: trip.Step{Failure: transport.CodeFailed, Error: "no such host"}, Nameservers: []string{"172.31.9.1:53"}}
	}, api.ExitNameTaken, "name", "172.31.9.1:53 does not resolve web.shop"},
	"a route of another VPN": {func(_ *testing.T, f *facts) {
		f.Trip.Device = "office0"
		f.fails(silence)
	}, api.ExitRouteTaken, "route", "goes to office0, not to kubevpn0"},
	"a connection that is interrupted": {func(_ *testing.T, f *facts) {
		f.Connection.Status = api.StatusReconnecting
		f.fails(silence)
	}, api.ExitLost, "connection", "kubevpn reconnects"},
	"an address without a route": {func(_ *testing.T, f *facts) {
		f.Trip.Device, f.Connection.CIDRs = "eth0", nil
		f.fails(silence)
	}, api.ExitRouteTaken, "route", "none of the networks of the tunnel"},
	"an admin's limit": {func(_ *testing.T, f *facts) {
		f.Connection.Limited, f.Connection.Services = true, "resolved by kubevpn in pay; rejected in other namespaces"
		f.fails(trip.Step{Failure: transport.CodeHostUnreachable, Error: "no route to host"})
		f.Dials = map[netip.AddrPort]trip.Step{atPod: f.Trip.Dial}
	}, api.ExitPermission, "dial", "its admin limits what laptops reach"},
	"a port that the Service lacks": {func(_ *testing.T, f *facts) {
		f.Port, f.Trip.To = 81, netip.AddrPortFrom(vip.Addr(), 81)
		f.fails(refused)
	}, api.ExitNoPort, "balancer", "no TCP port 81; it has 80 (http)"},
	"no pod": {func(_ *testing.T, f *facts) {
		f.Slices, f.Pods, f.Dials = nil, nil, nil
		f.fails(refused)
	}, api.ExitNoEndpoint, "balancer", "no pod has the labels app=web"},
	"no ready endpoint": {func(t *testing.T, f *facts) {
		f.Slices, f.Pods, f.Dials = nil, nil, nil
		f.otherPod(t)
		f.fails(refused)
	}, api.ExitNoEndpoint, "balancer", "its readiness probe fails"},
	"no endpoint on the node": {func(_ *testing.T, f *facts) {
		local := corev1.ServiceInternalTrafficPolicyLocal
		f.Service.Spec.InternalTrafficPolicy = &local
		f.Source.Spec.NodeName = "node9"
		f.fails(silence)
	}, api.ExitNoEndpoint, "balancer", "internalTrafficPolicy Local"},
	"a targetPort that no container names": {func(t *testing.T, f *facts) {
		service := decode[corev1.Service](t, `
{metadata: {name: web, namespace: shop}, spec: {clusterIPs: [10.96.0.80], selector: {app: web}, ports: [{name: http, port: 80, targetPort: htpp}]}}`)
		f.Service, f.Slices, f.Dials = &service, nil, nil
		f.fails(refused)
	}, api.ExitTargetPort, "balancer", `targetPort "htpp"`},
	"a wrong targetPort": {func(_ *testing.T, f *facts) {
		*f.Slices[0].Ports[0].Port = 8081
		f.Dials = map[netip.AddrPort]trip.Step{netip.MustParseAddrPort("10.244.1.7:8081"): refused, atPod: ok}
		f.fails(refused)
	}, api.ExitTargetPort, "dial", "sends to port 8081, on which pod web-1 (10.244.1.7:8081) does not listen"},
	"a closed port": {func(_ *testing.T, f *facts) {
		f.Dials[atPod] = refused
		f.fails(refused)
	}, api.ExitClosedPort, "dial", "nothing listens on port 8080 of pod web-1"},
	"a closed port of a pod's address": {func(_ *testing.T, f *facts) {
		f.Request.URL, _ = url.Parse("http://10.244.1.7:8080/")
		f.Trip.Lookup, f.Trip.To, f.Port, f.Service, f.Slices = trip.Step{}, atPod, 8080, nil, nil
		f.fails(refused)
	}, api.ExitClosedPort, "dial", "nothing listens on port 8080 of pod web-1"},
	"a NetworkPolicy": {func(t *testing.T, f *facts) {
		f.policy(t, `{from: [{podSelector: {}}]}`)
		f.Dials[atPod] = silence
		f.fails(silence)
	}, api.ExitNetworkPolicy, "policy", "NetworkPolicy guard blocks connections from the traffic manager's pod to pod web-1"},
	"a NetworkPolicy for another port": {func(t *testing.T, f *facts) {
		f.policy(t, `{ports: [{port: 9090}]}`)
		f.Dials[atPod] = silence
		f.fails(silence)
	}, api.ExitNetworkPolicy, "policy", "NetworkPolicy guard"},
	"silence": {func(_ *testing.T, f *facts) {
		f.Dials[atPod] = silence
		f.fails(silence)
	}, api.ExitNoAnswer, "dial", "does not answer"},
	"a program that hangs": {func(_ *testing.T, f *facts) {
		f.Trip.Answer, f.Trip.Status = silence, 0
	}, api.ExitNoAnswer, "answer", "sent no answer within 2.0 s"},
	"a header that a hop before removed": {func(_ *testing.T, f *facts) {
		f.intercepted(-1, lost)
	}, api.ExitHeaderLost, "agent", "the agent of pod web-1 changed: header x-user is absent"},
	"a header that the program of this machine removed": {func(_ *testing.T, f *facts) {
		f.intercepted(0, mine)
		f.behind()
	}, api.ExitHeaderLost, "agent", "pod web-1 of deployment/web had it with x-user=me, and gave it to this machine"},
	"a header that a hop before removed, after one with another match": {func(_ *testing.T, f *facts) {
		f.intercepted(0, anns)
		f.behind()
	}, api.ExitHeaderLost, "agent", "pod web-1 of deployment/web had it with x-user=me, and gave it to ann@desk"},
	"the match of another developer": {func(_ *testing.T, f *facts) {
		f.intercepted(1, lost, anns)
	}, api.ExitOtherMatch, "agent", "sends it to ann@desk, whose match is x-user=ann"},
	"a pod without an agent": {func(_ *testing.T, f *facts) {
		i := f.intercepted(-1)
		i.Pods[0].Trace, i.Pods[0].Reason = nil, "forbidden"
	}, api.ExitNoAgent, "agent", "pod web-1: forbidden"},
	"a service mesh": {func(_ *testing.T, f *facts) {
		f.intercepted(-1).Pods[0].Trace.Requests = nil
		f.Pods[0].Spec.Containers = append(f.Pods[0].Spec.Containers, corev1.Container{Name: "istio-proxy"})
	}, api.ExitMesh, "agent", "the service mesh Istio (container istio-proxy) takes it"},
	"a connection that is older than the intercept": {func(_ *testing.T, f *facts) {
		i := f.intercepted(-1)
		i.Workload, i.Pods[0].Pod = "deployment/behind", "behind-1"
		i.Pods[0].Trace = &api.AgentTrace{Older: []netip.AddrPort{netip.AddrPortFrom(atPod.Addr(), 40000)}}
	}, api.ExitOldConnection, "agent", "older than the intercept"},
	"no program on this machine": {func(_ *testing.T, f *facts) {
		f.intercepted(0, mine)
		f.Local["localhost:3000"], f.Trip.Status = refused, 502
	}, api.ExitLocalPort, "program", "nothing listens on port 3000"},
	"a program of this machine that hangs": {func(_ *testing.T, f *facts) {
		f.intercepted(0, mine)
		f.Trip.Answer, f.Trip.Status = silence, 0
	}, api.ExitLocalHang, "program", "the program on port 3000 of this machine"},
}

// plantedInPods are causes for requests that a pod sends.
var plantedInPods = map[string]struct {
	plant func(*testing.T, *facts)
	code  api.ExitCode
	hop   string
	says  string
}{
	"egress that a policy blocks": {func(t *testing.T, f *facts) {
		f.egress(t, `{to: [{podSelector: {}}]}`)
		f.Dials[atPod] = silence
		f.fails(silence)
	}, api.ExitNetworkPolicy, "policy", "NetworkPolicy closed blocks connections from pod other-1 to pod web-1"},
	"egress to the Internet that a policy blocks": {func(t *testing.T, f *facts) {
		f.egress(t, `{to: [{podSelector: {}}]}`)
		outside(f)
		f.fails(silence)
	}, api.ExitNetworkPolicy, "policy", "from pod other-1 to 93.184.216.34:443"},
	"a name that a policy keeps from the pod": {func(t *testing.T, f *facts) {
		f.egress(t, `{to: [{podSelector: {}, namespaceSelector: {}}], ports: [{port: 80}]}`)
		f.Trip = trip.Result{Lookup: silence, Nameservers: []string{"10.96.0.10:53"}}
	}, api.ExitNetworkPolicy, "name", "NetworkPolicy closed does not allow the pod to reach cluster DNS"},
	"a pod with other DNS settings": {func(_ *testing.T, f *facts) {
		f.Source.Spec.DNSPolicy = corev1.DNSDefault
		f.Trip = trip.Result{Lookup: trip.Step{Failure: transport.CodeFailed, Error: "no such host"}, Nameservers: []string{"1.1.1.1:53"}}
	}, api.ExitNameTaken, "name", "1.1.1.1:53 does not resolve web.shop"},
	"no endpoint on the node": {func(_ *testing.T, f *facts) {
		local := corev1.ServiceInternalTrafficPolicyLocal
		f.Service.Spec.InternalTrafficPolicy = &local
		f.fails(silence)
	}, api.ExitNoEndpoint, "balancer", "no ready endpoint on the node node9 of pod other-1"},
	"a mesh that gives no answer": {func(_ *testing.T, f *facts) {
		f.redirected()
		f.Trip.Answer, f.Trip.Status = trip.Step{Failure: transport.CodeFailed, Error: "EOF"}, 0
	}, api.ExitMesh, "route", "port 15001 of the pod itself takes it: the service mesh Istio (container istio-proxy), and gives no answer"},
	"a mesh that answers itself": {func(_ *testing.T, f *facts) {
		f.redirected()
		f.Trip.Status, f.Trip.Header = 503, http.Header{"Server": {"envoy"}}
	}, api.ExitMesh, "route", "and answers 503 itself"},
	"a mesh that takes it before the agent": {func(_ *testing.T, f *facts) {
		f.redirected()
		f.intercepted(-1).Pods[0].Trace.Requests = nil
	}, api.ExitMesh, "agent", "port 15001 of pod other-1, which sent it, takes it before them"},
	"a pod that cannot send it": {func(_ *testing.T, f *facts) {
		f.Trip, f.Unsent = trip.Result{}, api.Errorf(api.ExitPermission, "you may not create pods/exec")
	}, api.ExitPermission, checkSender, "you may not create pods/exec"},
}

// fromPod makes a pod on another node send the request.
func (f *facts) fromPod(t *testing.T) {
	source := decode[corev1.Pod](t, `
{metadata: {name: other-1, namespace: other, labels: {app: other}}, spec: {nodeName: node9}, status: {podIPs: [{ip: 10.244.9.3}]}}`)
	f.Source, f.Pod, f.Trip.Device = &source, &source, "eth0"
	f.Trip.Resolver = []string{"search other.svc.cluster.local", "options ndots:5"}
}

func (f *facts) egress(t *testing.T, rule string) {
	f.Policies = decode[[]networkingv1.NetworkPolicy](t, `
- {metadata: {name: closed, namespace: other}, spec: {podSelector: {}, policyTypes: [Egress], egress: [`+rule+`]}}`)
}

// redirected has a mesh take the request in the pod that sends it.
func (f *facts) redirected() {
	f.Source.Spec.Containers = append(f.Source.Spec.Containers, corev1.Container{Name: "istio-proxy"})
	f.Trip.TakenAt = netip.MustParseAddrPort("127.0.0.1:15001")
}

func TestPlantedCausesInPodsAreNamed(t *testing.T) {
	for name, tt := range plantedInPods {
		t.Run(name, func(t *testing.T) {
			f := healthy(t)
			f.fromPod(t)
			tt.plant(t, f)
			e := explanation(t.Context(), f)
			if f := e.Failed(); f == nil || f.Code != tt.code || f.Name != tt.hop {
				t.Fatalf("got %+v\n%s", f, describe(e))
			}
			if text := describe(e); !strings.Contains(text, tt.says) {
				t.Errorf("nothing says %q:\n%s", tt.says, text)
			}
		})
	}
}

func TestHealthyRequestsOfPodsHaveNoCause(t *testing.T) {
	for name, plant := range map[string]func(*testing.T, *facts){
		"healthy":                          func(*testing.T, *facts) {},
		"a policy that nothing enforces":   func(t *testing.T, f *facts) { f.egress(t, "") },
		"a policy that allows it":          func(t *testing.T, f *facts) { f.egress(t, `{ports: [{port: 8080}]}`) },
		"a mesh that passes it on":         func(_ *testing.T, f *facts) { f.redirected() },
		"the Internet":                     func(_ *testing.T, f *facts) { outside(f) },
		"an intercept that gets it":        func(_ *testing.T, f *facts) { f.intercepted(0, mine) },
		"an error that passes Envoy":       func(_ *testing.T, f *facts) { f.redirected(); f.Trip.Status, f.Trip.Header = 503, passedEnvoy },
		"a short name, by the search path": func(_ *testing.T, f *facts) { f.Request.URL, _ = url.Parse("http://web/") },
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy(t)
			f.fromPod(t)
			plant(t, f)
			if e := explanation(t.Context(), f); e.Failed() != nil || e.Findings[0].Seen != "pod other/other-1" {
				t.Errorf("got\n%s", describe(e))
			}
		})
	}
}

var passedEnvoy = http.Header{"Server": {"envoy"}, "X-Envoy-Upstream-Service-Time": {"3"}}

// intercepted adds an intercept with the match x-user=me, whose agent saw the request.
func (f *facts) intercepted(to int, claims ...api.TracedClaim) *api.InterceptTrace {
	f.Request.Header = http.Header{"X-User": {"me"}}
	f.Traces = []api.InterceptTrace{{
		Namespace: "shop", Workload: "deployment/web",
		Match: httpmatch.Spec{Headers: []httpmatch.Named{{Name: "x-user", Value: "me"}}},
		Ports: []api.PortMap{{Protocol: "tcp", Container: 8080, Local: 3000}},
		Pods: []api.PodTrace{{Pod: "web-1", Trace: &api.AgentTrace{
			Requests: []api.TracedRequest{{Port: 8080, Claims: claims, To: to}}}}},
	}}
	f.Local = map[string]trip.Step{"localhost:3000": ok}
	return &f.Traces[0]
}

// behind adds an intercept of a workload behind the first, whose agent saw the request without the header.
func (f *facts) behind() {
	f.Traces[0].Pods[0].Trace.Requests[0].Fits = []string{"x-user=me"}
	i := f.Traces[0]
	i.Workload = "deployment/behind"
	i.Pods = []api.PodTrace{{Pod: "behind-1", Trace: &api.AgentTrace{
		Requests: []api.TracedRequest{{Port: 8080, Claims: []api.TracedClaim{lost}, To: -1}}}}}
	f.Traces = append(f.Traces, i)
}

var (
	absent = httpmatch.Difference{Part: "header x-user", Want: "me", Absent: true}
	mine   = api.TracedClaim{Owner: "me@laptop", Mine: true, Match: "x-user=me"}
	lost   = api.TracedClaim{Owner: "me@laptop", Mine: true, Match: "x-user=me", Differences: []httpmatch.Difference{absent}}
	anns   = api.TracedClaim{Owner: "ann@desk", Match: "x-user=ann"}
)

func TestPlantedCausesAreNamed(t *testing.T) {
	for name, tt := range planted {
		t.Run(name, func(t *testing.T) {
			f := healthy(t)
			tt.plant(t, f)
			e := explanation(t.Context(), f)
			if f := e.Failed(); f == nil || f.Code != tt.code || f.Name != tt.hop {
				t.Fatalf("got %+v\n%s", f, describe(e))
			}
			if text := describe(e); !strings.Contains(text, tt.says) {
				t.Errorf("nothing says %q:\n%s", tt.says, text)
			}
		})
	}
}

func TestHealthyRequestsHaveNoCause(t *testing.T) {
	for name, plant := range map[string]func(*testing.T, *facts){
		"healthy": func(*testing.T, *facts) {},
		"one pod is not ready": func(t *testing.T, f *facts) {
			f.otherPod(t)
			f.Dials[netip.MustParseAddrPort("10.244.2.7:8080")] = refused
		},
		"a NetworkPolicy that allows the manager": func(t *testing.T, f *facts) {
			f.policy(t, `{from: [{namespaceSelector: {matchLabels: {kubernetes.io/metadata.name: kubevpn}}}], ports: [{port: http}]}`)
		},
		"a NetworkPolicy that nothing enforces": func(t *testing.T, f *facts) { f.policy(t, `{from: [{podSelector: {}}]}`) },
		"a request that arrives":                func(_ *testing.T, f *facts) { f.intercepted(0, mine) },
		"a request for the application":         func(_ *testing.T, f *facts) { f.intercepted(-1, lost); f.Request.Header = nil },
		"an intercept that the request does not pass": func(_ *testing.T, f *facts) {
			i := f.intercepted(-1)
			i.Workload, i.Pods[0].Pod, i.Pods[0].Trace.Requests = "deployment/behind", "behind-1", nil
		},
		"a request of the program for another path": func(_ *testing.T, f *facts) {
			f.intercepted(0, mine)
			f.behind()
			c := &f.Traces[1].Pods[0].Trace.Requests[0].Claims[0]
			c.Differences = append(c.Differences, httpmatch.Difference{Part: "path", Want: "/api", Got: "/"})
		},
		"an agent that tells nothing": func(_ *testing.T, f *facts) {
			i := f.intercepted(-1)
			i.Pods[0].Trace, i.Pods[0].Error = nil, "it is of an older version, which traces no requests"
		},
		"a client of others with an older connection": func(_ *testing.T, f *facts) {
			i := f.intercepted(-1)
			i.Workload, i.Pods[0].Pod = "deployment/behind", "behind-1"
			i.Pods[0].Trace = &api.AgentTrace{Older: []netip.AddrPort{netip.MustParseAddrPort("10.244.9.9:40000")}}
		},
		"an answer that took seconds":           func(_ *testing.T, f *facts) { f.Trip.Answer.Seconds = 4 },
		"an error of the program":               func(_ *testing.T, f *facts) { f.Trip.Status = 503 },
		"an endpoint that ends":                 func(_ *testing.T, f *facts) { *f.Slices[0].Endpoints[0].Conditions.Ready = false },
		"a host outside of the cluster":         func(_ *testing.T, f *facts) { outside(f) },
		"rights that are missing, and no guess": func(_ *testing.T, f *facts) { f.forbid() },
		"the second of the addresses of Service": func(_ *testing.T, f *facts) {
			f.ClusterDNS.Addresses = []netip.Addr{netip.MustParseAddr("fd00::80"), vip.Addr()}
		},
	} {
		t.Run(name, func(t *testing.T) {
			f := healthy(t)
			plant(t, f)
			e := explanation(t.Context(), f)
			if e.Failed() != nil {
				t.Errorf("got\n%s", describe(e))
			}
		})
	}
}

// outside sends the request to the Internet.
func outside(f *facts) {
	f.Request.URL, _ = url.Parse("https://www.example.com/")
	f.Service, f.Slices, f.Pods, f.Certain, f.Dials = nil, nil, nil, false, nil
	f.ClusterDNS.Addresses = nil
	f.Trip.Addresses = []netip.Addr{netip.MustParseAddr("93.184.216.34")}
	f.Trip.To, f.Trip.Device = netip.MustParseAddrPort("93.184.216.34:443"), "eth0"
}

// forbid removes all rights.
func (f *facts) forbid() {
	f.Service, f.Slices, f.Pods, f.Source = nil, nil, nil, nil
	for _, what := range []object{objectServices, objectEndpointSlices, objectPods, objectPolicies, objectManager} {
		f.Missing[what] = "you may not list " + string(what)
	}
}

// A request that takes a shortcut does not reach an agent, nor those that do not match, or come from a pod.
func TestShortcutsAreTold(t *testing.T) {
	for name, tt := range map[string]struct {
		plant func(*facts)
		agent string
	}{
		"matches":     {func(*facts) {}, "it stays on this machine, which intercepts deployment/web"},
		"other":       {func(f *facts) { f.Request.Header = nil }, "no agent of your intercepts saw it"},
		"other-place": {func(f *facts) { f.Trip.To = netip.MustParseAddrPort("10.96.0.99:80") }, "no agent of your intercepts saw it"},
	} {
		f := healthy(t)
		i := f.intercepted(-1)
		i.Pods[0].Trace.Requests = nil
		i.Shortcuts = map[netip.AddrPort]uint16{f.Trip.To: 8080}
		if tt.plant(f); name == "other-place" {
			i.Workload, i.Pods[0].Pod = "deployment/behind", "behind-1"
		}
		if text := describe(explanation(t.Context(), f)); !strings.Contains(text, tt.agent) {
			t.Errorf("%s:\n%s", name, text)
		}
	}
}

func TestWhatMayNotBeReadIsUnknown(t *testing.T) {
	f := healthy(t)
	f.forbid()
	f.fails(silence)
	e := explanation(t.Context(), f)
	if failed := e.Failed(); failed == nil || failed.Code != api.ExitNoAnswer {
		t.Errorf("got %+v", failed)
	}
	for _, h := range e.Findings {
		if h.Name == "balancer" && (h.Verdict != api.VerdictSkipped || h.Seen != "you may not list services") {
			t.Errorf("got %+v", h)
		}
	}
	f = healthy(t)
	f.Missing[objectPolicies] = "you may not list networkpolicies"
	f.Dials[atPod] = silence
	f.fails(silence)
	e = explanation(t.Context(), f)
	if failed := e.Failed(); failed == nil || failed.Code != api.ExitNoAnswer || e.Findings[5].Verdict != api.VerdictSkipped {
		t.Errorf("got\n%s", describe(e))
	}
}

func TestTextOfTheClusterIsCleanAndBounded(t *testing.T) {
	f := healthy(t)
	f.Slices, f.Dials = nil, nil
	f.fails(refused)
	f.Pods[0].Status.Conditions = nil
	f.Pods[0].Status.ContainerStatuses[0].State = corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{
		Reason: "CrashLoopBackOff", Message: "\x1b[31m\n" + strings.Repeat("x", 100_000)}}
	for n := range 100 {
		p := f.Pods[0].DeepCopy()
		p.Name = fmt.Sprintf("web-%d\u202e", n)
		f.Pods = append(f.Pods, *p)
	}
	text := describe(explanation(t.Context(), f))
	if strings.ContainsAny(text, "\x1b\u202e") || len(text) > 10_000 {
		t.Errorf("%d bytes: %q", len(text), text[:min(len(text), 1000)])
	}
}

func TestHostsOfServices(t *testing.T) {
	c := api.Connection{Namespace: "mine", DNS: api.DNSStatus{Domain: "cluster.local", Alias: "prod"}}
	for host, want := range map[string]string{
		"web": "mine/web true", "web.shop": "shop/web false", "web.shop.": "shop/web false", "WEB.shop.svc": "shop/web true",
		"web.shop.svc.cluster.local": "shop/web true", "db-0.db.shop.svc": "shop/db true", "10.96.0.1": "/ false",
		"web.shop.prod": "shop/web false", "web.shop.svc.prod": "shop/web true", "db-0.db.shop.svc.prod": "shop/db true",
		"www.example.com": "/ false", "10-1-2-3.shop.pod.cluster.local": "/ false",
	} {
		namespace, name, certain := serviceOf(host, c)
		if got := fmt.Sprintf("%s/%s %v", namespace, name, certain); got != want {
			t.Errorf("%s: got %s, want %s", host, got, want)
		}
	}
}

func describe(d api.Diagnosis) string {
	var b strings.Builder
	for _, f := range d.Findings {
		fmt.Fprintf(&b, "%s %s: %s%s %q\n", f.Name, f.Verdict, f.Seen, f.Cause, f.Notes)
	}
	return b.String()
}
