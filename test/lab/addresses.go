package lab

import (
	"fmt"
	"net/netip"
)

// Constants that are the same in every lab.
const (
	APIPort      = 6443 // of the API server, see Config.APIServer
	RegistryPort = 5000 // see Config.Registry
	MaxNodes     = 9    // more than one machine can run; one digit in every address
)

// Family contains the networks and addresses of a lab in one address family.
type Family struct {
	NodeNet    netip.Prefix // the nodes and the router
	LaptopNet  netip.Prefix // the laptop and the router
	LineNet    netip.Prefix // the same two, while Stretch puts a line between them; IPv4 only
	Pods       netip.Prefix // the cluster's pod range; each node has a part of it, see PodRange
	Services   netip.Prefix
	Router     netip.Addr // on NodeNet: the nodes' gateway and name server
	Control    netip.Addr // on NodeNet: the control plane, if it is not on node 1
	Gateway    netip.Addr // on LaptopNet: the laptop's gateway and name server
	Laptop     netip.Addr
	Outside    netip.Addr // www.outside.test, on the router, routed to from everywhere
	Kubernetes netip.Addr // ClusterIP of the API server's Service
	ClusterDNS netip.Addr // ClusterIP of CoreDNS

	nodePodBits int
}

// ipv4 returns a lab's IPv4 networks, from one of two disjoint sets.
func ipv4(set int) Family {
	f := Family{
		NodeNet:     netip.MustParsePrefix("10.99.0.0/24"),
		LaptopNet:   netip.MustParsePrefix("10.98.0.0/24"),
		LineNet:     netip.MustParsePrefix("10.97.0.0/30"),
		Pods:        netip.MustParsePrefix("10.244.0.0/16"),
		Services:    netip.MustParsePrefix("10.96.0.0/16"),
		Outside:     netip.MustParseAddr("203.0.113.10"),
		nodePodBits: 24,
	}
	if set == 2 {
		f.NodeNet = netip.MustParsePrefix("10.199.0.0/24")
		f.LaptopNet = netip.MustParsePrefix("10.198.0.0/24")
		f.LineNet = netip.MustParsePrefix("10.197.0.0/30")
		f.Pods = netip.MustParsePrefix("10.144.0.0/16")
		f.Services = netip.MustParsePrefix("10.196.0.0/16")
		f.Outside = netip.MustParseAddr("203.0.113.20")
	}
	return f.withHosts()
}

// ipv6 returns the IPv6 networks: unique local addresses, except that of www.outside.test.
func ipv6(set int) Family {
	f := Family{
		NodeNet:     netip.MustParsePrefix("fd00:10:99::/64"),
		LaptopNet:   netip.MustParsePrefix("fd00:10:98::/64"),
		Pods:        netip.MustParsePrefix("fd00:10:244::/48"),
		Services:    netip.MustParsePrefix("fd00:10:96::/112"),
		Outside:     netip.MustParseAddr("2001:db8:113::10"),
		nodePodBits: 64,
	}
	if set == 2 {
		f.NodeNet = netip.MustParsePrefix("fd00:10:199::/64")
		f.LaptopNet = netip.MustParsePrefix("fd00:10:198::/64")
		f.Pods = netip.MustParsePrefix("fd00:10:144::/48")
		f.Services = netip.MustParsePrefix("fd00:10:196::/112")
		f.Outside = netip.MustParseAddr("2001:db8:113::20")
	}
	return f.withHosts()
}

// withHosts adds the addresses that follow from the networks.
func (f Family) withHosts() Family {
	f.Router = nth(f.NodeNet.Addr(), 254)
	f.Control = nth(f.NodeNet.Addr(), 253)
	f.Gateway = nth(f.LaptopNet.Addr(), 1)
	f.Laptop = nth(f.LaptopNet.Addr(), 2)
	f.Kubernetes = nth(f.Services.Addr(), 1)
	f.ClusterDNS = nth(f.Services.Addr(), 10)
	return f
}

// Node returns the address of node n, counted from 1.
func (f Family) Node(n int) netip.Addr { return nth(f.NodeNet.Addr(), n) }

// PodRange returns the part of Pods that belongs to node n.
func (f Family) PodRange(n int) netip.Prefix {
	b := f.Pods.Addr().AsSlice()
	b[f.nodePodBits/8-1] = byte(n)
	a, _ := netip.AddrFromSlice(b) // 4 or 16 bytes, by construction
	return netip.PrefixFrom(a, f.nodePodBits)
}

// nth returns the network's address with n, at most 255, as its last byte.
func nth(network netip.Addr, n int) netip.Addr {
	b := network.AsSlice()
	b[len(b)-1] = byte(n)
	a, _ := netip.AddrFromSlice(b) // 4 or 16 bytes, by construction
	return a
}

// Families returns the lab's address families: IPv4, and IPv6 if enabled.
func (c Config) Families() []Family {
	if c.IPv6 {
		return []Family{ipv4(c.Ranges), ipv6(c.Ranges)}
	}
	return []Family{ipv4(c.Ranges)}
}

// Registry returns the address of the registry that the nodes use without TLS. Nothing listens there until a
// program serves a registry on the router (Lab.Listen). The laptop reaches it too.
func (c Config) Registry() netip.AddrPort {
	return netip.AddrPortFrom(c.Families()[0].Outside, RegistryPort)
}

// joined returns one field of each family, separated by commas as in Kubernetes' flags.
func joined[T fmt.Stringer](families []Family, field func(Family) T) string {
	s := ""
	for i, f := range families {
		if i > 0 {
			s += ","
		}
		s += field(f).String()
	}
	return s
}
