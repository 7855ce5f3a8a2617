package manager

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/singleflight"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

const (
	proofTime    = time.Minute      // until the next read of a pod that has the address
	disproofTime = 10 * time.Second // the same, if it has not, or could not be read
	proofKept    = 5 * time.Minute  // how long a proof counts while the API server does not answer
	proofTimeout = 5 * time.Second  // of one read
	maxProofs    = 1 << 14
	maxClaims    = 4 // pods that one flow reads, and endpoints of a Service that it tries
)

// access limits what the manager dials for laptops to the Services and pods of some namespaces (--allow-namespaces).
//
//	dst ─┬─ cluster DNS, port 53 ───────────────────────────────────────▶ allowed
//	     ├─ ClusterIP ─▶ Service in these namespaces? ─ yes ─▶ endpoint ─┐
//	     └─ other address ───────────────────────────────────────────────┴▶ a pod in these namespaces? ─ yes ─▶ allowed
//
// An EndpointSlice may name any address, also that of a pod in another namespace. So an address counts as a pod's only
// if an EndpointSlice in one of the namespaces names the pod, and the pod's status, which the kubelet writes, has the
// address. Networks of pods are not always known, so an endpoint without a pod could be anything and is refused; so are
// pods on the host network, because they share their addresses.
//
// Methods are safe for concurrent use. A nil *access allows everything.
type access struct {
	allowed []string // sorted
	filter  *filter
	service func(netip.Addr) (balancer.Name, bool)              // of a ClusterIP
	read    func(ctx context.Context, ref podRef) (bool, error) // podReader.read
	log     *slog.Logger
	reads   singleflight.Group // of the same pod

	mu     sync.Mutex
	claims map[netip.Addr]map[balancer.Name][]podRef // by the Service whose EndpointSlices make them
	addrs  map[balancer.Name][]netip.Addr            // of claims
	proofs map[podRef]proof
}

// proof is the result of reading a pod.
type proof struct {
	has   bool
	at    time.Time // of the last answer of the API server
	until time.Time // then read again
}

// newAccess returns nil if there are no namespaces.
func newAccess(namespaces []string, m *Manager) *access {
	if len(namespaces) == 0 {
		return nil
	}
	return &access{
		allowed: slices.Compact(slices.Sorted(slices.Values(namespaces))),
		filter:  m.filter, service: m.dialer.balancer.Service, read: m.pods.read, log: m.log,
		claims: make(map[netip.Addr]map[balancer.Name][]podRef), addrs: make(map[balancer.Name][]netip.Addr),
		proofs: make(map[podRef]proof),
	}
}

// allows reports whether laptops may reach a namespace.
func (a *access) allows(namespace string) bool {
	if a == nil {
		return true
	}
	_, ok := slices.BinarySearch(a.allowed, namespace)
	return ok
}

// set replaces the claims of a Service's EndpointSlices.
func (a *access) set(name balancer.Name, of map[string]*slice) {
	if a == nil || !a.allows(name.Namespace) {
		return
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	for _, addr := range a.addrs[name] {
		if delete(a.claims[addr], name); len(a.claims[addr]) == 0 {
			delete(a.claims, addr)
		}
	}
	delete(a.addrs, name)
	for _, s := range of {
		for i := range s.endpoints {
			e := &s.endpoints[i]
			if e.pod == "" {
				continue
			}
			if a.claims[e.addr] == nil {
				a.claims[e.addr] = make(map[balancer.Name][]podRef)
			}
			a.claims[e.addr][name] = append(a.claims[e.addr][name], podRef{e.addr, name.Namespace, e.pod})
			a.addrs[name] = append(a.addrs[name], e.addr)
		}
	}
}

// errNotAllowed is in the errors of check.
var errNotAllowed = errors.New("this traffic manager limits what laptops reach")

// check returns an error that Is errNotAllowed and EACCES if a flow to dst may not go to the address to: dst itself, or
// an endpoint of its Service. It may wait for the API server.
func (a *access) check(dst, to netip.AddrPort) error {
	if a == nil || dst.Port() == dnsPort && slices.Contains(a.filter.dns, dst.Addr()) {
		return nil
	}
	if name, ok := a.service(dst.Addr()); ok && !a.allows(name.Namespace) {
		return fmt.Errorf("%w: Service %s is in the namespace %s, and it allows %s: %w", errNotAllowed, name.Name,
			name.Namespace, strings.Join(a.allowed, ", "), syscall.EACCES)
	}
	if !a.hasPod(to.Addr().Unmap()) {
		return fmt.Errorf("%w: %v is no pod behind a Service in %s: %w", errNotAllowed, to.Addr(),
			strings.Join(a.allowed, ", "), syscall.EACCES)
	}
	return nil
}

// checkPick is check for what the balancer picked. It moves the pick to an endpoint that is allowed, if need be.
func (a *access) checkPick(dst netip.AddrPort, pick *balancer.Pick) (err error) {
	for range maxClaims {
		if err = a.check(dst, pick.Endpoint()); err == nil || !pick.Next() {
			return err
		}
	}
	return err
}

// hasPod reports whether addr belongs to a pod in the namespaces.
func (a *access) hasPod(addr netip.Addr) bool {
	now := time.Now()
	var unread []podRef
	a.mu.Lock()
	for _, refs := range a.claims[addr] {
		for _, ref := range refs {
			p := a.proofs[ref]
			switch {
			case now.After(p.until):
				if len(unread) < maxClaims && !slices.Contains(unread, ref) {
					unread = append(unread, ref)
				}
			case p.has:
				a.mu.Unlock()
				return true
			}
		}
	}
	a.mu.Unlock()
	return slices.ContainsFunc(unread, a.prove)
}

// prove reads a pod and reports whether it has the address. Flows that need the same pod share a read, so it does not
// end with the flow.
func (a *access) prove(ref podRef) bool {
	has, _, _ := a.reads.Do(fmt.Sprint(ref), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.Background(), proofTimeout)
		defer cancel()
		has, err := a.read(ctx, ref)
		if err != nil {
			a.log.Warn("cannot check the namespace of an address", "address", ref.addr, "err", err)
		}
		return a.record(ref, has, err, time.Now()), nil
	})
	return has == true
}

// record stores the result of a read, and returns what counts.
func (a *access) record(ref podRef, has bool, err error, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	p := a.proofs[ref]
	switch {
	case err == nil:
		p = proof{has: has, at: now}
	case now.Sub(p.at) > proofKept:
		p.has = false
	}
	p.until = now.Add(disproofTime)
	if p.has && err == nil {
		p.until = now.Add(proofTime)
	}
	if len(a.proofs) >= maxProofs { // the pods in use are soon read again
		clear(a.proofs)
	}
	a.proofs[ref] = p
	return p.has
}

// limited reports whether an admin limits what the manager dials.
func (d *dialer) limited() bool { return d.access != nil || d.limitedNetworks }

// refuse returns an error if a laptop insists on the system netstack, or nil. kube-proxy picks the endpoints of its
// packets, so the manager could not limit them.
func (d *dialer) refuse(hello *api.ClientHello) *api.Error {
	if !d.limited() || hello.Netstack != api.NetstackSystem || hello.MayUseGVisor {
		return nil
	}
	return api.Errorf(api.ExitNetstack, "%w, which needs `--netstack gvisor`", errNotAllowed).
		WithHint("use `kubevpn connect --netstack gvisor`")
}
