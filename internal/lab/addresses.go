package lab

import (
	"fmt"
	"net/netip"
)

// Numbers that are the same in every lab.
const (
	APIPort  = 6443 // of the API server, on node 1's address
	MaxNodes = 9    // more than one machine bears, and one digit in every address
)

// Family is one address family of a lab: which networks there are and who has which address.
type Family struct {
	NodeNet    netip.Prefix // the nodes and the router
	LaptopNet  netip.Prefix // the laptop and the router
	Pods       netip.Prefix // the cluster's pod range; each node has a part of it, see PodRange
	Services   netip.Prefix
	Router     netip.Addr // on NodeNet: the nodes' gateway and name server
	Gateway    netip.Addr // on LaptopNet: the laptop's gateway and name server
	Laptop     netip.Addr
	Outside    netip.Addr // www.outside.test, on the router, routed to from everywhere
	Kubernetes netip.Addr // ClusterIP of the API server's Service
	ClusterDNS netip.Addr // ClusterIP of CoreDNS

	nodePodBits int
}

func ipv4() Family {
	return Family{
		NodeNet:     netip.MustParsePrefix("10.99.0.0/24"),
		LaptopNet:   netip.MustParsePrefix("10.98.0.0/24"),
		Pods:        netip.MustParsePrefix("10.244.0.0/16"),
		Services:    netip.MustParsePrefix("10.96.0.0/16"),
		Router:      netip.MustParseAddr("10.99.0.254"),
		Gateway:     netip.MustParseAddr("10.98.0.1"),
		Laptop:      netip.MustParseAddr("10.98.0.2"),
		Outside:     netip.MustParseAddr("203.0.113.10"),
		Kubernetes:  netip.MustParseAddr("10.96.0.1"),
		ClusterDNS:  netip.MustParseAddr("10.96.0.10"),
		nodePodBits: 24,
	}
}

func ipv6() Family {
	return Family{
		NodeNet:     netip.MustParsePrefix("fd00:10:99::/64"),
		LaptopNet:   netip.MustParsePrefix("fd00:10:98::/64"),
		Pods:        netip.MustParsePrefix("fd00:10:244::/48"),
		Services:    netip.MustParsePrefix("fd00:10:96::/112"),
		Router:      netip.MustParseAddr("fd00:10:99::fe"),
		Gateway:     netip.MustParseAddr("fd00:10:98::1"),
		Laptop:      netip.MustParseAddr("fd00:10:98::2"),
		Outside:     netip.MustParseAddr("2001:db8:113::10"),
		Kubernetes:  netip.MustParseAddr("fd00:10:96::1"),
		ClusterDNS:  netip.MustParseAddr("fd00:10:96::a"),
		nodePodBits: 64,
	}
}

// Node is the address of node number n, from 1.
func (f Family) Node(n int) netip.Addr { return nth(f.NodeNet.Addr(), n) }

// PodRange is the part of Pods that node number n has.
func (f Family) PodRange(n int) netip.Prefix {
	b := f.Pods.Addr().AsSlice()
	b[f.nodePodBits/8-1] = byte(n)
	a, _ := netip.AddrFromSlice(b) // 4 or 16 bytes, by construction
	return netip.PrefixFrom(a, f.nodePodBits)
}

// nth is the network's address with n, at most 255, in its last byte.
func nth(network netip.Addr, n int) netip.Addr {
	b := network.AsSlice()
	b[len(b)-1] = byte(n)
	a, _ := netip.AddrFromSlice(b) // 4 or 16 bytes, by construction
	return a
}

// Families are the lab's address families: IPv4, and IPv6 if it has that.
func (c Config) Families() []Family {
	if c.IPv6 {
		return []Family{ipv4(), ipv6()}
	}
	return []Family{ipv4()}
}

// joined is one field of each family, comma-separated, as Kubernetes' flags take them.
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
