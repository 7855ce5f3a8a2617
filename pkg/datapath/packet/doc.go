// Package packet reads and writes the headers of IP packets:
//
//   - IPv4 and IPv6, with extension headers and fragments
//   - the virtio-net header that a TUN device puts before a packet, and the work that it leaves to the receiver:
//     checksums and the segments of TCP super-packets
//   - ICMP errors, echo requests and replies, UDP, and the Internet checksum
//
// It is the lowest layer of the data path: [kubevpn/pkg/datapath/tun] moves packets,
// [kubevpn/pkg/datapath/netstack] terminates their flows and [kubevpn/pkg/datapath/packetlink] carries them whole.
//
// The package has no state, does no I/O and does not allocate on the hot path. All functions may be called
// concurrently, and none retains a slice that it is given.
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
	// MaxLen is the length of the longest packet: an IPv6 header and 65535 bytes. An IPv4 packet has at most 65535.
	MaxLen = IPv6HeaderLen + 65535
)
