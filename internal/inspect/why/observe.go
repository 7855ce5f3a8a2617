package why

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/http"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	networkingv1 "k8s.io/api/networking/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/why/trip"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
)

const (
	// Timeout is the default of Config.Timeout.
	Timeout     = 5 * time.Second
	judgePause  = 500 * time.Millisecond // of the timeout, for the steps after the last answer
	readTimeout = 2 * time.Second        // of one read from the API server
	// announceTimeout limits how long agents that do not answer delay the request.
	announceTimeout = time.Second
	tripTime        = time.Second // of the time for an errand in a pod, to reach the pod and to answer
	maxPods         = 200         // of a Service that are read
	maxDials        = 8           // endpoints to which kubevpn connects
	maxPorts        = 4           // other ports of a pod to which it connects
)

// Config describes a request to explain.
type Config struct {
	Kube       kubernetes.Interface
	Connection api.Connection // that the request should take
	Request    *http.Request  // marked by trip.Mark
	Timeout    time.Duration  // of all together
	// Pod is the pod that sends the request, and Run runs errands there. Nil: this machine sends it.
	Pod *corev1.Pod
	Run trip.Runner
	// Trace announces the request's trace ID to the agents of this machine's intercepts, and returns what they noted.
	// Nil: there are no intercepts.
	Trace func(context.Context) ([]api.InterceptTrace, error)
}

// Explain sends the request and returns what happened to it. It takes at most the timeout.
func Explain(ctx context.Context, cfg Config) api.Diagnosis { return newObserver(cfg).explain(ctx) }

func (o *observer) explain(ctx context.Context) api.Diagnosis {
	bounded, cancel := context.WithTimeout(ctx, max(o.Timeout-judgePause, judgePause))
	defer cancel()
	announcing, cancel := context.WithTimeout(bounded, announceTimeout)
	o.trace(announcing)
	cancel()
	o.observe(bounded)
	rest, cancel := context.WithTimeout(ctx, judgePause)
	defer cancel()
	o.trace(rest)
	o.dialLocal(rest)
	return explanation(ctx, &o.facts)
}

// observer collects facts.
type observer struct {
	facts
	here   trip.Runner // on this machine
	lookup func(ctx context.Context, name, nameserver string) ([]netip.Addr, []string, trip.Step)
	mu     sync.Mutex // guards Missing, Unsent and Policies; each other fact has one writer
}

func newObserver(cfg Config) *observer {
	o := &observer{here: trip.Run, lookup: trip.Lookup, facts: facts{
		Config: cfg, Port: trip.Port(cfg.Request.URL),
		Dials: map[netip.AddrPort]trip.Step{}, Local: map[string]trip.Step{}, Missing: map[object]string{},
	}}
	f, c := &o.facts, cfg.Connection
	if f.Source = cfg.Pod; cfg.Pod != nil {
		c.Namespace = cfg.Pod.Namespace // where its resolver looks for short names
	}
	f.Namespace, f.Name, f.Certain = serviceOf(cfg.Request.URL.Hostname(), c)
	return o
}

// trace announces the request to the agents, and reads what they noted.
func (o *observer) trace(ctx context.Context) {
	if o.Trace == nil {
		return
	}
	all, err := o.Trace(ctx)
	if err != nil {
		o.Missing[objectAgents] = "cannot ask the agents: " + err.Error()
		return
	}
	delete(o.Missing, objectAgents)
	o.Traces = slices.DeleteFunc(all, func(t api.InterceptTrace) bool { return t.Connection != o.Connection.ID })
}

// dialLocal connects to the programs to which the intercepts lead.
func (o *observer) dialLocal(ctx context.Context) {
	var ports []api.PortMap
	for _, i := range o.Traces {
		ports = append(ports, i.Ports...)
	}
	ports = slices.DeleteFunc(ports, func(p api.PortMap) bool { return p.Protocol != "tcp" })
	var all sync.WaitGroup
	for _, p := range ports[:min(len(ports), maxDials)] {
		all.Go(func() {
			s := trip.Try(ctx, p.Place())
			o.set(func(f *facts) { f.Local[p.Place()] = s })
		})
	}
	all.Wait()
}

// observe sends the request, and reads the objects.
func (o *observer) observe(ctx context.Context) {
	host := o.Request.URL.Hostname()
	var all sync.WaitGroup
	all.Go(func() {
		if o.Trip = o.send(ctx, trip.NewErrand(o.Request)).Result; o.Pod == nil {
			o.Trip.Resolver = nil // the connection's resolver completes names
		}
	})
	all.Go(func() {
		namespace := o.Connection.ManagerNamespace
		if o.Pod == nil {
			o.Source = get(ctx, o, objectManager, o.Connection.ManagerPod, o.Kube.CoreV1().Pods(namespace).Get)
		} else {
			namespace = o.Pod.Namespace
		}
		o.readPolicies(ctx, namespace)
	})
	all.Go(func() {
		o.readTarget(ctx, host)
		o.dialEndpoints(ctx)
	})
	all.Wait()
}

// send runs an errand where the request comes from. If it is not run, the report is empty, and the facts say why. On
// this machine it goes to mapped addresses, and the report has those of the cluster.
func (o *observer) send(ctx context.Context, e trip.Errand) trip.Report {
	run, mappings := o.here, o.Connection.Mappings
	if o.Pod != nil {
		run, mappings = o.Run, nil
		if deadline, ok := ctx.Deadline(); ok {
			e.Timeout = max(time.Until(deadline)-tripTime, judgePause)
		}
	}
	e.Dial = slices.Clone(e.Dial)
	for i, to := range e.Dial {
		e.Dial[i] = netip.AddrPortFrom(mappings.ToLocal(to.Addr()), to.Port())
	}
	r, err := run(ctx, e)
	if err != nil {
		o.set(func(f *facts) { f.Unsent = api.AsError(err) })
		return trip.Report{}
	}
	r.Result.To = netip.AddrPortFrom(mappings.ToCluster(r.Result.To.Addr()), r.Result.To.Port())
	for i, a := range r.Result.Addresses {
		r.Result.Addresses[i] = mappings.ToCluster(a)
	}
	dials := map[netip.AddrPort]trip.Step{}
	for to, step := range r.Dials {
		dials[netip.AddrPortFrom(mappings.ToCluster(to.Addr()), to.Port())] = step
	}
	r.Dials = dials
	return r
}

func (o *observer) set(f func(*facts)) {
	o.mu.Lock()
	defer o.mu.Unlock()
	f(&o.facts)
}

// serviceOf returns the Service that a host stands for: NAME, NAME.NAMESPACE, NAME.NAMESPACE.svc, or that with the
// cluster's domain. A label before it names a pod of a headless Service.
func serviceOf(host string, c api.Connection) (namespace, name string, certain bool) {
	if _, err := netip.ParseAddr(host); err == nil {
		return "", "", false
	}
	short := strings.TrimSuffix(strings.ToLower(host), ".")
	if c.DNS.Alias != "" {
		short = strings.TrimSuffix(short, "."+c.DNS.Alias)
	}
	short, full := strings.CutSuffix(short, "."+c.DNS.Domain)
	short, certain = strings.CutSuffix(short, ".svc")
	parts := strings.Split(short, ".")
	switch n := len(parts); {
	case full && !certain, certain && n == 1, n > 3, n == 3 && !certain:
		return "", "", false
	case n == 1:
		return c.Namespace, short, true
	default:
		return parts[n-1], parts[n-2], certain
	}
}

// readTarget reads the Service or pod that the host stands for, and the objects that belong to it.
func (o *observer) readTarget(ctx context.Context, host string) {
	if ip, err := netip.ParseAddr(host); err == nil {
		if o.Pod == nil {
			ip = o.Connection.Mappings.ToCluster(ip)
		}
		o.readAddress(ctx, ip)
	} else if o.Name != "" {
		o.Service = get(ctx, o, objectServices, o.Name, o.Kube.CoreV1().Services(o.Namespace).Get)
		o.Certain = o.Certain || o.Service != nil
	}
	var reads sync.WaitGroup
	if o.Service != nil || len(o.Pods) > 0 {
		reads.Go(func() { o.readPolicies(ctx, o.Namespace) }) // the namespace may be the source's: both reads agree
	}
	if o.Service != nil {
		reads.Go(func() {
			o.Slices = list(ctx, o, objectEndpointSlices, o.Kube.DiscoveryV1().EndpointSlices(o.Namespace).List,
				all[discoveryv1.EndpointSlice],
				metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: o.Name}.String()})
		})
	}
	if o.Service != nil && len(o.Service.Spec.Selector) > 0 {
		reads.Go(func() {
			pods := read(ctx, o, objectPods, func(ctx context.Context) (*corev1.PodList, error) {
				selected := labels.Set(o.Service.Spec.Selector).String()
				return o.Kube.CoreV1().Pods(o.Namespace).List(ctx,
					metav1.ListOptions{LabelSelector: selected, Limit: maxPods})
			})
			o.Pods = cmp.Or(pods, new(corev1.PodList)).Items
		})
	}
	if o.Certain {
		reads.Go(func() { o.askClusterDNS(ctx) })
	}
	reads.Wait()
}

// askClusterDNS asks a server of cluster DNS itself for the Service's name.
func (o *observer) askClusterDNS(ctx context.Context) {
	dns := o.Connection.DNS
	if len(dns.Servers) == 0 || dns.Domain == "" {
		return
	}
	name := fmt.Sprintf("%s.%s.svc.%s.", o.Name, o.Namespace, dns.Domain)
	at := netip.AddrPortFrom(o.Connection.Mappings.ToLocal(dns.Servers[0]), 53).String() // asked by this machine
	o.ClusterDNS.Addresses, _, o.ClusterDNS.Lookup = o.lookup(ctx, name, at)
}

// read returns what from reads within readTimeout. If that fails, read notes why and returns the zero value.
func read[T any](ctx context.Context, o *observer, what object, from func(context.Context) (T, error)) (none T) {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	got, err := from(ctx)
	switch {
	case err == nil:
		return got
	case apierrors.IsNotFound(err):
		return none
	case ctx.Err() != nil:
		err = errors.New("the API server did not answer in time")
	}
	missing := fmt.Sprintf("cannot read %s: %v", what, err)
	if _, p, ok := client.Denial(err); ok {
		missing = fmt.Sprintf("you may not %s", p)
	}
	o.set(func(f *facts) { f.Missing[what] = missing })
	return none
}

// get returns one object.
func get[T any](ctx context.Context, o *observer, what object, name string,
	from func(context.Context, string, metav1.GetOptions) (*T, error)) *T {
	return read(ctx, o, what, func(ctx context.Context) (*T, error) { return from(ctx, name, metav1.GetOptions{}) })
}

// list returns the objects of the first list that has some that are wanted.
func list[T any, L runtime.Object](ctx context.Context, o *observer, what object,
	page func(context.Context, metav1.ListOptions) (L, error), wanted func(*T) bool, lists ...metav1.ListOptions) []T {
	return read(ctx, o, what, func(ctx context.Context) (found []T, err error) {
		for _, options := range lists {
			if err == nil && len(found) == 0 {
				err = workloads.Each(ctx, options, page, func(item runtime.Object) {
					if t, ok := any(item).(*T); ok && wanted(t) {
						found = append(found, *t)
					}
				})
			}
		}
		return found, err
	})
}

func all[T any](*T) bool { return true }

// readAddress finds the Service or the pod with an address.
func (o *observer) readAddress(ctx context.Context, ip netip.Addr) {
	f, core := &o.facts, o.Kube.CoreV1()
	// The field selects by the first address of an object. Only a list of all objects finds the second one, which
	// objects have in a cluster with both families.
	lists := func(field string) []metav1.ListOptions {
		return []metav1.ListOptions{{FieldSelector: field + "=" + ip.String()}, {}}
	}
	services := list(ctx, o, objectServices, core.Services(metav1.NamespaceAll).List, func(s *corev1.Service) bool {
		return slices.Contains(s.Spec.ClusterIPs, ip.String())
	}, lists("spec.clusterIP")...)
	if len(services) > 0 {
		f.Service, f.Namespace, f.Name = &services[0], services[0].Namespace, services[0].Name
		return
	}
	pods := list(ctx, o, objectPods, core.Pods(metav1.NamespaceAll).List, func(p *corev1.Pod) bool {
		return !workloads.Finished(p) && !p.Spec.HostNetwork &&
			slices.Contains(p.Status.PodIPs, corev1.PodIP{IP: ip.String()})
	}, lists("status.podIP")...)
	if len(pods) == 1 {
		f.Namespace, f.Pods = pods[0].Namespace, pods
		o.set(func(f *facts) { delete(f.Missing, objectServices) }) // the address is a pod's
	}
}

func (o *observer) readPolicies(ctx context.Context, namespace string) {
	list := list(ctx, o, objectPolicies, o.Kube.NetworkingV1().NetworkPolicies(namespace).List,
		all[networkingv1.NetworkPolicy], metav1.ListOptions{})
	o.set(func(f *facts) { f.Policies = append(f.Policies, list...) })
}

// dialEndpoints connects to the endpoints themselves, and if one refuses, to the other ports of its pod.
func (o *observer) dialEndpoints(ctx context.Context) {
	if o.Service == nil {
		return // the request itself goes to the endpoint
	}
	dial := func(to []netip.AddrPort, most int) {
		if len(to) > 0 {
			maps.Copy(o.Dials, o.send(ctx, trip.Errand{Dial: to[:min(len(to), most)]}).Dials)
		}
	}
	var first, others []netip.AddrPort
	for _, e := range o.endpoints() {
		first = append(first, e.to)
	}
	dial(first, maxDials)
	refusing := api.Find(o.endpoints(), func(e endpoint) bool { return o.Dials[e.to].Refused() })
	if refusing == nil {
		return
	}
	for _, p := range declared(refusing.pod) {
		others = append(others, netip.AddrPortFrom(refusing.to.Addr(), uint16(p.ContainerPort)))
	}
	dial(others, maxPorts)
}
