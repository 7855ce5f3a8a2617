package packet

import (
	"encoding/binary"
	"errors"
	"net/netip"
)

// The errors of [Parse]. They have no details, so that a flood of malformed packets causes no allocations.
var (
	ErrVersion   = errors.New("neither an IPv4 nor an IPv6 packet")
	ErrTruncated = errors.New("packet is shorter than its header says")
	ErrHeader    = errors.New("malformed IP header")
)

// IPv6 extension headers (RFC 8200 section 4, RFC 4302).
const (
	extHopByHop    = 0
	extRouting     = 43
	extFragment    = 44
	extAuth        = 51
	extDestOptions = 60
)

// maxExtensionHeaders is the most extension headers that Parse accepts; real packets have three at most.
const maxExtensionHeaders = 8

// Header describes one IP packet, or one fragment of one.
type Header struct {
	Src, Dst netip.Addr
	Version  uint8 // 4 or 6
	Proto    uint8 // protocol of the payload, which begins after IPv6 extension headers
	// HeaderLen is the offset of the payload, after IPv4 options or IPv6 extension headers.
	HeaderLen int
	// Len is the packet's length according to its header. The parsed slice may be longer.
	Len int
	// ID, FragmentOffset (in bytes) and MoreFragments come from the IPv4 header or the IPv6 Fragment header.
	ID             uint32
	FragmentOffset int
	MoreFragments  bool
}

// IsFragment reports whether the packet is only a part of a datagram. Only the part with FragmentOffset 0 has the
// transport header.
func (h *Header) IsFragment() bool { return h.MoreFragments || h.FragmentOffset != 0 }

// Parse parses the IP header of p (RFC 791, RFC 8200). It checks lengths but no checksums. It does not allocate.
func Parse(p []byte) (Header, error) {
	if len(p) == 0 {
		return Header{}, ErrTruncated
	}
	switch p[0] >> 4 {
	case 4:
		return parseIPv4(p)
	case 6:
		return parseIPv6(p)
	}
	return Header{}, ErrVersion
}

func parseIPv4(p []byte) (Header, error) {
	if len(p) < IPv4HeaderLen {
		return Header{}, ErrTruncated
	}
	fragment := binary.BigEndian.Uint16(p[6:])
	h := Header{
		Src:            netip.AddrFrom4([4]byte(p[12:16])),
		Dst:            netip.AddrFrom4([4]byte(p[16:20])),
		Version:        4,
		Proto:          p[9],
		HeaderLen:      int(p[0]&15) * 4,
		Len:            int(binary.BigEndian.Uint16(p[2:])),
		ID:             uint32(binary.BigEndian.Uint16(p[4:])),
		FragmentOffset: int(fragment&0x1fff) * 8,
		MoreFragments:  fragment&0x2000 != 0,
	}
	if h.HeaderLen < IPv4HeaderLen || h.Len < h.HeaderLen {
		return Header{}, ErrHeader
	}
	if h.Len > len(p) {
		return Header{}, ErrTruncated
	}
	return h, nil
}

func parseIPv6(p []byte) (Header, error) {
	if len(p) < IPv6HeaderLen {
		return Header{}, ErrTruncated
	}
	h := Header{
		Src:       netip.AddrFrom16([16]byte(p[8:24])),
		Dst:       netip.AddrFrom16([16]byte(p[24:40])),
		Version:   6,
		Proto:     p[6],
		HeaderLen: IPv6HeaderLen,
		Len:       IPv6HeaderLen + int(binary.BigEndian.Uint16(p[4:])),
	}
	if h.Len > len(p) {
		return Header{}, ErrTruncated
	}
	for range maxExtensionHeaders {
		ext := p[h.HeaderLen:h.Len]
		var length int
		switch h.Proto {
		case extHopByHop, extRouting, extDestOptions:
			if len(ext) < 8 {
				return Header{}, ErrTruncated
			}
			length = 8 + int(ext[1])*8
		case extAuth:
			if len(ext) < 8 {
				return Header{}, ErrTruncated
			}
			length = 8 + int(ext[1])*4
		case extFragment:
			if len(ext) < FragmentHeaderLen {
				return Header{}, ErrTruncated
			}
			length = FragmentHeaderLen
			offset := binary.BigEndian.Uint16(ext[2:])
			h.FragmentOffset = int(offset &^ 7)
			h.MoreFragments = offset&1 != 0
			h.ID = binary.BigEndian.Uint32(ext[4:])
		default:
			return h, nil
		}
		if length > len(ext) {
			return Header{}, ErrTruncated
		}
		h.Proto = ext[0]
		h.HeaderLen += length
		if h.FragmentOffset != 0 {
			return h, nil // the payload is the middle of a datagram, not a header
		}
	}
	return Header{}, ErrHeader
}

// hopLimit is the TTL or hop limit of the headers that Outgoing writes.
const hopLimit = 64

// Outgoing describes an IP header to write.
type Outgoing struct {
	Src, Dst   netip.Addr // of the same family
	Proto      uint8
	PayloadLen int // bytes after the IP header and the Fragment header
	// Fragment makes the packet a part of a datagram. Only then are the next three fields used.
	Fragment       bool
	ID             uint32
	FragmentOffset int // in bytes, a multiple of 8
	MoreFragments  bool
}

// Append appends the IP header to dst, with its checksum: 20 bytes for IPv4, 40 for IPv6, 48 for a fragment of IPv6. An
// IPv4 packet that is not a fragment has DF set and the ID 0 (RFC 6864, atomic datagram).
func (o *Outgoing) Append(dst []byte) []byte {
	if o.Src.Is4() {
		return o.appendIPv4(dst)
	}
	return o.appendIPv6(dst)
}

func (o *Outgoing) appendIPv4(dst []byte) []byte {
	start := len(dst)
	var id, fragment uint16 = 0, 0x4000
	if o.Fragment {
		id, fragment = uint16(o.ID), uint16(o.FragmentOffset/8)
		if o.MoreFragments {
			fragment |= 0x2000
		}
	}
	dst = append(dst, 0x45, 0)
	dst = binary.BigEndian.AppendUint16(dst, uint16(IPv4HeaderLen+o.PayloadLen))
	dst = binary.BigEndian.AppendUint16(dst, id)
	dst = binary.BigEndian.AppendUint16(dst, fragment)
	dst = append(dst, hopLimit, o.Proto, 0, 0)
	src, to := o.Src.As4(), o.Dst.As4()
	dst = append(dst, src[:]...)
	dst = append(dst, to[:]...)
	binary.BigEndian.PutUint16(dst[start+10:], ^Checksum(dst[start:], 0))
	return dst
}

func (o *Outgoing) appendIPv6(dst []byte) []byte {
	next, length := o.Proto, o.PayloadLen
	if o.Fragment {
		next, length = extFragment, length+FragmentHeaderLen
	}
	dst = append(dst, 0x60, 0, 0, 0)
	dst = binary.BigEndian.AppendUint16(dst, uint16(length))
	dst = append(dst, next, hopLimit)
	src, to := o.Src.As16(), o.Dst.As16()
	dst = append(dst, src[:]...)
	dst = append(dst, to[:]...)
	if o.Fragment {
		offset := uint16(o.FragmentOffset)
		if o.MoreFragments {
			offset |= 1
		}
		dst = append(dst, o.Proto, 0)
		dst = binary.BigEndian.AppendUint16(dst, offset)
		dst = binary.BigEndian.AppendUint32(dst, o.ID)
	}
	return dst
}
