package l3

import "kubevpn/pkg/packet"

// minSegment is the smallest payload of a segment that a super-packet may ask for. Linux goes no lower than 48 with
// the TCP options taken off; smaller ones would only be there to make much of little.
const minSegment = 16

// Check validates a virtio-net header and the packet behind it together: the packet has the length that it says; what
// the header asks of a receiver is what any receiver could have found out from the packet itself. The checksum to be
// completed is the one of the TCP or UDP header; segments are of TCP and of the packet's IP version, begin behind its
// headers, have a sensible size and are more than one, as Linux drops those that are not; what does not apply is zero. Fragments have nothing left to do. It does not
// allocate.
func Check(b []byte) (packet.Header, error) {
	v, err := packet.ParseVirtio(b)
	if err != nil {
		return packet.Header{}, err
	}
	p := b[packet.VirtioLen:]
	h, err := packet.Parse(p)
	if err != nil {
		return packet.Header{}, err
	}
	if v.Flags&packet.VirtioNeedsChecksum != 0 {
		offset, known := packet.ChecksumOffset(h.Proto)
		headers, whole := packet.TransportLen(h.Proto, p[h.HeaderLen:h.Len])
		if !known || !whole || h.IsFragment() || int(v.ChecksumStart) != h.HeaderLen || int(v.ChecksumOffset) != offset {
			return packet.Header{}, packet.ErrVirtio
		}
		if v.GSOType != packet.GSONone && int(v.HeaderLen) != h.HeaderLen+headers {
			return packet.Header{}, packet.ErrVirtio
		}
	}
	if err := check(&v, &h, len(p)); err != nil {
		return packet.Header{}, err
	}
	return h, nil
}

// check is the part of Check that needs the headers only.
func check(v *packet.Virtio, h *packet.Header, length int) error {
	if h.Len != length {
		return packet.ErrTruncated
	}
	if length > maxFrame-packet.VirtioLen {
		return packet.ErrHeader
	}
	switch v.Flags {
	case 0, packet.VirtioDataValid:
		if *v != (packet.Virtio{Flags: v.Flags}) {
			return packet.ErrVirtio
		}
	case packet.VirtioNeedsChecksum:
		if v.GSOType == packet.GSONone && (v.HeaderLen != 0 || v.GSOSize != 0) {
			return packet.ErrVirtio
		}
	default:
		return packet.ErrVirtio
	}
	if v.GSOType == packet.GSONone {
		return nil
	}
	want := uint8(packet.GSOTCPv4)
	if h.Version == 6 {
		want = packet.GSOTCPv6
	}
	if v.GSOType&^packet.GSOECN != want || h.Proto != packet.ProtoTCP || h.IsFragment() ||
		v.GSOSize < minSegment || length-int(v.HeaderLen) <= int(v.GSOSize) {
		return packet.ErrVirtio
	}
	return nil
}
