package packet

import (
	"encoding/binary"
	"net/netip"
)

// Mapping maps a network one to one to another of the same family and size: addresses keep their host part. Both
// prefixes are masked.
//
//	10.0.3.0/24 ⇄ 198.18.3.0/24:   10.0.3.4 ⇄ 198.18.3.4
type Mapping struct {
	Cluster netip.Prefix `json:"cluster"` // as the cluster knows it
	Local   netip.Prefix `json:"local"`   // as programs of this machine know it
}

// String returns CLUSTER=LOCAL.
func (m Mapping) String() string { return m.Cluster.String() + "=" + m.Local.String() }

// Mappings maps networks that do not overlap each other. It is a stateless translation of addresses (RFC 2663, section
// 4.1.1; RFC 6296 for IPv6, but with checksums updated instead of neutral addresses). Nil maps nothing.
type Mappings []Mapping

// ToCluster returns the address of the cluster that a means on this machine.
func (ms Mappings) ToCluster(a netip.Addr) netip.Addr {
	for i := range ms {
		if ms[i].Local.Contains(a) {
			return rebase(a, ms[i].Cluster)
		}
	}
	return a
}

// ToLocal returns the address by which this machine reaches the address a of the cluster.
func (ms Mappings) ToLocal(a netip.Addr) netip.Addr {
	for i := range ms {
		if ms[i].Cluster.Contains(a) {
			return rebase(a, ms[i].Local)
		}
	}
	return a
}

// rebase returns the address in network with the host part of a.
func rebase(a netip.Addr, network netip.Prefix) netip.Addr {
	bits := network.Bits()
	if a.Is4() {
		from, to := a.As4(), network.Addr().As4()
		host := binary.BigEndian.Uint32(from[:]) & (1<<(32-bits) - 1)
		binary.BigEndian.PutUint32(to[:], binary.BigEndian.Uint32(to[:])|host)
		return netip.AddrFrom4(to)
	}
	from, to := a.As16(), network.Addr().As16()
	for i := range to {
		if left := bits - 8*i; left < 8 {
			to[i] |= from[i] & (0xff >> max(left, 0))
		}
	}
	return netip.AddrFrom16(to)
}

// MaxHeaders is at least the length of all that Received changes in a packet: a virtio-net header, an IP header, and
// the headers that an ICMP error quotes. Packets with more IPv6 extension headers than real ones have may need more.
const MaxHeaders = 256

// Sent translates the destination of a packet that this machine sends into the cluster. b begins with the virtio-net
// header. A malformed packet stays as it is.
func (ms Mappings) Sent(b []byte) { ms.translate(b, true) }

// Received translates the source of a packet that this machine receives from the cluster. b begins with the virtio-net
// header and holds the packet, or its first [MaxHeaders] bytes.
func (ms Mappings) Received(b []byte) { ms.translate(b, false) }

// translate translates the far address of a packet, and the checksums that cover it. ICMP errors quote the beginning of
// the packet that they are about, which went the other way (RFC 5508, section 4.2):
//
//	to this machine:  [src cluster→local, dst]  ICMP  [src, dst cluster→local, transport]
func (ms Mappings) translate(b []byte, sent bool) {
	if len(b) < VirtioLen {
		return
	}
	p := b[VirtioLen:]
	h, err := parseQuote(p)
	if err != nil || h.HeaderLen > len(p) {
		return
	}
	payload := p[h.HeaderLen:]
	quotes := quotesPacket(&h, payload)
	change := ms.rewrite(p, &h, sent, sent)
	if change != 0 && h.FragmentOffset == 0 && h.Proto != ProtoICMP {
		// The checksum of a packet that the kernel completes holds the sum of the pseudo header.
		partial := b[0]&VirtioNeedsChecksum != 0 && int(binary.LittleEndian.Uint16(b[6:])) == h.HeaderLen
		updateTransport(h.Proto, payload, change, partial)
	}
	if !quotes {
		return
	}
	quote := payload[icmpHeaderLen:]
	q, err := parseQuote(quote)
	if err != nil || q.HeaderLen > len(quote) {
		return
	}
	// The address and the IPv4 checksum cancel out in the checksum of the error, as far as it covers both.
	inner := ms.rewrite(quote, &q, !sent, sent)
	if inner == 0 {
		return
	}
	covered := inner
	if q.Version == 4 {
		covered = 0
	}
	if q.FragmentOffset == 0 && q.Proto != ProtoICMP {
		covered = add(covered, updateTransport(q.Proto, quote[q.HeaderLen:], inner, false))
	}
	update(payload[2:], covered, false)
}

// quotesPacket reports whether a packet is an ICMP error, of which payload is all or the beginning.
func quotesPacket(h *Header, payload []byte) bool {
	if h.FragmentOffset != 0 || len(payload) < icmpHeaderLen {
		return false
	}
	switch h.Proto {
	case ProtoICMP:
		switch payload[0] {
		case icmpUnreachable, icmpRedirect, icmpTimeExceeded, icmpParameterProblem:
			return true
		}
	case ProtoICMPv6:
		return payload[0] < 128 // RFC 4443, section 2.1
	}
	return false
}

// rewrite replaces the destination of p, or its source, and updates the checksum of an IPv4 header. It returns the
// difference of the sums of both addresses; 0 if the address stays.
func (ms Mappings) rewrite(p []byte, h *Header, destination, toCluster bool) (change uint16) {
	was, at, length := h.Src, 12, 4
	if h.Version == 6 {
		at, length = 8, 16
	}
	if destination {
		was, at = h.Dst, at+length
	}
	is := was
	if toCluster {
		is = ms.ToCluster(was)
	} else {
		is = ms.ToLocal(was)
	}
	if is == was {
		return 0
	}
	field := p[at : at+length]
	change = ^Checksum(field, 0)
	if h.Version == 4 {
		a := is.As4()
		copy(field, a[:])
	} else {
		a := is.As16()
		copy(field, a[:])
	}
	change = Checksum(field, change)
	if h.Version == 4 {
		update(p[10:], change, false)
	}
	return change
}

// updateTransport updates the checksum of a transport header whose pseudo header has changed, if the packet has one and
// holds it. It returns the difference of the old and the new field.
func updateTransport(proto uint8, transport []byte, change uint16, partial bool) uint16 {
	offset, ok := ChecksumOffset(proto)
	if proto == ProtoICMPv6 {
		offset, ok = 2, true
	}
	if !ok || len(transport) < offset+2 {
		return 0
	}
	field := transport[offset:]
	was := binary.BigEndian.Uint16(field)
	if proto == ProtoUDP && was == 0 && !partial {
		return 0 // RFC 768: no checksum
	}
	update(field, change, partial)
	if proto == ProtoUDP && binary.BigEndian.Uint16(field) == 0 {
		binary.BigEndian.PutUint16(field, 0xffff)
	}
	return add(binary.BigEndian.Uint16(field), ^was)
}

// update adds a change of the sum to a checksum: HC' = ~(~HC + ~m + m') (RFC 1624, equation 3). A partial one is the
// sum itself.
func update(field []byte, change uint16, partial bool) {
	sum := binary.BigEndian.Uint16(field)
	if partial {
		sum = add(sum, change)
	} else {
		sum = ^add(^sum, change)
	}
	binary.BigEndian.PutUint16(field, sum)
}
