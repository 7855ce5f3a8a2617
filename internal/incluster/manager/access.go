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
	yesTime    = time.Minute      // until the API server is asked again
	noTime     = 10 * time.Second // the same, after a no, or if it did not answer
	yesKept    = 5 * time.Minute  // how long a yes counts while the API server does not answer
	askTimeout = 5 * time.Second
	maxAnswers = 1 << 14
	maxClaims  = 4 // pods that one flow reads, and endpoints of a Service that it tries
)

// access limits what the manager dials for laptops: to the Services and pods of some namespaces (--allow-namespaces),
// and to pods of which the laptop's user may forward ports (--authorize).
//
//	dst ─┬─ cluster DNS, port 53 ───────────────────────────────────────▶ allowed
//	     ├─ ClusterIP ─▶ Service in these namespaces? ─ yes ─▶ endpoint ─┐
//	     └─ other address ───────────────────────────────────────────────┴▶ a pod in these namespaces? ─ yes ─┐
//	                                        allowed ◀─ yes ─ may the user forward its ports? (authorize.go) ◀─┘
//
// An EndpointSlice may name any address, also that of a pod in another namespace. So an address counts as a pod's only
// if an EndpointSlice in one of the namespaces names the pod, and the pod's status, which the kubelet writes, has the
// address. Networks of pods are not always known, so an endpoint without a pod could be anything and is refused; so are
// pods on the host network, because they share their addresses.
//
// Methods are safe for concurrent use. A nil *access allows everything.
type access struct {
	allowed   []string // sorted; empty: all
	authorize bool
	filter    *filter
	service   func(netip.Addr) (balancer.Name, bool) // of a ClusterIP
	proofs    *answers[podRef]                       // whether the pod has the address: podReader.read

	mu     sync.Mutex
	claims map[netip.Addr]map[balancer.Name][]podRef // by the Service whose EndpointSlices make them
	addrs  map[balancer.Name][]netip.Addr            // of claims
}

// newAccess returns nil if there is no limit.
func newAccess(m *Manager) *access {
	if len(m.cfg.AllowNamespaces) == 0 && !m.cfg.Authorize {
		return nil
	}
	return &access{
		allowed: slices.Compact(slices.Sorted(slices.Values(m.cfg.AllowNamespaces))), authorize: m.cfg.Authorize,
		filter: m.filter, service: m.dialer.balancer.Service, proofs: newAnswers(m.pods.read, m.log),
		claims: make(map[netip.Addr]map[balancer.Name][]podRef), addrs: make(map[balancer.Name][]netip.Addr),
	}
}

// allows reports whether laptops may reach a namespace.
func (a *access) allows(namespace string) bool {
	if a == nil || len(a.allowed) == 0 {
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

// check returns an error that Is errNotAllowed and EACCES if a flow of a laptop to dst may not go to the address to:
// dst itself, or an endpoint of its Service. It may wait for the API server.
func (a *access) check(dst, to netip.AddrPort, by caller) error {
	if a == nil || dst.Port() == dnsPort && slices.Contains(a.filter.dns, dst.Addr()) {
		return nil
	}
	reject := func(why string, args ...any) error {
		return fmt.Errorf("%w: %s: %w", errNotAllowed, fmt.Sprintf(why, args...), syscall.EACCES)
	}
	where := strings.Join(a.allowed, ", ")
	if name, ok := a.service(dst.Addr()); ok && !a.allows(name.Namespace) {
		return reject("Service %s is in the namespace %s, and it allows %s", name.Name, name.Namespace, where)
	}
	pod, ok := a.pod(to.Addr().Unmap())
	switch {
	case !ok && where == "":
		return reject("%v is no pod behind a Service", to.Addr())
	case !ok:
		return reject("%v is no pod behind a Service in %s", to.Addr(), where)
	case a.authorize && !by.mayForward(pod):
		return reject("the user may not forward ports of the pod %s/%s", pod.namespace, pod.name)
	}
	return nil
}

// checkPick is check for what the balancer picked. It moves the pick to an endpoint that is allowed, if need be.
func (a *access) checkPick(dst netip.AddrPort, pick *balancer.Pick, by caller) (err error) {
	for range maxClaims {
		if err = a.check(dst, pick.Endpoint(), by); err == nil || !pick.Next() {
			return err
		}
	}
	return err
}

// pod returns the pod in the namespaces to which addr belongs.
func (a *access) pod(addr netip.Addr) (podRef, bool) {
	var unread []podRef
	a.mu.Lock()
	for _, refs := range a.claims[addr] {
		for _, ref := range refs {
			switch yes, known := a.proofs.known(ref); {
			case yes:
				a.mu.Unlock()
				return ref, true
			case !known && len(unread) < maxClaims && !slices.Contains(unread, ref):
				unread = append(unread, ref)
			}
		}
	}
	a.mu.Unlock()
	for _, ref := range unread {
		if a.proofs.get(ref) {
			return ref, true
		}
	}
	return podRef{}, false
}

// answers keeps what the API server says about keys. A yes is asked for again after a minute, and counts for longer
// while the API server does not answer. Methods are safe for concurrent use.
type answers[K comparable] struct {
	ask    func(context.Context, K) (bool, error)
	log    *slog.Logger
	asking singleflight.Group // about the same key

	mu   sync.Mutex
	kept map[K]answer
}

type answer struct {
	yes   bool
	at    time.Time // of the last answer of the API server
	until time.Time // then asked for again
}

func newAnswers[K comparable](ask func(context.Context, K) (bool, error), log *slog.Logger) *answers[K] {
	return &answers[K]{ask: ask, log: log, kept: make(map[K]answer)}
}

// known returns the answer. It is not known if the API server is to be asked.
func (a *answers[K]) known(key K) (yes, known bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	kept := a.kept[key]
	known = !time.Now().After(kept.until)
	return kept.yes && known, known
}

// get returns the answer. It may wait for the API server. Flows that need the same answer share a request, so it does
// not end with the flow.
func (a *answers[K]) get(key K) bool {
	if yes, known := a.known(key); known {
		return yes
	}
	yes, _, _ := a.asking.Do(fmt.Sprint(key), func() (any, error) {
		ctx, cancel := context.WithTimeout(context.Background(), askTimeout)
		defer cancel()
		yes, err := a.ask(ctx, key)
		if err != nil {
			a.log.Warn("cannot check what a laptop may reach", "what", key, "err", err)
		}
		return a.record(key, yes, err, time.Now()), nil
	})
	return yes == true
}

// record stores an answer, and returns what counts.
func (a *answers[K]) record(key K, yes bool, err error, now time.Time) bool {
	a.mu.Lock()
	defer a.mu.Unlock()
	kept := a.kept[key]
	switch {
	case err == nil:
		kept = answer{yes: yes, at: now}
	case now.Sub(kept.at) > yesKept:
		kept.yes = false
	}
	kept.until = now.Add(noTime)
	if kept.yes && err == nil {
		kept.until = now.Add(yesTime)
	}
	if len(a.kept) >= maxAnswers { // those in use are soon asked for again
		clear(a.kept)
	}
	a.kept[key] = kept
	return kept.yes
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
