package manager

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"
)

// filter decides which addresses the manager dials for laptops. A laptop may reach what a pod may reach, with two
// exceptions: the manager's own loopback interface and addresses, and the metadata services of clouds, which hand out
// the identity of the node.
//
// The manager dials nodes and the API server only if a Service's endpoint has the address and the port, as for pods on
// the host network, or if the laptop's user named the address with --extra-cidr. The laptop itself reports the named
// networks: this guards against accidents and against other programs on the laptop, not against the user, who may use
// the manager.
//
// The filter always allows the servers in the pod's resolv.conf on the DNS port, because NodeLocal DNSCache has a
// link-local address.
//
// The manager applies it to every address that it dials, also if the balancer chose it: a user who may write
// EndpointSlices decides what the balancer chooses (compare CVE-2020-8554).
type filter struct {
	pod   []netip.Addr // the manager's own addresses
	dns   []netip.Addr
	hosts atomic.Pointer[hostAddrs] // nil: unknown
}

// hostAddrs contains the addresses of nodes and of the API server. It is immutable.
type hostAddrs struct {
	addrs map[netip.Addr]struct{}
	// endpoints are those of Services at these addresses, each once with its port, and once with port 0.
	endpoints map[netip.AddrPort]struct{}
}

// metadata are the addresses of cloud metadata services that are not link-local.
var metadata = []netip.Addr{
	netip.MustParseAddr("168.63.129.16"),   // Azure
	netip.MustParseAddr("100.100.100.200"), // Alibaba Cloud
	netip.MustParseAddr("fd00:ec2::254"),   // AWS
	netip.MustParseAddr("fd20:ce::254"),    // Google Cloud
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// allows reports whether dst may be dialled. A port of 0 means none (ICMP).
func (f *filter) allows(dst netip.AddrPort) bool {
	addr := dst.Addr().Unmap()
	if dst.Port() == dnsPort && slices.Contains(f.dns, addr) {
		return true
	}
	return addr.IsValid() && addr.Zone() == "" &&
		!addr.IsLoopback() && !addr.IsUnspecified() && !addr.IsMulticast() && !addr.IsLinkLocalUnicast() &&
		!isThisNetwork(addr) && addr != broadcast &&
		!slices.Contains(metadata, addr) && !slices.Contains(f.pod, addr)
}

// allowsHost reports whether dst, which is not a ClusterIP, is neither a node nor the API server, or is one that the
// manager may dial. Port 0 stands for an unknown port: pings, and fragments of packets. extra are the networks of
// --extra-cidr.
func (f *filter) allowsHost(dst netip.AddrPort, extra []netip.Prefix) bool {
	h := f.hosts.Load()
	if h == nil {
		return true
	}
	addr := dst.Addr().Unmap()
	if _, ok := h.addrs[addr]; !ok {
		return true
	}
	_, ok := h.endpoints[netip.AddrPortFrom(addr, dst.Port())]
	return ok || dst.Port() == dnsPort && slices.Contains(f.dns, addr) ||
		slices.ContainsFunc(extra, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// allowsDirect reports whether a packet to dst may leave.
func (f *filter) allowsDirect(dst netip.AddrPort, extra []netip.Prefix) bool {
	return f.allows(dst) && f.allowsHost(dst, extra)
}

// checkHost returns an error that Is EACCES if allowsHost is false.
func (f *filter) checkHost(dst netip.AddrPort, extra []netip.Prefix) error {
	if f.allowsHost(dst, extra) {
		return nil
	}
	return fmt.Errorf("%v is a node or the API server and not an endpoint of a Service; allow it with --extra-cidr: %w",
		dst, syscall.EACCES)
}

// isThisNetwork reports whether addr is in 0.0.0.0/8: Linux treats some of its addresses as this host.
func isThisNetwork(addr netip.Addr) bool { return addr.Is4() && addr.As4()[0] == 0 }

// check returns an error that Is EACCES if dst may not be dialled.
func (f *filter) check(dst netip.AddrPort) error {
	if f.allows(dst) {
		return nil
	}
	return fmt.Errorf("dialling %v is not allowed: %w", dst, syscall.EACCES)
}
