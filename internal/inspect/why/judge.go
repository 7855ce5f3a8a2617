package why

import (
	"cmp"
	"context"
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
	"kubevpn/internal/inspect/check"
	"kubevpn/internal/inspect/doctor"
	"kubevpn/internal/inspect/why/trip"
	"kubevpn/internal/kube/netpolicy"
	"kubevpn/internal/kube/workloads"
)

// Bounds of the lists that are shown.
const maxAddresses, maxDifferences = 4, 6

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

// The check of a request that the others need.
const checkSender = "sender"

// explanation checks each hop of a request, in the order in which the request passes them.
func explanation(ctx context.Context, f *facts) api.Diagnosis {
	j := &judge{facts: f, all: f.endpoints(), landed: f.land()}
	j.ready = slices.DeleteFunc(slices.Clone(j.all), func(e endpoint) bool { return !e.ready })
	section := f.Request.Method + " " + f.Request.URL.Redacted()
	list := []check.Check[*judge]{check.New(section, checkSender, "", sender)}
	for _, hop := range []struct {
		name    string
		needs   string
		seconds float64 // 0: nobody waited for it
		judge   func(*judge) api.Finding
	}{
		{"connection", checkSender, 0, (*judge).connection},
		{"name", checkSender, f.Trip.Lookup.Seconds, (*judge).name},
		{"route", checkSender, 0, (*judge).route},
		{"balancer", "", 0, (*judge).balancer},
		{"policy", "", 0, (*judge).policy},
		{"dial", checkSender, f.Trip.Dial.Seconds, (*judge).dial},
		{"agent", checkSender, 0, (*judge).agent},
		{"program", checkSender, 0, (*judge).program},
		{"answer", checkSender, f.Trip.Answer.Seconds, (*judge).answer},
	} {
		list = append(list, check.New(section, hop.name, hop.needs, func(_ context.Context, j *judge) api.Finding {
			found := hop.judge(j)
			found.Seconds = hop.seconds
			return found
		}))
	}
	d := api.Diagnosis{TypeMeta: api.Type(api.KindDiagnosis), Findings: check.Run(ctx, j, list, nil),
		Trace: f.Request.Header.Get(api.TraceHeader), Status: f.Trip.Status}
	for n, found := range d.Findings { // what fails later may follow from the first failure
		if first := d.Failed(); found.Verdict == api.VerdictFailed && first != &d.Findings[n] {
			d.Findings[n] = found.AsWarning()
		}
	}
	return d
}

// judge finds out what a hop did to the request.
type judge struct {
	*facts
	all, ready []endpoint
	landed     *landing // what the agents saw; nil: nothing
}

// sender checks whether the request was sent.
func sender(_ context.Context, j *judge) api.Finding {
	switch e := j.Unsent; {
	case e != nil:
		return check.Failed(e.Code, "%s", e.Message).WithFix("%s", e.Hint)
	case j.Pod != nil:
		return check.OK("pod %s/%s", j.Source.Namespace, j.Source.Name)
	}
	return check.OK("this machine")
}

// connection reports what is wrong with the connection to the cluster, as `kubevpn doctor` does.
func (j *judge) connection() api.Finding {
	found := doctor.OfConnection(j.Connection)
	switch {
	case j.Pod != nil && found.Verdict == api.VerdictFailed: // its requests do not pass the connection
		return found.AsWarning()
	case j.Pod == nil && j.Connection.Status == api.StatusReconnecting:
		return check.Failed(api.ExitLost, "the connection to the cluster is interrupted: kubevpn reconnects").
			WithFix("`kubevpn status` shows the cause.")
	}
	return found
}

// source names the pod from which connections to endpoints come.
func (j *judge) source() string {
	if j.Pod != nil {
		return "pod " + j.Source.Name
	}
	return "the traffic manager's pod"
}

// answered reports whether the request was answered, so that nothing on its way blocks it.
func (j *judge) answered() bool { return j.Trip.Answer.Done }

func (j *judge) name() api.Finding {
	host, t := j.Request.URL.Hostname(), j.Trip
	if !t.Lookup.Tried() {
		return check.Skipped("%s is an address", host)
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
	case t.Lookup.TimedOut() && j.ClusterDNS.Lookup.Done && len(policies) > 0:
		return check.Failed(api.ExitNetworkPolicy, "%s does not answer pod %s, and NetworkPolicy %s does not allow "+
			"the pod to reach cluster DNS", who, j.Source.Name, api.Join(policies)).
			WithFix("Allow its egress to UDP and TCP port 53 of cluster DNS.")
	case len(want) == 0 && j.Certain && j.Service == nil && j.Missing[objectServices] == "":
		return check.Failed(api.ExitNameMissing, "there is no Service %s in the namespace %s", j.Name, j.Namespace).
			WithFix("`kubectl -n %s get services` lists what there is.", api.ShellQuote(j.Namespace))
	case j.ClusterDNS.Lookup.TimedOut():
		return check.Failed(api.ExitNameMissing, "cluster DNS does not answer for %s", host).
			WithFix("`kubectl -n kube-system get pods -l k8s-app=kube-dns` shows its pods; `kubevpn status -o wide` " +
				"shows\nthe checks of the connection.")
	case j.Pod == nil && slices.ContainsFunc(j.Connection.DNS.Hosts, func(h api.Host) bool {
		return !h.Routed && slices.Contains(want, h.Address)
	}):
		return check.Failed(api.ExitRouteTaken, "%s leads to %s, which is not routed into the cluster", host,
			api.Some(want, maxAddresses)).
			WithFix("`kubevpn status` shows why. With `kubevpn connect --exclude-cidr` this machine reaches it by " +
				"itself.")
	case len(want) > 0:
		return j.taken("%s does not resolve %s (%s), and the cluster has %s", who, host, t.Lookup.Error,
			api.Some(want, maxAddresses))
	default:
		return check.Failed(api.ExitNameMissing, "%s does not resolve %s: %s", who, host, t.Lookup.Error).
			WithFix("For a Service, write NAME.NAMESPACE. `kubevpn status` shows the domains that go to cluster DNS.")
	}
	if len(want) > 0 && !slices.ContainsFunc(t.Addresses, func(a netip.Addr) bool { return slices.Contains(want, a) }) {
		return j.taken("%s says that %s is %s, and the cluster has %s", who, host,
			api.Some(t.Addresses, maxAddresses), api.Some(want, maxAddresses))
	}
	return check.OK("%s: %s, by %s", host, api.Some(t.Addresses, maxAddresses), who).WithNotes(t.Resolver...)
}

// taken is the finding that another resolver answers for a name.
func (j *judge) taken(format string, args ...any) api.Finding {
	f := check.Failed(api.ExitNameTaken, format, args...)
	if j.Pod != nil {
		return f.WithNotes(j.Trip.Resolver...).
			WithFix("The pod has other DNS settings than the cluster's: dnsPolicy %s, dnsConfig or hostAliases of its "+
				"specification.", cmp.Or(string(j.Source.Spec.DNSPolicy), "unknown"))
	}
	return f.WithFix("Another VPN, a local resolver or a hosts file answers for this name before kubevpn does (%s).\n"+
		"Remove the name there, or use the Service's address.", cmp.Or(j.Connection.DNS.Mode, "unknown"))
}

func (j *judge) route() api.Finding {
	t, c := j.Trip, j.Connection
	to, device := t.To.Addr(), cmp.Or(j.Trip.Device, "no interface")
	here := c.Mappings.ToLocal(to)
	switch {
	case !to.IsValid():
		return check.Skipped("no address")
	case t.TakenAt.IsValid() && j.Pod != nil:
		return j.redirected()
	case j.Pod != nil:
		return check.OK("%v leaves the pod by %s", to, device)
	case c.Device == "":
		return check.Skipped("the connection has no device on this machine")
	case t.Device == c.Device && here != to:
		return check.OK("%v of the cluster is %v on this machine, and goes to %s", to, here, t.Device)
	case t.Device == c.Device:
		return check.OK("%v goes to %s", to, t.Device)
	case here != to:
		return check.Failed(api.ExitRouteTaken, "%v goes to %s: %[1]v of the cluster is %v on this machine, where "+
			"something else has that network", to, device, here).
			WithFix("Use a name, or %v. `kubevpn status` lists what is mapped.", here)
	case slices.ContainsFunc(c.CIDRs, func(p netip.Prefix) bool { return p.Contains(to) }):
		return check.Failed(api.ExitRouteTaken, "%v goes to %s, not to %s: another VPN or route has taken it", to,
			device, c.Device).
			WithFix("`ip route get %v` shows the route. Stop the other VPN, or keep the network out of it.", to)
	case slices.Contains(j.ClusterDNS.Addresses, to), j.Service != nil, len(j.all) > 0:
		return check.Failed(api.ExitRouteTaken, "%v goes to %s: none of the networks of the tunnel contains it", to,
			device).
			WithFix("`kubevpn status -o wide` says why a network is missing; `kubevpn connect --extra-cidr` adds one.")
	}
	return check.Warning("%v goes to %s: it is no address of the cluster", to, device)
}

// redirected is the finding for a request that a redirect of its own pod has taken.
func (j *judge) redirected() api.Finding {
	seen := fmt.Sprintf("port %d of the pod itself takes it", j.Trip.TakenAt.Port())
	mesh, container := meshOf(j.Source)
	if mesh != "" {
		seen += ": " + mesh
	}
	switch {
	case !j.answered():
		return check.Failed(api.ExitMesh, "%s, and gives no answer", seen).
			WithFix("The request never left the pod as it was sent. The log tells why: `kubectl -n %s logs %s -c %s`.",
				api.ShellQuote(j.Source.Namespace), api.ShellQuote(j.Source.Name),
				api.ShellQuote(cmp.Or(container, "CONTAINER")))
	case j.answeredByMesh():
		return check.Failed(api.ExitMesh, "%s, and answers %d itself", seen, j.Trip.Status).
			WithNotes("the answer begins: "+j.Trip.Body).
			WithFix("The mesh has no route to the Service, or a policy of the mesh forbids it: see its resources for "+
				"%s.", api.Clean(j.Request.URL.Hostname()))
	}
	return check.Warning("%s, and passes it on", seen)
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

func (j *judge) balancer() api.Finding {
	s := j.Service
	if s == nil {
		return j.noService()
	}
	what := "service/" + s.Name
	port := servicePort(s, j.Port)
	switch {
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return check.Skipped("%s is an alias of %s", what, s.Spec.ExternalName)
	case port == nil && !isHeadless(s):
		return check.Failed(api.ExitNoPort, "%s has no TCP port %d; it has %s", what, j.Port, describePorts(s)).
			WithFix("Add the port to the URL: %s://%s:PORT/", j.Request.URL.Scheme, api.Clean(j.Request.URL.Hostname()))
	case j.Missing[objectEndpointSlices] != "":
		return check.Skipped("%s: %s", what, j.Missing[objectEndpointSlices])
	}
	if f := j.noEndpoint(what, port); f.Verdict != "" {
		return f
	}
	if port != nil && !isHeadless(s) {
		what += fmt.Sprintf(" port %d → %v", j.Port, &port.TargetPort)
	}
	f := check.OK("%s: %d of %d endpoints are ready", what, len(j.ready), len(j.all)).WithNotes(j.choice(s))
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		f = f.WithNotes("sessionAffinity ClientIP: all requests of a client go to the same endpoint")
	}
	return f.WithNotes(j.unready()...)
}

// noService is the balancer's finding without a Service.
func (j *judge) noService() api.Finding {
	switch {
	case j.Missing[objectServices] != "":
		return check.Skipped("%s", j.Missing[objectServices])
	case len(j.all) == 1:
		return check.OK("no Service: the address of %v", j.all[0]).WithNotes(j.unready()...)
	}
	return check.Skipped("the host is no Service of the cluster")
}

// noEndpoint returns the finding for a Service without an endpoint for the port, or none.
func (j *judge) noEndpoint(what string, port *corev1.ServicePort) (f api.Finding) {
	serving := slices.ContainsFunc(j.all, func(e endpoint) bool { return e.serving })
	local := ptr.Deref(j.Service.Spec.InternalTrafficPolicy, "") == corev1.ServiceInternalTrafficPolicyLocal &&
		!isHeadless(j.Service)
	here := func(e endpoint) bool { return j.Source != nil && e.node == j.Source.Spec.NodeName }
	switch {
	case len(j.ready) > 0 && local && j.Source != nil && !slices.ContainsFunc(j.ready, here):
		f = check.Failed(api.ExitNoEndpoint, "%s has internalTrafficPolicy Local, and no ready endpoint on the node "+
			"%s of %s", what, j.Source.Spec.NodeName, j.source()).
			WithFix("Only pods on nodes with an endpoint reach it. Use the address of a pod, or the policy Cluster.")
	case len(j.ready) > 0, serving:
		return f
	case len(j.all) == 0 && port != nil && slices.ContainsFunc(j.Pods, isReady):
		f = check.Failed(api.ExitTargetPort, "%s port %d has the targetPort %q, and no pod has a port of that name; "+
			"they declare %s", what, j.Port, port.TargetPort.String(), listPorts(declared(&j.Pods[0]))).
			WithFix("Change targetPort of the Service, or name the port of the container so.")
	case len(j.all)+len(j.Pods) > 0:
		f = check.Failed(api.ExitNoEndpoint, "no endpoint of %s is ready", what).
			WithFix("`kubectl -n %s describe pods` shows the cause.", api.ShellQuote(j.Namespace))
	case j.Missing[objectPods] != "":
		f = check.Failed(api.ExitNoEndpoint, "%s has no endpoint", what).WithNotes(j.Missing[objectPods])
	default:
		f = check.Failed(api.ExitNoEndpoint, "%s has no endpoint: no pod has the labels %s", what,
			labels.FormatLabels(j.Service.Spec.Selector)).
			WithFix("`kubectl -n %s get pods --show-labels` shows the labels.", api.ShellQuote(j.Namespace))
	}
	if j.answered() { // the endpoint came or went in the meantime
		f = f.AsWarning()
	}
	return f.WithNotes(j.unready()...)
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

func (j *judge) policy() api.Finding {
	targets := j.all
	if len(targets) == 0 && j.Pod != nil && j.Service == nil && j.Trip.To.IsValid() {
		targets = []endpoint{{to: j.Trip.To}} // outside of the cluster
	}
	switch missing := cmp.Or(j.Missing[objectPolicies], j.Missing[objectManager], j.Missing[objectPods]); {
	case len(targets) == 0 && cmp.Or(j.Missing[objectServices], j.Missing[objectEndpointSlices]) != "":
		return check.Skipped("%s", cmp.Or(j.Missing[objectServices], j.Missing[objectEndpointSlices]))
	case len(targets) == 0:
		return check.Skipped("no endpoint")
	case missing != "":
		return check.Skipped("%s", missing)
	case j.Source == nil:
		return check.Skipped("the pod of the traffic manager was not found")
	}
	blocked, text := j.blocked(targets)
	silent := slices.ContainsFunc(blocked, func(e endpoint) bool { // connections to it got no answer
		s := cmp.Or(j.Dials[e.to], j.Trip.Dial)
		return s.TimedOut() || s.Unreachable()
	})
	switch {
	case len(blocked) == 0 && len(j.Policies) == 0:
		return check.OK("there is no NetworkPolicy")
	case len(blocked) == 0:
		return check.OK("NetworkPolicies allow %s to connect", j.source())
	case silent && !j.answered():
		f := check.Failed(api.ExitNetworkPolicy, "NetworkPolicy %s blocks connections from %s to %v", text, j.source(),
			blocked[0]).WithNotes("connections to it got no answer")
		if j.Pod != nil {
			return f.WithFix("The policies of the pod's namespace %s must allow its egress to it, and those of the "+
				"other pod its\ningress.", api.Clean(j.Source.Namespace))
		}
		return f.WithFix("Allow them in a NetworkPolicy: from pods labelled app.kubernetes.io/name=kubevpn in the "+
			"namespace %s.", api.Clean(j.Source.Namespace))
	}
	return check.Warning("NetworkPolicy %s does not allow %s, and the pods answer it: "+
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

func (j *judge) dial() api.Finding {
	t := j.Trip
	f := check.OK("connected to %v", t.To)
	refusing := api.Find(j.all, func(e endpoint) bool { return j.Dials[e.to].Refused() || e.to == t.To })
	switch {
	case !t.Dial.Tried():
		return check.Skipped("no address")
	case t.Dial.Done:
	case t.Dial.Refused() && refusing != nil:
		f = j.closedPort(*refusing)
	case t.Dial.TimedOut():
		f = check.Failed(api.ExitNoAnswer, "%v does not answer: no connection within %.0f s", t.To, t.Dial.Seconds).
			WithFix("Something drops the packets: a NetworkPolicy of the network plugin, a firewall on the node, or " +
				"a pod that\nhangs. `kubevpn status -o wide` shows whether other pods answer.")
	case t.Dial.Unreachable() && j.Pod == nil && j.Connection.Limited:
		f = check.Failed(api.ExitPermission,
			"the traffic manager does not connect to %v: its admin limits what laptops reach", t.To).
			WithNotes("Services are " + j.Connection.Services).
			WithFix("Ask an admin for the right to forward ports of the pod, or to allow its namespace. Pods without " +
				"a Service,\nand endpoints that are no pods, are not reached.")
	default:
		f = check.Failed(api.ExitNoAnswer, "cannot connect to %v: %s", t.To, t.Dial.Error).
			WithFix("`kubevpn logs` has the details. Compare with a request from elsewhere, with or without --from.")
	}
	for _, e := range j.all {
		if s := j.Dials[e.to]; s.Tried() && !s.Done {
			f = f.WithNotes(fmt.Sprintf("%v: %s", e, s.Error))
		}
	}
	return f
}

// closedPort is the finding for an endpoint that refuses connections.
func (j *judge) closedPort(e endpoint) api.Finding {
	ports, number := declared(e.pod), int32(e.to.Port())
	declares := slices.ContainsFunc(ports, func(p corev1.ContainerPort) bool { return p.ContainerPort == number })
	accepts := slices.ContainsFunc(ports, func(p corev1.ContainerPort) bool {
		return j.Dials[netip.AddrPortFrom(e.to.Addr(), uint16(p.ContainerPort))].Done
	})
	if j.Service != nil && !isHeadless(j.Service) && !declares && accepts {
		return check.Failed(api.ExitTargetPort, "service/%s sends to port %d, on which %v does not listen; its "+
			"containers declare %s", j.Service.Name, number, e, listPorts(ports)).
			WithFix("Change targetPort of the Service.")
	}
	return check.Failed(api.ExitClosedPort, "nothing listens on port %d of %v", number, e).
		WithFix("The program of the pod may not have started, listen on another port, or on 127.0.0.1 only:\n"+
			"`kubectl -n %s logs %s` shows its log.", api.ShellQuote(j.Namespace), api.ShellQuote(e.name))
}

func (j *judge) answer() api.Finding {
	t := j.Trip
	status := fmt.Sprintf("%d %s", t.Status, http.StatusText(t.Status))
	switch {
	case !t.Answer.Tried():
		return check.Skipped("no connection")
	case t.Answer.Done && t.Status >= http.StatusInternalServerError:
		return check.Warning("%s", status).WithNotes("the answer begins: " + t.Body)
	case t.Answer.Done:
		return check.OK("%s", status)
	case t.Answer.TimedOut():
		return check.Failed(api.ExitNoAnswer, "something accepted the connection, and sent no answer within %.1f s",
			t.Answer.Seconds).
			WithFix("The program may hang or be slow: --timeout waits for longer.")
	}
	return check.Failed(api.ExitNoAnswer, "the connection ended without an answer: %s", t.Answer.Error).
		WithFix("The port may not serve %s: try another scheme or port.", strings.ToUpper(j.Request.URL.Scheme))
}
