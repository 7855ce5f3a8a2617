package manager

import (
	"fmt"
	"net/netip"
	"slices"
	"syscall"
)

// filter says where the manager may be sent. A laptop may reach through it what a pod may reach, but not the
// manager itself: its loopback interface, where it listens, and its own address, where nothing is for laptops;
// nor what is answered by the machine that the pod happens to run on and hands out that machine's identity
// (cloud metadata). Nodes are allowed: pods on the host network have their addresses.
//
// One exception: the servers in the pod's resolv.conf, on the port of DNS. NodeLocal DNSCache has a link-local
// address.
//
// It is applied to what is dialled, also when the balancer chose it: whoever may write EndpointSlices chooses
// there (CVE-2020-8554 has relatives).
type filter struct {
	pod []netip.Addr // the manager's own addresses
	dns []netip.Addr
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

// isThisNetwork reports whether addr is in 0.0.0.0/8: Linux takes some of it for this host.
func isThisNetwork(addr netip.Addr) bool { return addr.Is4() && addr.As4()[0] == 0 }

// check returns an error that Is EACCES if dst may not be dialled.
func (f *filter) check(dst netip.AddrPort) error {
	if f.allows(dst) {
		return nil
	}
	return fmt.Errorf("dialling %v is not allowed: %w", dst, syscall.EACCES)
}
