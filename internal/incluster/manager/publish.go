package manager

import (
	"context"
	"hash/maphash"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"go4.org/netipx"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/access"
	"kubevpn/internal/incluster/manager/router"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// publishInterval is the least time between two notices.
const publishInterval = 100 * time.Millisecond

// publisher passes changes of the cluster to the balancer and to notices.
type publisher struct {
	cluster  *cluster
	balancer *balancer.Balancer
	notices  *wakeup.Value[*notice] // the latest, for all control streams; a slow reader skips some and blocks nobody
	watcher  *watcher
	pods     *podReader     // looks for new blocks of pods
	router   *router.Router // knows the inner networks and the gateway
	filter   *access.Filter // receives the addresses of nodes and the API server
	policy   *access.Policy // receives the claims of EndpointSlices
	// gvisorOnly: there is no gateway, because an admin limits what laptops reach.
	gvisorOnly bool
	dns        dnsConfig
	vip        netip.AddrPort // of the API server, from the pod's environment
	noEcho     bool           // ICMP echo sockets are not permitted
	self       self

	mu       sync.Mutex
	sessions map[*transport.Session]struct{}
	past     transport.Traffic // of sessions that have ended

	ready chan struct{} // closed after the first notice with everything that the manager may know

	// Only run uses these:
	settled   bool                         // found includes guessed blocks
	resolving []string                     // those of cluster.namespaces of which the balancer has the Services
	names     map[string]map[string]uint64 // by namespace and Service: hashRecords
	sorted    map[string][]string          // of names, for notices; a namespace's entry is deleted when it changes
	seed      maphash.Seed                 // of the hashes
	records   recordChanges
	found     found
	podSet    *netipx.IPSet // of found.pods
}

// run publishes until ctx ends.
func (p *publisher) run(ctx context.Context) error {
	p.names, p.sorted = map[string]map[string]uint64{}, map[string][]string{}
	var due <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.cluster.changed:
			p.apply()
			if !p.isReady() { // laptops wait for it
				p.post()
			} else if due == nil {
				due = time.After(publishInterval)
			}
		case <-due:
			due = nil
			p.post()
		}
	}
}

func (p *publisher) isReady() bool {
	select {
	case <-p.ready:
		return true
	default:
		return false
	}
}

// begin and end add and remove a session.
func (p *publisher) begin(s *transport.Session) {
	p.mu.Lock()
	p.sessions[s] = struct{}{}
	p.mu.Unlock()
	p.cluster.changed.Raise()
}

func (p *publisher) end(s *transport.Session) {
	p.mu.Lock()
	delete(p.sessions, s)
	addTraffic(&p.past, s)
	p.mu.Unlock()
	p.cluster.changed.Raise()
}

// traffic returns the number of sessions, including those that wait for a conn, and the bytes of all sessions,
// including those that have ended.
func (p *publisher) traffic() (sessions int, total transport.Traffic) {
	p.mu.Lock()
	defer p.mu.Unlock()
	total = p.past
	for s := range p.sessions {
		addTraffic(&total, s)
	}
	return len(p.sessions), total
}

// addTraffic adds the bytes that a session has carried.
func addTraffic(t *transport.Traffic, s *transport.Session) {
	for _, l := range s.Stats().Links {
		t.Sent += l.Sent
		t.Received += l.Received
	}
}

// laptops returns the number of laptops that are connected now, without those whose session waits for a conn.
func (p *publisher) laptops() int {
	p.mu.Lock()
	defer p.mu.Unlock()
	n := 0
	for s := range p.sessions {
		if s.Attached() {
			n++
		}
	}
	return n
}

// apply passes the changed Services to the balancer. Changes during a call wait for the next call, so bursts arrive in
// few batches.
func (p *publisher) apply() {
	c := p.cluster
	c.mu.Lock()
	dirty := c.dirty
	c.dirty = make(map[balancer.Name]struct{})
	if resolving := c.resolving(); !slices.Equal(resolving, p.resolving) {
		p.resolving = resolving
		for name := range c.services {
			dirty[name] = struct{}{}
		}
	}
	var set []balancer.Service
	var remove []balancer.Name
	for name := range dirty {
		s := c.services[name]
		p.policy.SetClaims(name, c.claims(name))
		if s != nil && p.policy.AllowsNamespace(name.Namespace) {
			p.setName(name, true, hashRecords(p.seed, s, c.slices[name]))
		} else {
			p.setName(name, false, 0)
		}
		if s != nil && p.resolves(name.Namespace) {
			set = append(set, join(name, s, c.slices[name]))
		} else {
			remove = append(remove, name)
		}
	}
	zone := c.zone
	c.mu.Unlock()
	p.balancer.SetZone(zone)
	p.balancer.Apply(set, remove)
}

// resolves reports whether the balancer has the Services of a namespace.
func (p *publisher) resolves(namespace string) bool {
	return slices.Contains(p.resolving, metav1.NamespaceAll) || slices.Contains(p.resolving, namespace)
}

// setName records whether a Service exists, and the hash of its DNS records.
func (p *publisher) setName(name balancer.Name, exists bool, records uint64) {
	in := p.names[name.Namespace]
	if known, ok := in[name.Name]; ok == exists {
		if known != records {
			in[name.Name] = records
			p.records.add(name)
		}
		return
	}
	delete(p.sorted, name.Namespace)
	if !exists {
		if delete(in, name.Name); len(in) == 0 {
			delete(p.names, name.Namespace)
		}
		return
	}
	if in == nil {
		in = make(map[string]uint64)
		p.names[name.Namespace] = in
	}
	in[name.Name] = records
}

// post publishes a new notice.
func (p *publisher) post() {
	missing, ready := p.watcher.state()
	n := &notice{state: api.ManagerState{
		GVisorOnly: p.gvisorOnly, DNSServers: p.dns.servers, DNSDomain: p.dns.domain,
		Missing: slices.Clone(missing), Sessions: p.laptops(), ResolvesVIPs: len(p.resolving) > 0,
	}}
	if watched := p.cluster.namespaces; watched[0] != metav1.NamespaceAll {
		n.state.Namespaces = watched
	}
	p.policy.Describe(&n.state)
	if p.noEcho {
		n.state.Missing = append(n.state.Missing, "ICMP echo")
	}
	p.cluster.mu.Lock()
	ready = ready && len(p.cluster.dirty) == 0 && slices.Equal(p.resolving, p.cluster.resolving())
	if ready {
		p.pods.poked.Raise()
	}
	if settled := ready || p.isReady(); p.cluster.needsCIDRs || settled != p.settled {
		p.cluster.needsCIDRs, p.settled = false, settled
		p.cluster.recount()
		p.found = p.cluster.networks.prefixes(settled)
		p.podSet = routable.Of(p.found.pods)
	}
	if p.cluster.needsHosts {
		p.cluster.needsHosts = false
		if hosts := p.cluster.hostAddrs(); hosts != nil { // if they are no longer known, what they were
			p.filter.Hosts.Store(hosts)
		}
	}
	n.state.PodCIDRs, n.state.ServiceCIDRs, n.state.Ignored = p.found.pods, p.found.services, p.found.ignored
	n.state.StatedPodCIDRs, n.state.StatedServiceCIDRs = p.found.statedPods, p.found.statedServices
	if p.cluster.networks.mayNotRead {
		n.state.Missing = append(n.state.Missing, "get pods")
	}
	n.state.Direct = p.cluster.direct(p.self)
	ready = ready && p.cluster.firstRoundDone
	p.router.Describe(&n.state)
	p.probes(&n.state)
	if p.cluster.knows(services) {
		n.names, n.records = p.snapshot(), p.records
	}
	p.cluster.mu.Unlock()
	p.publish(n)
	if ready && !p.isReady() {
		close(p.ready)
	}
}

// publish replaces the latest notice, unless n is equal.
func (p *publisher) publish(n *notice) {
	if !n.equal(p.notices.Load()) {
		p.notices.Update(func(latest **notice) { *latest = n })
	}
}

func (p *publisher) snapshot() map[string][]string {
	for namespace, names := range p.names {
		if p.sorted[namespace] == nil {
			p.sorted[namespace] = slices.Sorted(maps.Keys(names))
		}
	}
	return maps.Clone(p.sorted)
}
