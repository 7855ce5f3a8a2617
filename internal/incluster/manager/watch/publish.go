package watch

import (
	"context"
	"hash/maphash"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"time"

	"go4.org/netipx"
	"golang.org/x/sync/errgroup"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/wakeup"
)

// publishInterval is the least time between two notices.
const publishInterval = 100 * time.Millisecond

// Config configures a publisher.
type Config struct {
	Kube kubernetes.Interface // nil: no API access
	// Namespaces are those whose Services and EndpointSlices to watch. Empty: all.
	Namespaces []string
	Self       Self
	Balancer   *balancer.Balancer
	Filter     *access.Filter // receives the addresses of nodes and the API server
	Policy     *access.Policy // receives the claims of EndpointSlices
	// GVisorOnly: there is no gateway, because an admin limits what laptops reach.
	GVisorOnly bool
	Describe   func(*api.ManagerState) // adds the inner networks and the gateway
	Laptops    func() int              // that are connected now
	Logger     *slog.Logger
}

// Publisher watches the cluster. It passes changes to the balancer, the filter, the policy and notices. Methods are
// safe for concurrent use.
type Publisher struct {
	cfg     Config
	Self    Self // set before run
	cluster *cluster
	watcher *watcher
	pods    *podReader // looks for new blocks of pods
	// Notices has the latest one, for all control streams. A slow reader skips some and blocks nobody.
	Notices wakeup.Value[*Notice]

	Ready chan struct{} // closed after the first notice with everything that the manager may know

	// Only follow uses these:
	settled   bool                         // found includes guessed blocks
	resolving []string                     // those of cluster.namespaces of which the balancer has the Services
	names     map[string]map[string]uint64 // by namespace and Service: hashRecords
	sorted    map[string][]string          // of names, for notices; a namespace's entry is deleted when it changes
	seed      maphash.Seed                 // of the hashes
	changes   nameChanges
	found     found
	podSet    *netipx.IPSet // of found.pods
}

// New returns a publisher. It does not touch the network. The first notice is empty.
func New(cfg Config) *Publisher {
	c := newCluster(cfg.Self.Node, cfg.Namespaces...)
	p := &Publisher{
		cfg: cfg, Self: cfg.Self, cluster: c,
		watcher: &watcher{kube: cfg.Kube, cluster: c, log: cfg.Logger, denied: make(map[scope][]string)},
		pods:    newPodReader(cfg.Kube, c, cfg.Logger),
		Ready:   make(chan struct{}), seed: maphash.MakeSeed(),
		names: map[string]map[string]uint64{}, sorted: map[string][]string{},
	}
	p.Notices.Update(func(latest **Notice) { *latest = &Notice{} })
	return p
}

// Run watches and publishes until ctx ends, and then returns nil.
func (p *Publisher) Run(ctx context.Context) error {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return p.watcher.run(ctx) })
	g.Go(func() error { return p.pods.run(ctx) })
	g.Go(func() error { return p.follow(ctx) })
	return g.Wait()
}

// Changed makes the publisher look whether the state has changed.
func (p *Publisher) Changed() { p.cluster.changed.Raise() }

// Recheck makes the publisher check permissions that are missing, because an admin may have granted them.
func (p *Publisher) Recheck() {
	if missing, _ := p.watcher.state(); len(missing) > 0 {
		p.watcher.poked.Send()
	}
}

// InServiceRange reports whether addr looks like a ClusterIP.
func (p *Publisher) InServiceRange(addr netip.Addr) bool {
	now := p.Notices.Load()
	return now.State.ResolvesVIPs &&
		slices.ContainsFunc(now.State.ServiceCIDRs, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// follow publishes the cluster's changes until ctx ends.
func (p *Publisher) follow(ctx context.Context) error {
	var due <-chan time.Time
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-p.cluster.changed:
			p.apply()
			if !p.IsReady() { // laptops wait for it
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

// IsReady reports whether the notices contain everything that the manager may know.
func (p *Publisher) IsReady() bool { return wakeup.IsClosed(p.Ready) }

// apply passes the changed Services to the balancer. Changes during a call wait for the next call, so bursts arrive in
// few batches.
func (p *Publisher) apply() {
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
		p.cfg.Policy.SetClaims(name, c.claims(name))
		if s != nil && p.cfg.Policy.AllowsNamespace(name.Namespace) {
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
	p.cfg.Balancer.SetZone(zone)
	p.cfg.Balancer.Apply(set, remove)
}

// resolves reports whether the balancer has the Services of a namespace.
func (p *Publisher) resolves(namespace string) bool {
	return slices.Contains(p.resolving, metav1.NamespaceAll) || slices.Contains(p.resolving, namespace)
}

// setName records whether a Service exists, and the hash of its DNS records.
func (p *Publisher) setName(name balancer.Name, exists bool, records uint64) {
	in := p.names[name.Namespace]
	before, existed := in[name.Name]
	switch {
	case exists == existed && before == records:
		return
	case exists && existed:
		p.changes.add(name, nameChanged)
	case exists:
		p.changes.add(name, nameAdded)
	default:
		p.changes.add(name, nameRemoved)
	}
	if exists != existed {
		delete(p.sorted, name.Namespace)
	}
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
func (p *Publisher) post() {
	missing, ready := p.watcher.state()
	n := &Notice{State: api.ManagerState{
		GVisorOnly: p.cfg.GVisorOnly, DNSServers: p.Self.DNS.Servers, DNSDomain: p.Self.DNS.Domain,
		Missing: slices.Clone(missing), Sessions: p.cfg.Laptops(), ResolvesVIPs: len(p.resolving) > 0,
	}}
	if watched := p.cluster.namespaces; watched[0] != metav1.NamespaceAll {
		n.State.Namespaces = watched
	}
	p.cfg.Policy.Describe(&n.State)
	if p.Self.NoEcho {
		n.State.Missing = append(n.State.Missing, "ICMP echo")
	}
	p.cluster.mu.Lock()
	ready = ready && len(p.cluster.dirty) == 0 && slices.Equal(p.resolving, p.cluster.resolving())
	if ready {
		p.pods.poked.Raise()
	}
	if settled := ready || p.IsReady(); p.cluster.needsCIDRs || settled != p.settled {
		p.cluster.needsCIDRs, p.settled = false, settled
		p.cluster.recount()
		p.found = p.cluster.networks.prefixes(settled)
		p.podSet = routable.Of(p.found.pods)
	}
	if p.cluster.needsHosts {
		p.cluster.needsHosts = false
		if hosts := p.cluster.hostAddrs(); hosts != nil { // if they are no longer known, what they were
			p.cfg.Filter.Hosts.Store(hosts)
		}
	}
	n.State.PodCIDRs, n.State.ServiceCIDRs, n.State.Ignored = p.found.pods, p.found.services, p.found.ignored
	n.State.StatedPodCIDRs, n.State.StatedServiceCIDRs = p.found.statedPods, p.found.statedServices
	if p.cluster.networks.mayNotRead {
		n.State.Missing = append(n.State.Missing, "get pods")
	}
	n.State.Direct = p.cluster.direct(p.Self)
	ready = ready && p.cluster.firstRoundDone
	p.cfg.Describe(&n.State)
	p.probes(&n.State)
	if p.cluster.knows(services) {
		n.names, n.changes = p.snapshot(), p.changes
	}
	p.cluster.mu.Unlock()
	p.publish(n)
	if ready && !p.IsReady() {
		close(p.Ready)
	}
}

// publish replaces the latest notice, unless n is equal.
func (p *Publisher) publish(n *Notice) {
	if !n.equal(p.Notices.Load()) {
		p.Notices.Update(func(latest **Notice) { *latest = n })
	}
}

func (p *Publisher) snapshot() map[string][]string {
	for namespace, names := range p.names {
		if p.sorted[namespace] == nil {
			p.sorted[namespace] = slices.Sorted(maps.Keys(names))
		}
	}
	return maps.Clone(p.sorted)
}
