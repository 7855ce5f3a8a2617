package packet

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// Reason is the reason why a packet was not delivered. Each has one ICMP type and code in each family.
type Reason uint8

// The reasons. 0 is not a Reason.
const (
	NetUnreachable Reason = iota + 1 // no route
	HostUnreachable
	ProtocolUnreachable
	PortUnreachable
	Prohibited // by administration
)

// ErrNoError is the error for a packet about which no ICMP error may be sent (RFC 1122, section 3.2.2; RFC 4443,
// section 2.4): an ICMP error, a fragment other than the first, a packet whose source or destination is not a single
// host.
var ErrNoError = errors.New("no ICMP error may be sent about this packet")

const (
	icmpHeaderLen = 8
	// An ICMP error is no longer than the packets that every host must accept (RFC 1812, section 4.3.2.3; RFC 4443,
	// section 2.4).
	maxErrorLen4 = 576
	maxErrorLen6 = 1280
)

// MaxQuote is the most bytes of a packet that an ICMPv4 error quotes. A caller that may report an error later keeps no
// more of the packet.
const MaxQuote = maxErrorLen4 - IPv4HeaderLen - icmpHeaderLen

// ICMP types (RFC 792, RFC 4443).
const (
	icmpEchoReply        = 0
	icmpUnreachable      = 3
	icmpRedirect         = 5
	icmpEchoRequest      = 8
	icmpTimeExceeded     = 11
	icmpParameterProblem = 12

	icmp6Unreachable      = 1
	icmp6ParameterProblem = 4
	icmp6EchoRequest      = 128
	icmp6EchoReply        = 129
)

// icmpErrors are the ICMP and ICMPv6 errors of each Reason.
var icmpErrors = [...]struct{ type4, code4, type6, code6 uint8 }{
	NetUnreachable:      {icmpUnreachable, 0, icmp6Unreachable, 0},
	HostUnreachable:     {icmpUnreachable, 1, icmp6Unreachable, 3},
	ProtocolUnreachable: {icmpUnreachable, 2, icmp6ParameterProblem, 1},
	PortUnreachable:     {icmpUnreachable, 3, icmp6Unreachable, 4},
	Prohibited:          {icmpUnreachable, 13, icmp6Unreachable, 1},
}

// AppendError appends to dst an IP packet with the ICMP error that reports reason to the sender of original. from is
// the source of the error and must be of the same family. original is the packet or its beginning, with all headers and
// at least 8 bytes of the transport header. Senders compare the quoted bytes with the packet that they sent, so
// original must be unchanged. The error is [ErrNoError] or one of [Parse].
func AppendError(dst []byte, reason Reason, from netip.Addr, original []byte) ([]byte, error) {
	h, err := parseQuote(original)
	if err != nil {
		return dst, err
	}
	if !mayReport(&h, original) || from.Is4() != h.Src.Is4() {
		return dst, ErrNoError
	}
	quote := original[:min(len(original), h.Len)]
	out := Outgoing{Src: from, Dst: h.Src, Proto: ProtoICMP}
	e := icmpErrors[reason]
	typ, code := e.type4, e.code4
	limit := MaxQuote
	if h.Version == 6 {
		out.Proto = ProtoICMPv6
		typ, code = e.type6, e.code6
		limit = maxErrorLen6 - IPv6HeaderLen - icmpHeaderLen
	}
	quote = quote[:min(len(quote), limit)]
	out.PayloadLen = icmpHeaderLen + len(quote)
	dst = out.Append(dst)
	start := len(dst)
	dst = append(dst, typ, code, 0, 0, 0, 0, 0, 0)
	if typ == icmp6ParameterProblem && h.Version == 6 {
		binary.BigEndian.PutUint32(dst[start+4:], 6) // offset of the packet's Next Header
	}
	dst = append(dst, quote...)
	sum := uint16(0)
	if h.Version == 6 {
		sum = PseudoHeader(ProtoICMPv6, from, h.Src, out.PayloadLen)
	}
	binary.BigEndian.PutUint16(dst[start+2:], ^Checksum(dst[start:], sum))
	return dst, nil
}

// parseQuote is Parse for the beginning of a packet.
func parseQuote(p []byte) (Header, error) {
	h, err := Parse(p)
	if !errors.Is(err, ErrTruncated) {
		return h, err
	}
	// Parse a copy whose header states the length of the beginning.
	var short [IPv6HeaderLen + 256]byte
	n := copy(short[:], p)
	if n >= IPv4HeaderLen && short[0]>>4 == 4 {
		binary.BigEndian.PutUint16(short[2:], uint16(n))
	} else if n >= IPv6HeaderLen {
		binary.BigEndian.PutUint16(short[4:], uint16(n-IPv6HeaderLen))
	}
	h, err = Parse(short[:n])
	h.Len = len(p)
	return h, err
}

// mayReport reports whether an ICMP error about p may be sent.
func mayReport(h *Header, p []byte) bool {
	if h.FragmentOffset != 0 || !isHost(h.Src) || !isHost(h.Dst) || len(p) < h.HeaderLen+8 {
		return false
	}
	switch t := p[h.HeaderLen]; h.Proto {
	case ProtoICMP:
		return t == icmpEchoRequest || t == icmpEchoReply
	case ProtoICMPv6:
		return t >= 128 // lower types are errors (RFC 4443, section 2.1)
	}
	return true
}

func isHost(a netip.Addr) bool {
	return !a.IsUnspecified() && !a.IsMulticast() && a != netip.AddrFrom4([4]byte{255, 255, 255, 255})
}

// EchoReply returns the ICMP header of an echo reply from src to dst (RFC 792; RFC 4443, section 4.2). The payload
// follows it.
func EchoReply(src, dst netip.Addr, ident, sequence uint16, payload []byte) [8]byte {
	var b [8]byte
	sum := uint16(0)
	if src.Is4() {
		b[0] = icmpEchoReply
	} else {
		b[0] = icmp6EchoReply
		sum = PseudoHeader(ProtoICMPv6, src, dst, len(b)+len(payload))
	}
	binary.BigEndian.PutUint16(b[4:], ident)
	binary.BigEndian.PutUint16(b[6:], sequence)
	sum = Checksum(b[:], sum)
	binary.BigEndian.PutUint16(b[2:], ^Checksum(payload, sum))
	return b
}

// ParseEcho returns the identifier and the sequence number of an echo request. transport begins with the ICMP header of
// a packet of the protocol proto. ok is false if it is not an echo request.
func ParseEcho(proto uint8, transport []byte) (ident, sequence uint16, ok bool) {
	request := byte(icmpEchoRequest)
	switch proto {
	case ProtoICMP:
	case ProtoICMPv6:
		request = icmp6EchoRequest
	default:
		return 0, 0, false
	}
	if len(transport) < icmpHeaderLen || transport[0] != request || transport[1] != 0 {
		return 0, 0, false
	}
	return binary.BigEndian.Uint16(transport[4:]), binary.BigEndian.Uint16(transport[6:]), true
}

// UDP returns the UDP header of a datagram (RFC 768). If partial is set, the checksum field holds only the sum of the
// pseudo header, and the caller must set [VirtioNeedsChecksum] in the virtio-net header.
func UDP(src, dst netip.AddrPort, payload []byte, partial bool) [8]byte {
	var b [8]byte
	length := len(b) + len(payload)
	binary.BigEndian.PutUint16(b[0:], src.Port())
	binary.BigEndian.PutUint16(b[2:], dst.Port())
	binary.BigEndian.PutUint16(b[4:], uint16(length))
	sum := PseudoHeader(ProtoUDP, src.Addr(), dst.Addr(), length)
	if partial {
		binary.BigEndian.PutUint16(b[6:], sum)
		return b
	}
	sum = ^Checksum(payload, Checksum(b[:], sum))
	if sum == 0 {
		sum = 0xffff // 0 means no checksum
	}
	binary.BigEndian.PutUint16(b[6:], sum)
	return b
}
