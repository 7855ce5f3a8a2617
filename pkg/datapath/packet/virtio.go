package packet

import (
	"encoding/binary"
	"errors"
)

// VirtioLen is the length of a virtio-net header (struct virtio_net_hdr, linux/virtio_net.h) on a TUN device with
// IFF_VNET_HDR.
const VirtioLen = 10

// The values of [Virtio.Flags] and [Virtio.GSOType].
const (
	VirtioNeedsChecksum = 1 // the transport checksum field holds the sum of the pseudo header only
	VirtioDataValid     = 2 // the checksum was verified

	GSONone  = 0
	GSOTCPv4 = 1
	GSOTCPv6 = 4
	GSOUDPL4 = 5
	GSOECN   = 0x80 // a flag of the TCP types
)

// ErrVirtio is the error for a virtio-net header that does not fit its packet.
var ErrVirtio = errors.New("malformed virtio-net header")

// Virtio is a virtio-net header. It describes the work that the sender of a packet leaves to the receiver. On a TUN
// device its fields are in the machine's byte order, which is little-endian wherever kubevpn runs.
type Virtio struct {
	Flags   uint8
	GSOType uint8
	// HeaderLen is the length of all headers up to the payload; the segments of a super-packet repeat them.
	HeaderLen uint16
	// GSOSize is the length of one segment's payload.
	GSOSize uint16
	// ChecksumStart is the offset from which the checksum covers the packet. ChecksumOffset is the offset of the
	// checksum field from there.
	ChecksumStart, ChecksumOffset uint16
}

// ParseVirtio parses the header at the start of b, and checks that its offsets lie inside the packet that follows. It
// does not allocate.
func ParseVirtio(b []byte) (Virtio, error) {
	if len(b) < VirtioLen {
		return Virtio{}, ErrVirtio
	}
	v := Virtio{
		Flags:          b[0],
		GSOType:        b[1],
		HeaderLen:      binary.LittleEndian.Uint16(b[2:]),
		GSOSize:        binary.LittleEndian.Uint16(b[4:]),
		ChecksumStart:  binary.LittleEndian.Uint16(b[6:]),
		ChecksumOffset: binary.LittleEndian.Uint16(b[8:]),
	}
	length := len(b) - VirtioLen
	if v.Flags&VirtioNeedsChecksum != 0 && int(v.ChecksumStart)+int(v.ChecksumOffset)+2 > length {
		return Virtio{}, ErrVirtio
	}
	switch v.GSOType &^ GSOECN {
	case GSONone:
	case GSOTCPv4, GSOTCPv6, GSOUDPL4:
		if v.GSOSize == 0 || int(v.HeaderLen) > length {
			return Virtio{}, ErrVirtio
		}
	default:
		return Virtio{}, ErrVirtio
	}
	return v, nil
}

// Put writes the header to the first [VirtioLen] bytes of b.
func (v *Virtio) Put(b []byte) {
	_ = b[VirtioLen-1]
	b[0], b[1] = v.Flags, v.GSOType
	binary.LittleEndian.PutUint16(b[2:], v.HeaderLen)
	binary.LittleEndian.PutUint16(b[4:], v.GSOSize)
	binary.LittleEndian.PutUint16(b[6:], v.ChecksumStart)
	binary.LittleEndian.PutUint16(b[8:], v.ChecksumOffset)
}
