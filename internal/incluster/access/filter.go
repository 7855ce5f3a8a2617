package access

import (
	"fmt"
	"net/netip"
	"slices"
	"sync/atomic"
	"syscall"

	"kubevpn/pkg/datapath/routable"
)

// Filter decides which addresses the manager dials for laptops. A laptop may reach what a pod may reach, with two
// exceptions: the manager's own loopback interface and addresses, and the metadata services of clouds, which hand out
// the identity of the node.
//
// The manager dials nodes and the API server only if a Service's endpoint has the address and the port, as for pods on
// the host network, or if the laptop's user named the address with --extra-cidr. The laptop itself reports the named
// networks: this guards against accidents and against other programs on the laptop, not against the user, who may use
// the manager.
//
// The networks of --allow-cidr and --deny-cidr are the admin's, and no laptop lifts them.
//
// The filter always allows the servers in the pod's resolv.conf on the DNS port, because NodeLocal DNSCache has a
// link-local address.
//
// The manager applies it to every address that it dials, also if the balancer chose it: a user who may write
// EndpointSlices decides what the balancer chooses (compare CVE-2020-8554).
//
// Set the other fields before use. Methods are safe for concurrent use.
type Filter struct {
	Pod   []netip.Addr // the manager's own addresses
	DNS   []netip.Addr
	Allow []netip.Prefix // of --allow-cidr: nothing else is dialed, unless there are none
	Deny  []netip.Prefix // of --deny-cidr

	Hosts atomic.Pointer[Hosts] // nil: unknown; it may change at any time
}

// Hosts contains the addresses of nodes and of the API server. It is immutable.
type Hosts struct {
	Addrs map[netip.Addr]struct{}
	// Endpoints are those of Services at these addresses, each once with its port, and once with port 0.
	Endpoints map[netip.AddrPort]struct{}
}

// metadata are the addresses of cloud metadata services that are not link-local. They hand out the identity of the
// node.
var metadata = []netip.Addr{
	netip.MustParseAddr("168.63.129.16"),      // Azure
	netip.MustParseAddr("100.100.100.200"),    // Alibaba Cloud
	netip.MustParseAddr("192.0.0.192"),        // Oracle Cloud
	netip.MustParseAddr("fd20:ce::254"),       // Google Cloud
	netip.MustParseAddr("fd00:42::42"),        // Scaleway (cloud-init, DataSourceScaleway)
	netip.MustParseAddr("fd00:c1::a9fe:a9fe"), // Oracle Cloud
}

var broadcast = netip.AddrFrom4([4]byte{255, 255, 255, 255})

// Allows reports whether dst may be dialed. A port of 0 means none (ICMP).
func (f *Filter) Allows(dst netip.AddrPort) bool {
	addr := dst.Addr().Unmap()
	if dst.Port() == DNSPort && slices.Contains(f.DNS, addr) {
		return true
	}
	if len(f.Allow) > 0 && !contain(f.Allow, addr) {
		return false
	}
	if addr.Is4() {
		return f.ordinary(addr)
	}
	within := routable.Embedded(addr)
	return f.ordinary(addr) && (!within[0].IsValid() || f.ordinary(within[0])) &&
		(!within[1].IsValid() || f.ordinary(within[1]))
}

// ordinary reports whether an address is neither special, nor the manager's own, nor denied by the admin.
func (f *Filter) ordinary(addr netip.Addr) bool {
	return addr.IsValid() && addr.Zone() == "" &&
		!addr.IsLoopback() && !addr.IsUnspecified() && !addr.IsMulticast() && !addr.IsLinkLocalUnicast() &&
		!isThisNetwork(addr) && addr != broadcast && !isNodeLocal(addr) &&
		!slices.Contains(metadata, addr) && !slices.Contains(f.Pod, addr) && !contain(f.Deny, addr)
}

// contain reports whether one of the networks contains addr.
func contain(networks []netip.Prefix, addr netip.Addr) bool {
	return slices.ContainsFunc(networks, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// isNodeLocal reports whether addr is in fd00:ec2::/32, where AWS has services for nodes: metadata at ::254, EKS Pod
// Identity at ::23, DNS and time; or in fec0::/10, the site-local network (RFC 3879), which has no use any more.
func isNodeLocal(addr netip.Addr) bool {
	if !addr.Is6() {
		return false
	}
	b := addr.As16()
	return [4]byte(b[:]) == [4]byte{0xfd, 0x00, 0x0e, 0xc2} || b[0] == 0xfe && b[1]&0xc0 == 0xc0
}

// allowsHost reports whether dst, which is not a ClusterIP, is neither a node nor the API server, or is one that the
// manager may dial. Port 0 stands for an unknown port: pings, and fragments of packets. extra are the networks of
// --extra-cidr.
func (f *Filter) allowsHost(dst netip.AddrPort, extra []netip.Prefix) bool {
	h := f.Hosts.Load()
	if h == nil {
		return true
	}
	addr := dst.Addr().Unmap()
	within := routable.Embedded(addr)
	return h.allows(addr, dst.Port()) && h.allows(within[0], dst.Port()) && h.allows(within[1], dst.Port()) ||
		dst.Port() == DNSPort && slices.Contains(f.DNS, addr) ||
		contain(extra, addr)
}

// allows reports whether addr is invalid or none of the addresses, or has an endpoint at the port.
func (h *Hosts) allows(addr netip.Addr, port uint16) bool {
	if !addr.IsValid() {
		return true
	}
	if _, ok := h.Addrs[addr]; !ok {
		return true
	}
	_, ok := h.Endpoints[netip.AddrPortFrom(addr, port)]
	return ok
}

// AllowsDirect reports whether a packet to dst may leave.
func (f *Filter) AllowsDirect(dst netip.AddrPort, extra []netip.Prefix) bool {
	return f.Allows(dst) && f.allowsHost(dst, extra)
}

// CheckHost returns an error that Is EACCES if allowsHost is false.
func (f *Filter) CheckHost(dst netip.AddrPort, extra []netip.Prefix) error {
	if f.allowsHost(dst, extra) {
		return nil
	}
	return fmt.Errorf("%v is a node or the API server and not an endpoint of a Service; allow it with --extra-cidr: %w",
		dst, syscall.EACCES)
}

// isThisNetwork reports whether addr is in 0.0.0.0/8: Linux treats some of its addresses as this host.
func isThisNetwork(addr netip.Addr) bool { return addr.Is4() && addr.As4()[0] == 0 }

// Check returns an error that Is EACCES if dst may not be dialed.
func (f *Filter) Check(dst netip.AddrPort) error {
	if f.Allows(dst) {
		return nil
	}
	return fmt.Errorf("dialing %v is not allowed: %w", dst, syscall.EACCES)
}
