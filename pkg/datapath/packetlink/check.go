package packetlink

import "kubevpn/pkg/datapath/packet"

// minSegment is the smallest segment size of a super-packet. Linux uses at least 48 bytes, less TCP options; a smaller
// size would only serve to make many packets of one.
const minSegment = 16

// Check validates a virtio-net header and the packet behind it together. The packet must have the length that it
// states, and the header may request only what follows from the packet itself:
//
//   - a checksum to complete is the one of the TCP or UDP header
//   - segments are TCP of the packet's IP version, begin behind its headers, have at least minSegment bytes and are
//     more than one, because Linux drops others
//   - fields that do not apply are zero
//   - a fragment needs neither checksum nor segmentation
//
// Check does not allocate.
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
		if !known || !whole || h.IsFragment() || int(v.ChecksumStart) != h.HeaderLen ||
			int(v.ChecksumOffset) != offset {
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

// check is the part of Check that needs only the headers. length is the length of the packet.
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
