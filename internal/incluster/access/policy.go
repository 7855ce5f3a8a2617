package access

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

// DNSPort is the port of DNS servers.
const DNSPort = 53

// maxClaims bounds the pods that one flow reads, and the endpoints of a Service that it tries.
const maxClaims = 4

// Config configures a Policy.
type Config struct {
	Namespaces []string // whose Services and pods laptops may reach; empty: all
	Authorize  bool     // laptops reach only pods of which their user may forward ports
	Filter     *Filter
	Service    func(netip.Addr) (balancer.Name, bool) // of a ClusterIP
	// HasAddress reads the pod and reports whether it has the address.
	HasAddress func(context.Context, PodRef) (bool, error)
	Logger     *slog.Logger
}

// Policy limits what the manager dials for laptops: to the Services and pods of some namespaces (--allow-namespaces),
// and to pods of which the laptop's user may forward ports (--authorize).
//
//	dst ─┬─ cluster DNS, port 53 ───────────────────────────────────────▶ allowed
//	     ├─ ClusterIP ─▶ Service in these namespaces? ─ yes ─▶ endpoint ─┐
//	     └─ other address ───────────────────────────────────────────────┴▶ a pod in these namespaces? ─ yes ─┐
//	                                                allowed ◀─ yes ─ may the user forward its ports? (User) ◀─┘
//
// An EndpointSlice may name any address, also that of a pod in another namespace. So an address counts as a pod's only
// if an EndpointSlice in one of the namespaces names the pod, and the pod's status, which the kubelet writes, has the
// address. Networks of pods are not always known, so an endpoint without a pod could be anything and is refused; so are
// pods on the host network, because they share their addresses.
//
// Methods are safe for concurrent use. A nil *Policy allows everything.
type Policy struct {
	cfg    Config           // Namespaces is sorted
	proofs *answers[PodRef] // whether the pod has the address

	mu     sync.Mutex
	claims map[netip.Addr]map[balancer.Name][]PodRef // by the Service whose EndpointSlices make them
	addrs  map[balancer.Name][]netip.Addr            // of claims
}

// PodRef is the claim of an EndpointSlice that a pod has an address.
type PodRef struct {
	Addr            netip.Addr
	Namespace, Name string
}

// New returns a Policy, or nil if cfg limits nothing. It asks nothing before the first Check.
func New(cfg Config) *Policy {
	if len(cfg.Namespaces) == 0 && !cfg.Authorize {
		return nil
	}
	cfg.Namespaces = slices.Compact(slices.Sorted(slices.Values(cfg.Namespaces)))
	return &Policy{cfg: cfg, proofs: newAnswers(cfg.HasAddress, cfg.Logger),
		claims: make(map[netip.Addr]map[balancer.Name][]PodRef), addrs: make(map[balancer.Name][]netip.Addr)}
}

// Describe sets the limits in the state that laptops receive.
func (p *Policy) Describe(state *api.ManagerState) {
	if p == nil {
		return
	}
	state.Limited, state.Authorized = true, p.cfg.Authorize
	if len(p.cfg.Namespaces) > 0 {
		state.Namespaces = p.cfg.Namespaces
	}
}

// AllowsNamespace reports whether laptops may reach Services and pods of a namespace.
func (p *Policy) AllowsNamespace(namespace string) bool {
	if p == nil || len(p.cfg.Namespaces) == 0 {
		return true
	}
	_, ok := slices.BinarySearch(p.cfg.Namespaces, namespace)
	return ok
}

// SetClaims replaces the claims of a Service's EndpointSlices. No claims remove the Service.
func (p *Policy) SetClaims(service balancer.Name, claims iter.Seq[PodRef]) {
	if p == nil || !p.AllowsNamespace(service.Namespace) {
		return
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, addr := range p.addrs[service] {
		if delete(p.claims[addr], service); len(p.claims[addr]) == 0 {
			delete(p.claims, addr)
		}
	}
	delete(p.addrs, service)
	for ref := range claims {
		if p.claims[ref.Addr] == nil {
			p.claims[ref.Addr] = make(map[balancer.Name][]PodRef)
		}
		p.claims[ref.Addr][service] = append(p.claims[ref.Addr][service], ref)
		p.addrs[service] = append(p.addrs[service], ref.Addr)
	}
}

// ErrNotAllowed is in the errors of Check.
var ErrNotAllowed = errors.New("this traffic manager limits what laptops reach")

// Check returns an error that Is ErrNotAllowed and EACCES if a flow of a laptop to dst may not go to the address to:
// dst itself, or an endpoint of its Service. by is the laptop's user, nil if unknown. It may wait for the API server.
func (p *Policy) Check(dst, to netip.AddrPort, by *User) error {
	if p == nil || dst.Port() == DNSPort && slices.Contains(p.cfg.Filter.DNS, dst.Addr()) {
		return nil
	}
	reject := func(why string, args ...any) error {
		return fmt.Errorf("%w: %s: %w", ErrNotAllowed, fmt.Sprintf(why, args...), syscall.EACCES)
	}
	where := strings.Join(p.cfg.Namespaces, ", ")
	if name, ok := p.cfg.Service(dst.Addr()); ok && !p.AllowsNamespace(name.Namespace) {
		return reject("Service %s is in the namespace %s, and it allows %s", name.Name, name.Namespace, where)
	}
	pod, ok := p.pod(to.Addr().Unmap())
	switch {
	case !ok && where == "":
		return reject("%v is no pod behind a Service", to.Addr())
	case !ok:
		return reject("%v is no pod behind a Service in %s", to.Addr(), where)
	case p.cfg.Authorize && !by.mayForward(pod):
		return reject("the user may not forward ports of the pod %s/%s", pod.Namespace, pod.Name)
	}
	return nil
}

// CheckPick is Check for what the balancer picked. It moves the pick to an endpoint that is allowed, if need be.
func (p *Policy) CheckPick(dst netip.AddrPort, pick *balancer.Pick, by *User) (err error) {
	for range maxClaims {
		if err = p.Check(dst, pick.Endpoint(), by); err == nil || !pick.Next() {
			return err
		}
	}
	return err
}

// pod returns the pod in the namespaces to which addr belongs.
func (p *Policy) pod(addr netip.Addr) (PodRef, bool) {
	var unread []PodRef
	p.mu.Lock()
	for _, refs := range p.claims[addr] {
		for _, ref := range refs {
			switch yes, known := p.proofs.known(ref); {
			case yes:
				p.mu.Unlock()
				return ref, true
			case !known && len(unread) < maxClaims && !slices.Contains(unread, ref):
				unread = append(unread, ref)
			}
		}
	}
	p.mu.Unlock()
	for _, ref := range unread {
		if p.proofs.get(ref) {
			return ref, true
		}
	}
	return PodRef{}, false
}
