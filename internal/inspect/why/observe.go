package why

import (
	"cmp"
	"context"
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
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
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
func Explain(ctx context.Context, cfg Config) api.Explanation { return newObserver(cfg).explain(ctx) }

func (o *observer) explain(ctx context.Context) api.Explanation {
	began := time.Now()
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
	e := explanation(&o.facts)
	e.Seconds = time.Since(began).Seconds()
	return e
}

// observer collects facts.
type observer struct {
	facts
	here trip.Runner // on this machine
	mu   sync.Mutex  // guards Missing, Unsent and Policies; each other fact has one writer
}

func newObserver(cfg Config) *observer {
	o := &observer{here: trip.Run, facts: facts{
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
	o.Traces = slices.DeleteFunc(all, func(t api.InterceptTrace) bool {
		return t.Connection != o.Connection.ID
	})
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
			o.readManager(ctx)
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

// send runs an errand where the request comes from. If it is not run, the report is empty, and the facts say why.
func (o *observer) send(ctx context.Context, e trip.Errand) trip.Report {
	run := o.here
	if o.Pod != nil {
		run = o.Run
		if deadline, ok := ctx.Deadline(); ok {
			e.Timeout = max(time.Until(deadline)-tripTime, judgePause)
		}
	}
	r, err := run(ctx, e)
	if err != nil {
		o.set(func(f *facts) { f.Unsent = api.AsError(err) })
		return trip.Report{}
	}
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
		o.readAddress(ctx, ip)
	} else if o.Name != "" {
		o.readService(ctx)
	}
	var all sync.WaitGroup
	if o.Service != nil || len(o.Pods) > 0 {
		all.Go(func() { o.readPolicies(ctx, o.Namespace) }) // the namespace may be the source's: both reads agree
	}
	if o.Service != nil {
		all.Go(func() { o.readSlices(ctx) })
		all.Go(func() { o.readPods(ctx) })
	}
	if o.Certain {
		all.Go(func() { o.askClusterDNS(ctx) })
	}
	all.Wait()
}

// askClusterDNS asks a server of cluster DNS itself for the Service's name.
func (o *observer) askClusterDNS(ctx context.Context) {
	dns := o.Connection.DNS
	if len(dns.Servers) == 0 || dns.Domain == "" {
		return
	}
	name := fmt.Sprintf("%s.%s.svc.%s.", o.Name, o.Namespace, dns.Domain)
	at := netip.AddrPortFrom(dns.Servers[0], 53).String()
	if r, err := o.here(ctx, trip.Errand{Name: name, Nameserver: at}); err == nil {
		o.ClusterDNS.Addresses, o.ClusterDNS.Step = r.Result.Addresses, r.Result.Lookup
	}
}

// read returns what get reads within readTimeout. If that fails, read notes why and returns the zero value.
func read[T any](ctx context.Context, o *observer, what object, text string,
	get func(context.Context) (T, error)) T {
	ctx, cancel := context.WithTimeout(ctx, readTimeout)
	defer cancel()
	got, err := get(ctx)
	if err == nil {
		return got
	}
	var none T
	if apierrors.IsNotFound(err) {
		return none
	}
	missing := fmt.Sprintf("cannot read %s: %v", text, err)
	if _, p, ok := client.Denial(err); ok {
		missing = fmt.Sprintf("you may not %s", p)
	} else if ctx.Err() != nil {
		missing = fmt.Sprintf("cannot read %s: the API server did not answer in time", text)
	}
	o.set(func(f *facts) { f.Missing[what] = missing })
	return none
}

func (o *observer) readService(ctx context.Context) {
	f := &o.facts
	f.Service = read(ctx, o, objectServices, "the Service", func(ctx context.Context) (*corev1.Service, error) {
		return o.Kube.CoreV1().Services(f.Namespace).Get(ctx, f.Name, metav1.GetOptions{})
	})
	f.Certain = f.Certain || f.Service != nil
}

// readAddress finds the Service or the pod with an address.
func (o *observer) readAddress(ctx context.Context, ip netip.Addr) {
	f, core := &o.facts, o.Kube.CoreV1()
	services := read(ctx, o, objectServices, "Services", func(ctx context.Context) ([]*corev1.Service, error) {
		return withAddress(ctx, ip, "spec.clusterIP", core.Services(metav1.NamespaceAll).List,
			func(s *corev1.Service) []string { return s.Spec.ClusterIPs })
	})
	if len(services) > 0 {
		f.Service, f.Namespace, f.Name = services[0], services[0].Namespace, services[0].Name
		return
	}
	pods := read(ctx, o, objectPods, "pods", func(ctx context.Context) ([]*corev1.Pod, error) {
		return withAddress(ctx, ip, "status.podIP", core.Pods(metav1.NamespaceAll).List, ownAddresses)
	})
	if len(pods) == 1 {
		f.Namespace, f.Pods = pods[0].Namespace, []corev1.Pod{*pods[0]}
		o.set(func(f *facts) { delete(f.Missing, objectServices) }) // the address is a pod's
	}
}

// ownAddresses returns the addresses of a pod that runs, unless they are its node's.
func ownAddresses(p *corev1.Pod) []string {
	if workloads.Finished(p) || p.Spec.HostNetwork {
		return nil
	}
	return api.Texts(p.Status.PodIPs, func(ip corev1.PodIP) string { return ip.IP })
}

// withAddress lists the objects with an address. The field selects by the first address of an object. Only a list of
// all objects finds the second one, which objects have in a cluster with both families.
func withAddress[T runtime.Object, L runtime.Object](ctx context.Context, ip netip.Addr, field string,
	list func(context.Context, metav1.ListOptions) (L, error), addresses func(T) []string) (found []T, err error) {
	add := func(object runtime.Object) {
		if o, ok := object.(T); ok && slices.Contains(addresses(o), ip.String()) {
			found = append(found, o)
		}
	}
	first := fields.OneTermEqualSelector(field, ip.String()).String()
	err = workloads.Each(ctx, metav1.ListOptions{FieldSelector: first}, list, add)
	if err == nil && len(found) == 0 {
		err = workloads.Each(ctx, metav1.ListOptions{}, list, add)
	}
	return found, err
}

func (o *observer) readSlices(ctx context.Context) {
	s := o.Service
	ofService := metav1.ListOptions{LabelSelector: labels.Set{discoveryv1.LabelServiceName: s.Name}.String()}
	all := o.Kube.DiscoveryV1().EndpointSlices(s.Namespace).List
	list := read(ctx, o, objectEndpointSlices, "EndpointSlices", with(all, ofService))
	o.Slices = cmp.Or(list, new(discoveryv1.EndpointSliceList)).Items
}

func (o *observer) readPods(ctx context.Context) {
	s := o.Service
	if len(s.Spec.Selector) == 0 {
		return
	}
	selected := metav1.ListOptions{LabelSelector: labels.Set(s.Spec.Selector).String(), Limit: maxPods}
	all := o.Kube.CoreV1().Pods(s.Namespace).List
	o.Pods = cmp.Or(read(ctx, o, objectPods, "pods", with(all, selected)), new(corev1.PodList)).Items
}

func (o *observer) readManager(ctx context.Context) {
	c := o.Connection
	o.Source = read(ctx, o, objectManager, "the pod of the traffic manager",
		func(ctx context.Context) (*corev1.Pod, error) {
			return o.Kube.CoreV1().Pods(c.ManagerNamespace).Get(ctx, c.ManagerPod, metav1.GetOptions{})
		})
}

func (o *observer) readPolicies(ctx context.Context, namespace string) {
	all := o.Kube.NetworkingV1().NetworkPolicies(namespace).List
	list := read(ctx, o, objectPolicies, "NetworkPolicies", with(all, metav1.ListOptions{}))
	if list != nil {
		o.set(func(f *facts) { f.Policies = append(f.Policies, list.Items...) })
	}
}

// with binds the options of a list.
func with[L any](list func(context.Context, metav1.ListOptions) (L, error),
	options metav1.ListOptions) func(context.Context) (L, error) {
	return func(ctx context.Context) (L, error) { return list(ctx, options) }
}

// dialEndpoints connects to the endpoints themselves, and if one refuses, to the other ports of its pod.
func (o *observer) dialEndpoints(ctx context.Context) {
	f := &o.facts
	if f.Service == nil {
		return // the request itself goes to the endpoint
	}
	var first, others []netip.AddrPort
	all := f.endpoints()
	for _, e := range all[:min(len(all), maxDials)] {
		first = append(first, e.to)
	}
	o.dialAll(ctx, first)
	n := slices.IndexFunc(all, func(e endpoint) bool { return f.Dials[e.to].Failure == trip.Refused })
	if n < 0 {
		return
	}
	for _, p := range declared(all[n].pod) {
		others = append(others, netip.AddrPortFrom(all[n].to.Addr(), uint16(p.ContainerPort)))
	}
	o.dialAll(ctx, others[:min(len(others), maxPorts)])
}

func (o *observer) dialAll(ctx context.Context, to []netip.AddrPort) {
	if len(to) == 0 {
		return
	}
	maps.Copy(o.Dials, o.send(ctx, trip.Errand{Dial: to}).Dials)
}
