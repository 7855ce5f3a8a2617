package why

import (
	"cmp"
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/kubectl/pkg/util/podutils"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/why/trip"
	"kubevpn/internal/kube/netpolicy"
	"kubevpn/internal/kube/workloads"
)

// Bounds of what is shown. Most of it is text of the cluster.
const (
	maxText      = 400 // characters
	maxNotes     = 6   // of a hop
	maxAddresses = 4
)

// facts are the observations about the request of a Config.
type facts struct {
	Config
	Port uint16 // of the request
	Trip trip.Result
	// ClusterDNS is what cluster DNS answers, asked through the tunnel. It is asked only for names that can be the
	// cluster's.
	ClusterDNS trip.Result
	// Namespace and Name are the Service that the host stands for; empty: it cannot be one.
	Namespace, Name string
	Certain         bool // the host is a name of the cluster, whether or not the Service exists

	Service  *corev1.Service // nil: see Missing, or there is none
	Slices   []discoveryv1.EndpointSlice
	Pods     []corev1.Pod // those that the Service selects, or the one whose address was asked
	Policies []networkingv1.NetworkPolicy
	// Source is the pod from which connections to endpoints come: Config.Pod or, without one, the traffic manager's.
	Source *corev1.Pod
	Unsent *api.Error                   // why the request could not be sent from the pod
	Dials  map[netip.AddrPort]trip.Step // to endpoints, from Source
	Traces []api.InterceptTrace         // of this machine's intercepts in the cluster
	Local  map[string]trip.Step         // dials to programs, by api.PortMap.Place
	// Missing tells why objects could not be read: "you may not list pods in the namespace shop".
	Missing map[object]string
}

// object is a kind of objects that facts contain.
type object string

const (
	objectServices       object = "services"
	objectEndpointSlices object = "endpointslices"
	objectPods           object = "pods"
	objectPolicies       object = "networkpolicies"
	objectManager        object = "the pod of the traffic manager"
	objectAgents         object = "agents"
)

// explanation returns the hops of a request and the first cause for its failure.
func explanation(f *facts) api.Explanation {
	j := &judge{facts: f, all: f.endpoints()}
	j.ready = slices.DeleteFunc(slices.Clone(j.all), func(e endpoint) bool { return !e.ready })
	j.add(api.HopName, f.Trip.Lookup.Seconds, j.sent(j.name))
	j.add(api.HopRoute, 0, j.sent(j.route))
	j.add(api.HopBalancer, 0, j.balancer())
	j.add(api.HopPolicy, 0, j.policy())
	j.add(api.HopDial, f.Trip.Dial.Seconds, j.sent(j.dial))
	j.add(api.HopAgent, 0, j.agent())
	j.add(api.HopProgram, 0, j.program())
	j.add(api.HopAnswer, f.Trip.Answer.Seconds, j.sent(j.answer))
	if f.Unsent != nil {
		j.cause = f.Unsent
	}
	e := api.Explanation{
		TypeMeta: api.Type(api.KindExplanation), Method: f.Request.Method, URL: f.Request.URL.Redacted(),
		From: "this machine", Trace: f.Request.Header.Get(api.TraceHeader), Status: f.Trip.Status, Hops: j.hops,
	}
	if j.Pod != nil {
		e.From = "pod " + j.Source.Namespace + "/" + j.Source.Name
	}
	if j.cause != nil {
		e.Error = &api.Error{Code: j.cause.Code, Message: bounded(j.cause.Message), Hint: api.Clean(j.cause.Hint)}
	}
	return e
}

type judge struct {
	*facts
	all, ready []endpoint
	landed     *landing // what the agents saw; nil: nothing
	hops       []api.Hop
	cause      *api.Error // the first one
}

// finding is what a method of judge finds about its hop.
type finding struct {
	api.Hop
	cause *api.Error // with HopFailed
}

func (f finding) with(notes ...string) finding {
	f.Notes = append(f.Notes, notes...)
	return f
}

func found(verdict api.HopVerdict, format string, args ...any) finding {
	return finding{Hop: api.Hop{Verdict: verdict, Seen: fmt.Sprintf(format, args...)}}
}

// failed returns a finding with a cause, whose message it shows.
func failed(code api.ExitCode, format string, args ...any) finding {
	e := api.Errorf(code, format, args...)
	return finding{api.Hop{Verdict: api.HopFailed, Seen: e.Message}, e}
}

func (f finding) hint(format string, args ...any) finding {
	f.cause = f.cause.WithHint(format, args...)
	return f
}

// add adds a hop. Only the first failure is the cause: later ones may follow from it.
func (j *judge) add(name string, seconds float64, f finding) {
	h := f.Hop
	if h.Verdict == api.HopFailed && j.cause != nil {
		h.Verdict = api.HopNote
	}
	j.cause = cmp.Or(j.cause, f.cause)
	h.Name, h.Seconds, h.Seen = name, seconds, bounded(h.Seen)
	h.Notes = api.Texts(f.Notes[:min(len(f.Notes), maxNotes)], bounded)
	if left := len(f.Notes) - maxNotes; left > 0 {
		h.Notes = append(h.Notes, fmt.Sprintf("and %d more", left))
	}
	j.hops = append(j.hops, h)
}

// sent judges a hop that only the request itself shows. It is unknown if the request could not be sent.
func (j *judge) sent(hop func() finding) finding {
	if j.Unsent != nil {
		return found(api.HopUnknown, "the request was not sent")
	}
	return hop()
}

// source names the pod from which connections to endpoints come.
func (j *judge) source() string {
	if j.Pod != nil {
		return "pod " + j.Source.Name
	}
	return "the traffic manager's pod"
}

// bounded makes text of the cluster one short line.
func bounded(s string) string {
	r := []rune(api.CleanLine(s))
	if len(r) > maxText {
		return string(r[:maxText]) + "..."
	}
	return string(r)
}

// answered reports whether the request was answered, so that nothing on its way blocks it.
func (j *judge) answered() bool { return j.Trip.Answer.Done }

func (j *judge) name() finding {
	host, t := j.Request.URL.Hostname(), j.Trip
	if !t.Lookup.Tried() {
		return found(api.HopSkipped, "%s is an address", host)
	}
	who, want, policies := "this machine's resolver", j.ClusterDNS.Addresses, j.blockingDNS()
	switch {
	case len(t.Nameservers) > 0:
		who = "the nameserver " + t.Nameservers[len(t.Nameservers)-1]
	case t.Lookup.Done && j.Pod != nil:
		who = "/etc/hosts of the pod"
	case t.Lookup.Done:
		who = "/etc/hosts or the system"
	}
	switch {
	case t.Lookup.Done:
	case t.Lookup.Failure == trip.TimedOut && j.ClusterDNS.Lookup.Done && len(policies) > 0:
		return failed(api.ExitNetworkPolicy, "%s does not answer pod %s, and NetworkPolicy %s does not allow the pod "+
			"to reach cluster DNS", who, j.Source.Name, api.Join(policies)).
			hint("Allow its egress to UDP and TCP port 53 of cluster DNS.")
	case len(want) == 0 && j.Certain && j.Service == nil && j.Missing[objectServices] == "":
		return failed(api.ExitNameMissing, "there is no Service %s in the namespace %s", j.Name, j.Namespace).
			hint("`kubectl -n %s get services` lists what there is.", api.ShellQuote(j.Namespace))
	case j.ClusterDNS.Lookup.Failure == trip.TimedOut:
		return failed(api.ExitNameMissing, "cluster DNS does not answer for %s", host).
			hint("`kubectl -n kube-system get pods -l k8s-app=kube-dns` shows its pods; `kubevpn status -o wide` " +
				"shows\nthe checks of the connection.")
	case j.Pod == nil && slices.ContainsFunc(j.Connection.DNS.Hosts, func(h api.Host) bool {
		return !h.Routed && slices.Contains(want, h.Address)
	}):
		return failed(api.ExitRouteTaken, "%s leads to %s, which is not routed into the cluster", host,
			api.Some(want, maxAddresses)).
			hint("`kubevpn status` shows why. With `kubevpn connect --exclude-cidr` this machine reaches it by itself.")
	case len(want) > 0:
		return j.taken("%s does not resolve %s (%s), and the cluster has %s", who, host, t.Lookup.Error,
			api.Some(want, maxAddresses))
	default:
		return failed(api.ExitNameMissing, "%s does not resolve %s: %s", who, host, t.Lookup.Error).
			hint("For a Service, write NAME.NAMESPACE. `kubevpn status` shows the domains that go to cluster DNS.")
	}
	if len(want) > 0 && !slices.ContainsFunc(t.Addresses, func(a netip.Addr) bool { return slices.Contains(want, a) }) {
		return j.taken("%s says that %s is %s, and the cluster has %s", who, host,
			api.Some(t.Addresses, maxAddresses), api.Some(want, maxAddresses))
	}
	return found(api.HopOK, "%s: %s, by %s", host, api.Some(t.Addresses, maxAddresses), who).with(t.Resolver...)
}

// taken is the finding that another resolver answers for a name.
func (j *judge) taken(format string, args ...any) finding {
	f := failed(api.ExitNameTaken, format, args...)
	if j.Pod != nil {
		return f.with(j.Trip.Resolver...).
			hint("The pod has other DNS settings than the cluster's: dnsPolicy %s, dnsConfig or hostAliases of its "+
				"specification.", cmp.Or(string(j.Source.Spec.DNSPolicy), "unknown"))
	}
	return f.hint("Another VPN, a local resolver or a hosts file answers for this name before kubevpn does (%s).\n"+
		"Remove the name there, or use the Service's address.", cmp.Or(j.Connection.DNS.Mode, "unknown"))
}

func (j *judge) route() finding {
	t, c := j.Trip, j.Connection
	to, device := t.To.Addr(), cmp.Or(j.Trip.Device, "no interface")
	switch {
	case !to.IsValid():
		return found(api.HopSkipped, "no address")
	case t.TakenAt.IsValid() && j.Pod != nil:
		return j.redirected()
	case j.Pod != nil:
		return found(api.HopOK, "%v leaves the pod by %s", to, device)
	case c.Status == api.StatusReconnecting:
		return failed(api.ExitLost, "the connection to the cluster is interrupted: kubevpn reconnects").
			hint("`kubevpn status` shows the cause.")
	case c.Device == "":
		return found(api.HopUnknown, "the connection has no device on this machine")
	case t.Device == c.Device:
		return found(api.HopOK, "%v goes to %s", to, t.Device)
	case slices.ContainsFunc(c.CIDRs, func(p netip.Prefix) bool { return p.Contains(to) }):
		return failed(api.ExitRouteTaken, "%v goes to %s, not to %s: another VPN or route has taken it", to, device,
			c.Device).
			hint("`ip route get %v` shows the route. Stop the other VPN, or keep the network out of it.", to)
	case slices.Contains(j.ClusterDNS.Addresses, to), j.Service != nil, len(j.all) > 0:
		return failed(api.ExitRouteTaken, "%v goes to %s: none of the networks of the tunnel contains it", to, device).
			hint("`kubevpn status -o wide` says why a network is missing; `kubevpn connect --extra-cidr` adds one.")
	}
	return found(api.HopNote, "%v goes to %s: it is no address of the cluster", to, device)
}

// redirected is the finding for a request that a redirect of its own pod has taken.
func (j *judge) redirected() finding {
	seen := fmt.Sprintf("port %d of the pod itself takes it", j.Trip.TakenAt.Port())
	mesh, container := meshOf(j.Source)
	if mesh != "" {
		seen += ": " + mesh
	}
	switch {
	case !j.answered():
		return failed(api.ExitMesh, "%s, and gives no answer", seen).
			hint("The request never left the pod as it was sent. The log tells why: `kubectl -n %s logs %s -c %s`.",
				api.ShellQuote(j.Source.Namespace), api.ShellQuote(j.Source.Name),
				api.ShellQuote(cmp.Or(container, "CONTAINER")))
	case j.answeredByMesh():
		return failed(api.ExitMesh, "%s, and answers %d itself", seen, j.Trip.Status).
			with("the answer begins: "+j.Trip.Body).
			hint("The mesh has no route to the Service, or a policy of the mesh forbids it: see its resources for %s.",
				api.Clean(j.Request.URL.Hostname()))
	}
	return found(api.HopNote, "%s, and passes it on", seen)
}

// meshOf describes the service mesh of a pod, or returns "". The container is empty if a program of the node takes the
// pod's connections.
func meshOf(p *corev1.Pod) (text, container string) {
	mesh, container := workloads.Mesh(p)
	switch {
	case mesh == "":
		return "", ""
	case container == "":
		return "the service mesh " + mesh + " (on the node)", ""
	}
	return fmt.Sprintf("the service mesh %s (container %s)", mesh, container), container
}

// answeredByMesh reports whether a mesh's proxy made the answer: Envoy notes the time of an upstream that answered,
// and Linkerd notes its own errors.
func (j *judge) answeredByMesh() bool {
	h := j.Trip.Header
	byEnvoy := strings.Contains(h.Get("Server"), "envoy") && h.Get("X-Envoy-Upstream-Service-Time") == ""
	return j.Trip.Status >= http.StatusBadRequest && (byEnvoy || h.Get("L5d-Proxy-Error") != "")
}

func (j *judge) balancer() finding {
	s := j.Service
	if s == nil {
		return j.noService()
	}
	what := "service/" + s.Name
	port := servicePort(s, j.Port)
	switch {
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return found(api.HopSkipped, "%s is an alias of %s", what, s.Spec.ExternalName)
	case port == nil && !isHeadless(s):
		return failed(api.ExitNoPort, "%s has no TCP port %d; it has %s", what, j.Port, describePorts(s)).
			hint("Add the port to the URL: %s://%s:PORT/", j.Request.URL.Scheme, api.Clean(j.Request.URL.Hostname()))
	case j.Missing[objectEndpointSlices] != "":
		return found(api.HopUnknown, "%s: %s", what, j.Missing[objectEndpointSlices])
	}
	if f := j.noEndpoint(what, port); f.Verdict != "" {
		return f
	}
	if port != nil && !isHeadless(s) {
		what += fmt.Sprintf(" port %d → %v", j.Port, &port.TargetPort)
	}
	f := found(api.HopOK, "%s: %d of %d endpoints are ready", what, len(j.ready), len(j.all)).with(j.choice(s))
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		f = f.with("sessionAffinity ClientIP: all requests of a client go to the same endpoint")
	}
	return f.with(j.unready()...)
}

// noService is the balancer's finding without a Service.
func (j *judge) noService() finding {
	switch {
	case j.Missing[objectServices] != "":
		return found(api.HopUnknown, "%s", j.Missing[objectServices])
	case len(j.all) == 1:
		return found(api.HopOK, "no Service: the address of %v", j.all[0]).with(j.unready()...)
	}
	return found(api.HopSkipped, "the host is no Service of the cluster")
}

// noEndpoint returns the finding for a Service without an endpoint for the port, or none.
func (j *judge) noEndpoint(what string, port *corev1.ServicePort) (f finding) {
	serving := slices.ContainsFunc(j.all, func(e endpoint) bool { return e.serving })
	local := ptr.Deref(j.Service.Spec.InternalTrafficPolicy, "") == corev1.ServiceInternalTrafficPolicyLocal &&
		!isHeadless(j.Service)
	here := func(e endpoint) bool { return j.Source != nil && e.node == j.Source.Spec.NodeName }
	switch {
	case len(j.ready) > 0 && local && j.Source != nil && !slices.ContainsFunc(j.ready, here):
		f = failed(api.ExitNoEndpoint, "%s has internalTrafficPolicy Local, and no ready endpoint on the node %s of %s",
			what, j.Source.Spec.NodeName, j.source()).
			hint("Only pods on nodes with an endpoint reach it. Use the address of a pod, or the policy Cluster.")
	case len(j.ready) > 0, serving:
		return f
	case len(j.all) == 0 && port != nil && slices.ContainsFunc(j.Pods, isReady):
		f = failed(api.ExitTargetPort, "%s port %d has the targetPort %q, and no pod has a port of that name; they "+
			"declare %s", what, j.Port, port.TargetPort.String(), listPorts(declared(&j.Pods[0]))).
			hint("Change targetPort of the Service, or name the port of the container so.")
	case len(j.all)+len(j.Pods) > 0:
		f = failed(api.ExitNoEndpoint, "no endpoint of %s is ready", what).
			hint("`kubectl -n %s describe pods` shows the cause.", api.ShellQuote(j.Namespace))
	case j.Missing[objectPods] != "":
		f = failed(api.ExitNoEndpoint, "%s has no endpoint", what).with(j.Missing[objectPods])
	default:
		f = failed(api.ExitNoEndpoint, "%s has no endpoint: no pod has the labels %s", what,
			labels.FormatLabels(j.Service.Spec.Selector)).
			hint("`kubectl -n %s get pods --show-labels` shows the labels.", api.ShellQuote(j.Namespace))
	}
	if j.answered() { // the endpoint came or went in the meantime
		f.Verdict, f.cause = api.HopNote, nil
	}
	return f.with(j.unready()...)
}

func isReady(p corev1.Pod) bool {
	return p.DeletionTimestamp == nil && podutils.IsPodReady(&p)
}

// choice names the component that chooses among the endpoints.
func (j *judge) choice(s *corev1.Service) string {
	switch {
	case isHeadless(s):
		return "headless: cluster DNS gives the addresses of the pods"
	case j.Pod != nil && j.Trip.TakenAt.IsValid():
		return "the redirect of the pod chooses"
	case j.Pod != nil && j.Connection.ProxyMode == "none":
		return "the network plugin chooses, on the node " + j.Source.Spec.NodeName
	case j.Pod != nil:
		return "kube-proxy chooses, on the node " + j.Source.Spec.NodeName
	case j.Connection.Netstack == api.NetstackSystem:
		return "kube-proxy (" + j.Connection.ProxyMode + ") chooses, on the node of the traffic manager"
	case len(j.ready) == 1:
		return "the traffic manager sends to " + j.ready[0].String() + ", the only one"
	}
	setting := api.Find(j.Connection.Settings, func(s api.Setting) bool { return s.Key == "scheduler" })
	return "the traffic manager chooses one (" + cmp.Or(setting, &api.Setting{Value: "rr"}).Value + ")"
}

// unready tells why pods of the Service are not ready.
func (j *judge) unready() (notes []string) {
	for n := range j.Pods {
		if p := &j.Pods[n]; !isReady(*p) {
			notes = append(notes, fmt.Sprintf("pod %s is not ready: %s", p.Name, unready(p)))
		}
	}
	return notes
}

func (j *judge) policy() finding {
	targets := j.all
	if len(targets) == 0 && j.Pod != nil && j.Service == nil && j.Trip.To.IsValid() {
		targets = []endpoint{{to: j.Trip.To}} // outside of the cluster
	}
	switch missing := cmp.Or(j.Missing[objectPolicies], j.Missing[objectManager], j.Missing[objectPods]); {
	case len(targets) == 0 && cmp.Or(j.Missing[objectServices], j.Missing[objectEndpointSlices]) != "":
		return found(api.HopUnknown, "%s", cmp.Or(j.Missing[objectServices], j.Missing[objectEndpointSlices]))
	case len(targets) == 0:
		return found(api.HopSkipped, "no endpoint")
	case missing != "":
		return found(api.HopUnknown, "%s", missing)
	case j.Source == nil:
		return found(api.HopUnknown, "the pod of the traffic manager was not found")
	}
	blocked, text := j.blocked(targets)
	silent := slices.ContainsFunc(blocked, func(e endpoint) bool { // connections to it got no answer
		s := cmp.Or(j.Dials[e.to], j.Trip.Dial)
		return s.Failure == trip.TimedOut || s.Failure == trip.Unreachable
	})
	switch {
	case len(blocked) == 0 && len(j.Policies) == 0:
		return found(api.HopOK, "there is no NetworkPolicy")
	case len(blocked) == 0:
		return found(api.HopOK, "NetworkPolicies allow %s to connect", j.source())
	case silent && !j.answered():
		f := failed(api.ExitNetworkPolicy, "NetworkPolicy %s blocks connections from %s to %v", text, j.source(),
			blocked[0]).with("connections to it got no answer")
		if j.Pod != nil {
			return f.hint("The policies of the pod's namespace %s must allow its egress to it, and those of the other "+
				"pod its\ningress.", api.Clean(j.Source.Namespace))
		}
		return f.hint("Allow them in a NetworkPolicy: from pods labelled app.kubernetes.io/name=kubevpn in the "+
			"namespace %s.", api.Clean(j.Source.Namespace))
	}
	return found(api.HopNote, "NetworkPolicy %s does not allow %s, and the pods answer it: "+
		"the network plugin does not enforce the policy, or another rule allows it", text, j.source())
}

// blocked returns the targets that policies block, and the names of the policies.
func (j *judge) blocked(targets []endpoint) (blocked []endpoint, names string) {
	var all []string
	for _, e := range targets {
		// Without a pod it is unreadable, or an address that somebody wrote into an EndpointSlice.
		if e.pod == nil && len(j.all) > 0 || e.pod != nil && e.pod.Spec.HostNetwork {
			continue
		}
		if by := j.flowTo(e).Blocking(j.Policies); len(by) > 0 {
			blocked, all = append(blocked, e), append(all, by...)
		}
	}
	slices.Sort(all)
	return blocked, api.Join(slices.Compact(all))
}

// blockingDNS returns the policies that do not let the pod reach cluster DNS, as kubeadm labels it.
func (j *judge) blockingDNS() []string {
	if j.Pod == nil {
		return nil
	}
	return netpolicy.Flow{
		From:     netpolicy.PodOf(j.Source),
		To:       netpolicy.Pod{Namespace: "kube-system", Labels: map[string]string{"k8s-app": "kube-dns"}},
		Protocol: corev1.ProtocolUDP, Port: 53, PortName: "dns",
	}.Blocking(j.Policies)
}

func (j *judge) flowTo(e endpoint) netpolicy.Flow {
	f := netpolicy.Flow{From: netpolicy.PodOf(j.Source), To: netpolicy.PodOf(e.pod),
		ToIP: e.to.Addr(), Port: e.to.Port()}
	for _, ip := range j.Source.Status.PodIPs {
		if a, err := netip.ParseAddr(ip.IP); err == nil && a.Is4() == f.ToIP.Is4() {
			f.FromIP = a
		}
	}
	for _, p := range declared(e.pod) {
		if p.ContainerPort == int32(f.Port) {
			f.PortName = p.Name
		}
	}
	return f
}

func (j *judge) dial() finding {
	t := j.Trip
	f := found(api.HopOK, "connected to %v", t.To)
	refusing := api.Find(j.all, func(e endpoint) bool { return j.Dials[e.to].Failure == trip.Refused || e.to == t.To })
	switch {
	case !t.Dial.Tried():
		return found(api.HopSkipped, "no address")
	case t.Dial.Done:
	case t.Dial.Failure == trip.Refused && refusing != nil:
		f = j.closedPort(*refusing)
	case t.Dial.Failure == trip.TimedOut:
		f = failed(api.ExitNoAnswer, "%v does not answer: no connection within %.0f s", t.To, t.Dial.Seconds).
			hint("Something drops the packets: a NetworkPolicy of the network plugin, a firewall on the node, or a " +
				"pod that\nhangs. `kubevpn status -o wide` shows whether other pods answer.")
	case t.Dial.Failure == trip.Unreachable && j.Pod == nil && j.Connection.Limited:
		f = failed(api.ExitPermission,
			"the traffic manager does not connect to %v: its admin limits what laptops reach", t.To).
			with("Services are " + j.Connection.Services).
			hint("Ask an admin for the right to forward ports of the pod, or to allow its namespace. Pods without a " +
				"Service,\nand endpoints that are no pods, are not reached.")
	default:
		f = failed(api.ExitNoAnswer, "cannot connect to %v: %s", t.To, t.Dial.Error).
			hint("`kubevpn logs` has the details. Compare with a request from elsewhere, with or without --from.")
	}
	for _, e := range j.all {
		if s := j.Dials[e.to]; s.Failure != "" {
			f = f.with(fmt.Sprintf("%v: %s", e, s.Error))
		}
	}
	return f
}

// closedPort is the finding for an endpoint that refuses connections.
func (j *judge) closedPort(e endpoint) finding {
	ports, number := declared(e.pod), int32(e.to.Port())
	declares := slices.ContainsFunc(ports, func(p corev1.ContainerPort) bool { return p.ContainerPort == number })
	accepts := slices.ContainsFunc(ports, func(p corev1.ContainerPort) bool {
		return j.Dials[netip.AddrPortFrom(e.to.Addr(), uint16(p.ContainerPort))].Done
	})
	if j.Service != nil && !isHeadless(j.Service) && !declares && accepts {
		return failed(api.ExitTargetPort, "service/%s sends to port %d, on which %v does not listen; its containers "+
			"declare %s", j.Service.Name, number, e, listPorts(ports)).
			hint("Change targetPort of the Service.")
	}
	return failed(api.ExitClosedPort, "nothing listens on port %d of %v", number, e).
		hint("The program of the pod may not have started, listen on another port, or on 127.0.0.1 only:\n"+
			"`kubectl -n %s logs %s` shows its log.", api.ShellQuote(j.Namespace), api.ShellQuote(e.name))
}

func (j *judge) answer() finding {
	t := j.Trip
	status := fmt.Sprintf("%d %s", t.Status, http.StatusText(t.Status))
	switch {
	case !t.Answer.Tried():
		return found(api.HopSkipped, "no connection")
	case t.Answer.Done && t.Status >= http.StatusInternalServerError:
		return found(api.HopNote, "%s", status).with("the answer begins: " + t.Body)
	case t.Answer.Done:
		return found(api.HopOK, "%s", status)
	case t.Answer.Failure == trip.TimedOut:
		return failed(api.ExitNoAnswer, "something accepted the connection, and sent no answer within %.1f s",
			t.Answer.Seconds).
			hint("The program may hang or be slow: --timeout waits for longer.")
	}
	return failed(api.ExitNoAnswer, "the connection ended without an answer: %s", t.Answer.Error).
		hint("The port may not serve %s: try another scheme or port.", strings.ToUpper(j.Request.URL.Scheme))
}
