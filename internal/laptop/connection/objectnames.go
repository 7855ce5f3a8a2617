package connection

import (
	"cmp"
	"context"
	"net/netip"
	"strings"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	mdns "github.com/miekg/dns"
	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"

	"kubevpn/internal/api"
)

const (
	maxObjectNames    = 4096
	objectNameTime    = time.Minute     // an address may become another pod's
	objectNameTimeout = 3 * time.Second // limits one look-up
	objectNameWorkers = 4
	objectNameQueue   = 64 // look-ups that wait; if it is full, a later get asks again
)

// objectNames are the names of the Services and pods that have addresses. A look-up asks cluster DNS for the reverse
// name, through the connection's cache, and the API server for the pod. It happens in the background, and only for
// addresses that somebody asks for. objectNames is safe for concurrent use.
type objectNames struct {
	known *lru.Cache[netip.Addr, objectName]
	asked chan netip.Addr
}

type objectName struct {
	api.ObjectName // zero: unknown, or being looked up
	until          time.Time
}

func newObjectNames() *objectNames {
	known, err := lru.New[netip.Addr, objectName](maxObjectNames)
	if err != nil {
		panic(err) // the size is positive
	}
	return &objectNames{known, make(chan netip.Addr, objectNameQueue)}
}

// get returns the name if it is known, and otherwise has it looked up. It does not block.
func (n *objectNames) get(a netip.Addr) api.ObjectName {
	found, ok := n.known.Get(a)
	if ok && time.Now().Before(found.until) {
		return found.ObjectName
	}
	n.put(a, found.ObjectName) // nobody asks again meanwhile
	select {
	case n.asked <- a:
	default:
		n.known.Add(a, found)
	}
	return found.ObjectName
}

func (n *objectNames) put(a netip.Addr, name api.ObjectName) {
	n.known.Add(a, objectName{name, time.Now().Add(objectNameTime)})
}

// run looks names up until ctx ends, and then returns nil.
func (n *objectNames) run(ctx context.Context, lookUp func(context.Context, netip.Addr) api.ObjectName) error {
	var looking errgroup.Group
	looking.SetLimit(objectNameWorkers)
	for {
		select {
		case a := <-n.asked:
			looking.Go(func() error {
				ctx, cancel := context.WithTimeout(ctx, objectNameTimeout)
				defer cancel()
				n.put(a, lookUp(ctx, a))
				return nil
			})
		case <-ctx.Done():
			return looking.Wait()
		}
	}
}

// NameOf returns the name of the Service, pod or host that has an address, as soon as the connection knows it. It does
// not block.
func (c *Connection) NameOf(a netip.Addr) api.ObjectName {
	if host := c.hosts.nameOf(a); host != "" {
		return api.ObjectName{Kind: "host", Name: host}
	}
	return c.objectNames.get(a)
}

// nameOf returns the name of a host of an extra domain, or "".
func (h *hosts) nameOf(a netip.Addr) string {
	h.mu.Lock()
	defer h.mu.Unlock()
	if k := h.known[a]; k != nil {
		return k.name
	}
	return ""
}

// lookUpObject asks cluster DNS, and then the API server with the user's rights. If neither answers, the name is empty.
func (c *Connection) lookUpObject(ctx context.Context, a netip.Addr) api.ObjectName {
	name, err := c.serviceAt(ctx, a)
	if err == nil && name.Name != "" {
		return name
	}
	for _, namespace := range []string{metav1.NamespaceAll, c.namespace.Load()} {
		pods, err := c.cluster.Kube().CoreV1().Pods(namespace).List(ctx, metav1.ListOptions{
			FieldSelector: fields.OneTermEqualSelector("status.podIP", a.String()).String(), Limit: objectNameQueue,
		})
		if err != nil {
			c.log.Debug("cannot find the pod of an address", "address", a, "namespace", namespace, "err", err)
			continue
		}
		return podIn(pods.Items)
	}
	return api.ObjectName{}
}

// podIn returns the name of the pod that runs and has an address of its own.
func podIn(pods []corev1.Pod) api.ObjectName {
	for _, p := range pods {
		ended := p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed
		if !p.Spec.HostNetwork && !ended {
			return api.ObjectName{Kind: "pod", Namespace: p.Namespace, Name: p.Name}
		}
	}
	return api.ObjectName{}
}

// serviceAt returns the Service whose ClusterIP is the address.
func (c *Connection) serviceAt(ctx context.Context, a netip.Addr) (api.ObjectName, error) {
	reverse, err := mdns.ReverseAddr(a.String())
	if err != nil {
		return api.ObjectName{}, err
	}
	answer, err := c.routes.zone.cache.ServeDNS(ctx, new(mdns.Msg).SetQuestion(reverse, mdns.TypePTR))
	if err != nil {
		return api.ObjectName{}, err
	}
	for _, rr := range answer.Answer {
		if ptr, ok := rr.(*mdns.PTR); ok {
			return serviceOf(ptr.Ptr, cmp.Or(c.view.Load().state.DNSDomain, "cluster.local")), nil
		}
	}
	return api.ObjectName{}, nil
}

// serviceOf returns the Service with a name such as web.default.svc.cluster.local. The name of an endpoint has one more
// label, which is not the name of its pod.
func serviceOf(name, domain string) api.ObjectName {
	rest, ok := strings.CutSuffix(trimName(name), ".svc."+domain)
	service, namespace, found := strings.Cut(rest, ".")
	if !ok || !found || !isLabel(service) || !isLabel(namespace) {
		return api.ObjectName{}
	}
	return api.ObjectName{Kind: "service", Namespace: namespace, Name: service}
}
