// Package packet reads and writes the headers that IP packets begin with: IPv4 and IPv6 with extension headers and
// fragments, the virtio-net header that a TUN device puts in front of them and the work that it leaves to do
// (checksums, TCP super-packets), ICMP errors and echo replies, and the Internet checksum. It is the lowest layer of
// the data path: [kubevpn/pkg/datapath/tun] moves packets, [kubevpn/pkg/datapath/netstack] ends the flows that are in
// them, and both describe them with this package.
//
// Nothing here keeps state, allocates on the hot path or does I/O. All functions may be called concurrently. Slices
// that are passed in are never kept.
package packet

// Numbers of the transport protocols that kubevpn carries or speaks (IANA "Assigned Internet Protocol Numbers").
const (
	ProtoICMP   = 1
	ProtoTCP    = 6
	ProtoUDP    = 17
	ProtoICMPv6 = 58
)

const (
	// IPv4HeaderLen is the length of an IPv4 header without options.
	IPv4HeaderLen = 20
	// IPv6HeaderLen is the length of the fixed IPv6 header.
	IPv6HeaderLen = 40
	// FragmentHeaderLen is the length of the IPv6 Fragment extension header.
	FragmentHeaderLen = 8
	// MaxLen is the longest packet: an IPv6 header and 65535 bytes behind it. (IPv4 packets end at 65535.)
	MaxLen = IPv6HeaderLen + 65535
)
