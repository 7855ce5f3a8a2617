package watch

import (
	"hash/maphash"
	"net/netip"
	"slices"
	"time"
	"unique"

	corev1 "k8s.io/api/core/v1"
	discoveryv1 "k8s.io/api/discovery/v1"
	"k8s.io/apimachinery/pkg/util/validation"
	"k8s.io/utils/ptr"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/balancer"
)

// The types below keep only the fields of API objects that are needed to join Services with their endpoints and to find
// the cluster's networks, so a large cluster fits into little memory.

type service struct {
	// clusterIPs is empty for headless and ExternalName Services, and for those whose virtual IP another proxy
	// serves (label service.kubernetes.io/service-proxy-name), which kube-proxy ignores too.
	clusterIPs   []netip.Addr
	affinity     time.Duration
	localOnly    bool
	ports        []servicePort
	externalName string
	exposed      *exposure // nil: the Service has neither node ports nor a load balancer
}

type servicePort struct {
	name     string
	protocol balancer.Protocol
	port     uint16
}

// endpointSlice is one EndpointSlice: each of its endpoints has each of its ports.
type endpointSlice struct {
	service   balancer.Name
	ports     []servicePort
	endpoints []endpoint
}

type endpoint struct {
	addr                        netip.Addr
	node, zone                  string
	ready, serving, terminating bool
	pod                         string // the name of the pod behind it, by its targetRef; empty: none
	zoneHints, nodeHints        []string
}

type node struct {
	podCIDRs []netip.Prefix
	addrs    []netip.Addr
	zone     string
}

// proxyNameLabel selects another implementation of a Service's virtual IP than kube-proxy.
const proxyNameLabel = "service.kubernetes.io/service-proxy-name"

// defaultAffinity is the API server's default for ClientIP affinity.
const defaultAffinity = time.Duration(corev1.DefaultClientIPServiceAffinitySeconds) * time.Second

func convertService(s *corev1.Service) *service {
	c := &service{localOnly: ptr.Equal(s.Spec.InternalTrafficPolicy, new(corev1.ServiceInternalTrafficPolicyLocal))}
	_, other := s.Labels[proxyNameLabel]
	if s.Spec.Type != corev1.ServiceTypeExternalName && !other {
		c.clusterIPs = clusterIPs(s)
	}
	if s.Spec.SessionAffinity == corev1.ServiceAffinityClientIP {
		c.affinity = defaultAffinity
		if config := s.Spec.SessionAffinityConfig; config != nil && config.ClientIP != nil &&
			config.ClientIP.TimeoutSeconds != nil {
			c.affinity = time.Duration(*config.ClientIP.TimeoutSeconds) * time.Second
		}
	}
	for _, p := range s.Spec.Ports {
		if protocol, ok := convertProtocol(p.Protocol); ok && p.Port > 0 && p.Port <= 65535 {
			c.ports = append(c.ports, servicePort{intern(p.Name), protocol, uint16(p.Port)})
		}
	}
	if s.Spec.Type == corev1.ServiceTypeExternalName {
		c.externalName = s.Spec.ExternalName
	}
	c.exposed = convertExposure(s)
	return c
}

// hashRecords returns a hash of everything that a Service's DNS records depend on.
func hashRecords(seed maphash.Seed, s *service, slices map[string]*endpointSlice) uint64 {
	var h maphash.Hash
	h.SetSeed(seed)
	maphash.WriteComparable(&h, s.externalName)
	for _, addr := range s.clusterIPs {
		maphash.WriteComparable(&h, addr)
	}
	for _, port := range s.ports {
		maphash.WriteComparable(&h, port)
	}
	sum := h.Sum64()
	if len(s.clusterIPs) > 0 {
		return sum
	}
	for _, sl := range slices { // in any order
		for i := range sl.endpoints {
			e := &sl.endpoints[i]
			sum += maphash.Comparable(seed, struct {
				addr  netip.Addr
				ready bool
			}{e.addr, e.ready})
		}
	}
	return sum
}

// clusterIPs returns s's virtual IPs. It leaves out externalIPs and status.loadBalancer because of CVE-2020-8554.
func clusterIPs(s *corev1.Service) []netip.Addr {
	texts := s.Spec.ClusterIPs
	if len(texts) == 0 {
		texts = []string{s.Spec.ClusterIP}
	}
	return parseAddrs(texts) // "None" and "" do not parse
}

// parseAddrs returns the addresses among texts.
func parseAddrs(texts []string) (addrs []netip.Addr) {
	for _, text := range texts {
		if addr, err := netip.ParseAddr(text); err == nil {
			addrs = append(addrs, addr.Unmap())
		}
	}
	return addrs
}

func convertSlice(s *discoveryv1.EndpointSlice) *endpointSlice {
	c := &endpointSlice{service: balancer.Name{Namespace: intern(s.Namespace),
		Name: intern(s.Labels[discoveryv1.LabelServiceName])}}
	for _, p := range s.Ports {
		if p.Name == nil || p.Port == nil || *p.Port <= 0 || *p.Port > 65535 {
			continue
		}
		if protocol, ok := convertProtocol(ptr.Deref(p.Protocol, corev1.ProtocolTCP)); ok {
			c.ports = append(c.ports, servicePort{intern(*p.Name), protocol, uint16(*p.Port)})
		}
	}
	for i := range s.Endpoints {
		if e, ok := convertEndpoint(&s.Endpoints[i], s.AddressType); ok {
			if ref := s.Endpoints[i].TargetRef; ref != nil {
				e.pod = podName(ref, s.Namespace)
			}
			c.endpoints = append(c.endpoints, e)
		}
	}
	return c
}

// convertEndpoint converts e, unless its address is not of the slice's type. It uses only the first address, as
// kube-proxy does, because "all are fungible" (discovery/v1).
func convertEndpoint(e *discoveryv1.Endpoint, addressType discoveryv1.AddressType) (endpoint, bool) {
	if len(e.Addresses) == 0 {
		return endpoint{}, false
	}
	addr, err := netip.ParseAddr(e.Addresses[0])
	if err != nil || addr.Zone() != "" {
		return endpoint{}, false
	}
	addr = addr.Unmap()
	isIPv4 := addressType == discoveryv1.AddressTypeIPv4
	if !isIPv4 && addressType != discoveryv1.AddressTypeIPv6 || addr.Is4() != isIPv4 {
		return endpoint{}, false
	}
	c := endpoint{
		addr: addr, node: intern(ptr.Deref(e.NodeName, "")), zone: intern(ptr.Deref(e.Zone, "")),
		// The API's defaults are ready, serving, not terminating.
		ready:       ptr.Deref(e.Conditions.Ready, true),
		serving:     ptr.Deref(e.Conditions.Serving, true),
		terminating: ptr.Deref(e.Conditions.Terminating, false),
	}
	if e.Hints != nil {
		c.zoneHints = api.Texts(e.Hints.ForZones, func(z discoveryv1.ForZone) string { return intern(z.Name) })
		c.nodeHints = api.Texts(e.Hints.ForNodes, func(n discoveryv1.ForNode) string { return intern(n.Name) })
	}
	return c, true
}

// podName returns the name of the pod that an endpoint in namespace refers to, or "".
func podName(ref *corev1.ObjectReference, namespace string) string {
	if ref.Kind != "Pod" || len(ref.Name) > validation.DNS1123SubdomainMaxLength || ref.Namespace != "" &&
		ref.Namespace != namespace {
		return ""
	}
	return ref.Name
}

func convertProtocol(p corev1.Protocol) (balancer.Protocol, bool) {
	switch p {
	case corev1.ProtocolTCP, "":
		return balancer.TCP, true
	case corev1.ProtocolUDP:
		return balancer.UDP, true
	}
	return 0, false
}

func convertNode(n *corev1.Node) *node {
	c := &node{zone: n.Labels[corev1.LabelTopologyZone], podCIDRs: parsePrefixes(n.Spec.PodCIDRs)}
	c.addrs = parseAddrs(api.Texts(n.Status.Addresses, func(a corev1.NodeAddress) string { return a.Address }))
	return c
}

func parsePrefixes(texts []string) []netip.Prefix {
	var prefixes []netip.Prefix
	for _, text := range texts {
		if p, err := netip.ParsePrefix(text); err == nil {
			prefixes = append(prefixes, p.Masked())
		}
	}
	return prefixes
}

// join builds the balancer's Service from a Service and its EndpointSlices.
func join(name balancer.Name, s *service, slices map[string]*endpointSlice) balancer.Service {
	b := balancer.Service{Name: name, ClusterIPs: s.clusterIPs, Affinity: s.affinity, LocalOnly: s.localOnly}
	for _, p := range s.ports {
		port := balancer.Port{Protocol: p.protocol, Port: p.port}
		for _, sl := range slices {
			port.Endpoints = append(port.Endpoints, sl.behind(p)...)
		}
		b.Ports = append(b.Ports, port)
	}
	return b
}

// behind returns the endpoints for a Service's port. The slice's port with the same name and protocol has the number of
// the target port.
func (s *endpointSlice) behind(p servicePort) []balancer.Endpoint {
	i := slices.IndexFunc(s.ports, func(q servicePort) bool { return q.name == p.name && q.protocol == p.protocol })
	if i < 0 {
		return nil
	}
	endpoints := make([]balancer.Endpoint, len(s.endpoints))
	for j, e := range s.endpoints {
		endpoints[j] = balancer.Endpoint{
			Addr: netip.AddrPortFrom(e.addr, s.ports[i].port), Node: e.node,
			Ready: e.ready, Serving: e.serving, Terminating: e.terminating,
			ZoneHints: e.zoneHints, NodeHints: e.nodeHints,
		}
	}
	return endpoints
}

// intern makes equal strings share their bytes, because each endpoint repeats node names and zones.
func intern(s string) string { return unique.Make(s).Value() }
