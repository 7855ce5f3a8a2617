package watch

import (
	"maps"
	"net/netip"
	"reflect"
	"slices"
	"sync"
	"time"

	networkingv1 "k8s.io/api/networking/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/incluster/access"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/wakeup"
)

// cluster holds the converted objects of the API server. The watches write to it, and one goroutine (publisher.run)
// reads the changes:
//
//	watches ──▶ cluster ──changed──▶ publisher ──▶ balancer (at once)
//	                                     └───────▶ notices (at most every 100 ms) ──▶ laptops
type cluster struct {
	changed wakeup.Signal // something below has changed

	namespaces []string // whose Services the manager is to watch, sorted; only metav1.NamespaceAll: all
	scopes     []scope  // of these namespaces and of the cluster

	mu       sync.Mutex
	synced   map[scope]bool // all objects are known; false also when the manager may no longer watch the scope
	services map[balancer.Name]*service
	slices   map[balancer.Name]map[string]*endpointSlice // by Service, then by the slice's name
	owner    map[balancer.Name]balancer.Name             // a slice's Service
	nodes    map[balancer.Name]*node
	ranges   map[balancer.Name][]netip.Prefix // by ServiceCIDR

	dirty      map[balancer.Name]struct{} // Services to give to the balancer again
	networks   networks                   // derived from the maps above
	zone       string                     // of the manager's node, from the Node or from an endpoint on it
	nodeName   string
	needsCIDRs bool // networks has changed

	disproved      map[access.PodRef]time.Time // pods that did not have the address, and when they were read
	firstRoundDone bool                        // laptops no longer wait for the podReader
	needsHosts     bool                        // the result of hostAddrs has changed
}

// newCluster returns the cluster of a manager that watches these namespaces. None stands for all.
func newCluster(nodeName string, namespaces ...string) *cluster {
	namespaces = slices.Compact(slices.Sorted(slices.Values(namespaces)))
	if len(namespaces) == 0 {
		namespaces = []string{metav1.NamespaceAll}
	}
	return &cluster{
		changed:    wakeup.NewSignal(),
		namespaces: namespaces,
		scopes:     scopesOf(namespaces),
		synced:     make(map[scope]bool),
		services:   make(map[balancer.Name]*service),
		slices:     make(map[balancer.Name]map[string]*endpointSlice),
		owner:      make(map[balancer.Name]balancer.Name),
		nodes:      make(map[balancer.Name]*node),
		ranges:     make(map[balancer.Name][]netip.Prefix),
		dirty:      make(map[balancer.Name]struct{}),
		networks: networks{nodes: make(map[netip.Addr]struct{}), pods: make(blocks), clusterIPs: make(blocks),
			verified: make(map[netip.Prefix]struct{})},
		disproved: make(map[access.PodRef]time.Time),
		nodeName:  nodeName,
	}
}

// isSynced reports whether all objects of a scope are known.
func (c *cluster) isSynced(s scope) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.synced[s]
}

// knows reports whether the objects of a resource are known, at least in one namespace. Call with mu held.
func (c *cluster) knows(r resource) bool {
	return slices.ContainsFunc(c.scopes, func(s scope) bool { return s.resource == r && c.synced[s] })
}

// resolving returns those of c.namespaces in which the manager can resolve VIPs. It must know Services and
// EndpointSlices there, because it refuses connections to a Service without endpoints. Call with mu held.
func (c *cluster) resolving() (namespaces []string) {
	for _, ns := range c.namespaces {
		if c.synced[scope{services, ns}] && c.synced[scope{endpointSlices, ns}] {
			namespaces = append(namespaces, ns)
		}
	}
	return namespaces
}

// store returns the store that the watch of a scope writes to.
func (c *cluster) store(s scope) scopeStore {
	switch s.resource {
	case services:
		return storeOf(c, s, c.services, convertService, c.setService)
	case endpointSlices:
		return storeOf(c, s, c.owner, convertSlice, c.setSlice)
	case nodes:
		return storeOf(c, s, c.nodes, convertNode, c.setNode)
	default:
		return storeOf(c, s, c.ranges, func(s *networkingv1.ServiceCIDR) []netip.Prefix {
			return parsePrefixes(s.Spec.CIDRs)
		}, c.setRange)
	}
}

// The set functions below replace one object, or remove it if it is nil. Call them with mu held.

func (c *cluster) setService(name balancer.Name, s *service) {
	if old := c.services[name]; old != nil {
		c.countClusterIPs(old, -1)
	}
	delete(c.services, name)
	if s != nil {
		c.countClusterIPs(s, 1)
		c.services[name] = s
	}
	c.dirty[name] = struct{}{}
}

func (c *cluster) countClusterIPs(s *service, n int) {
	for _, addr := range s.clusterIPs {
		c.networks.clusterIPs.add(routable.ServiceBlock(addr), addr, n)
		c.needsCIDRs = true
	}
}

func (c *cluster) setSlice(name balancer.Name, s *endpointSlice) {
	if service, ok := c.owner[name]; ok {
		of := c.slices[service]
		c.countPods(of[name.Name], -1)
		c.needsHosts = c.needsHosts || c.isOnHost(of[name.Name])
		if delete(of, name.Name); len(of) == 0 {
			delete(c.slices, service)
		}
		delete(c.owner, name)
		c.dirty[service] = struct{}{}
	}
	if s == nil || s.service.Name == "" {
		return
	}
	c.countPods(s, 1)
	of := c.slices[s.service]
	if of == nil {
		of = make(map[string]*endpointSlice)
		c.slices[s.service] = of
	}
	of[name.Name] = s
	c.owner[name] = s.service
	c.dirty[s.service] = struct{}{}
	c.needsHosts = c.needsHosts || c.isOnHost(s)
	if c.zone == "" && c.nodeName != "" {
		for i := range s.endpoints {
			if e := &s.endpoints[i]; e.node == c.nodeName && e.zone != "" {
				c.zone = e.zone
			}
		}
	}
}

func (c *cluster) countPods(s *endpointSlice, n int) {
	for i := range s.endpoints {
		if e := &s.endpoints[i]; e.pod != "" {
			c.networks.pods.add(routable.PodBlock(e.addr), e.addr, n)
			c.needsCIDRs = true
		}
	}
}

// apiServer is the Service whose endpoints are the API server's own addresses.
var apiServer = balancer.Name{Namespace: "default", Name: "kubernetes"}

// isOnHost reports whether hostAddrs depends on s.
func (c *cluster) isOnHost(s *endpointSlice) bool {
	return s.service == apiServer || slices.ContainsFunc(s.endpoints, func(e endpoint) bool {
		_, ok := c.networks.nodes[e.addr]
		return ok
	})
}

// hostAddrs returns the addresses of nodes and the API server for the filter. It returns nil if the endpoints of
// Services are not known, since a pod on the host network could then not be told from its node. In namespaces that the
// manager does not watch, such a pod counts as its node. hostAddrs skips the endpoints of Service kubernetes, which
// laptops reach by its ClusterIP. Call with mu held.
func (c *cluster) hostAddrs() *access.Hosts {
	if !c.knows(endpointSlices) {
		return nil
	}
	h := &access.Hosts{Addrs: maps.Clone(c.networks.nodes), Endpoints: make(map[netip.AddrPort]struct{})}
	for _, s := range c.slices[apiServer] {
		for _, e := range s.endpoints {
			h.Addrs[e.addr] = struct{}{}
		}
	}
	for name, of := range c.slices {
		if name == apiServer {
			continue
		}
		for _, s := range of {
			s.addHosts(h)
		}
	}
	return h
}

// addHosts adds the endpoints of s at the addresses of h.
func (s *endpointSlice) addHosts(h *access.Hosts) {
	for _, e := range s.endpoints {
		if _, ok := h.Addrs[e.addr]; !ok {
			continue
		}
		h.Endpoints[netip.AddrPortFrom(e.addr, 0)] = struct{}{}
		for _, p := range s.ports {
			h.Endpoints[netip.AddrPortFrom(e.addr, p.port)] = struct{}{}
		}
	}
}

func (c *cluster) setNode(name balancer.Name, n *node) {
	if old := c.nodes[name]; old != nil && n != nil && reflect.DeepEqual(old, n) {
		return // a heartbeat, as most updates are
	}
	c.needsHosts = true
	if n != nil {
		c.nodes[name] = n
	} else {
		delete(c.nodes, name)
	}
	if name.Name == c.nodeName && n != nil {
		c.zone = n.zone
	}
	c.needsCIDRs = true
}

func (c *cluster) setRange(name balancer.Name, prefixes []netip.Prefix) {
	if prefixes != nil {
		c.ranges[name] = prefixes
	} else {
		delete(c.ranges, name)
	}
	c.needsCIDRs = true
}

// recount updates networks from nodes and ranges, which are few. Call with mu held.
func (c *cluster) recount() {
	n := &c.networks
	n.podCIDRs, n.ranges, n.nodesKnown = nil, nil, c.synced[scope{resource: nodes}]
	if n.nodesKnown { // otherwise what they were, so that the filter still knows them
		clear(n.nodes)
	}
	for _, node := range c.nodes {
		n.podCIDRs = append(n.podCIDRs, node.podCIDRs...)
		for _, addr := range node.addrs {
			n.nodes[addr] = struct{}{}
		}
	}
	for _, prefixes := range c.ranges {
		n.ranges = append(n.ranges, prefixes...)
	}
}
