package packetlink

import (
	"bytes"
	"encoding/binary"
	"sync/atomic"

	"kubevpn/pkg/datapath/packet"
)

// Device is the part of a TUN device that a Writer needs (see [kubevpn/pkg/datapath/tun]).
type Device interface {
	USO() bool
	Writev([][]byte) error
}

// Writer writes frames of packets to TUN devices. It joins datagrams of one flow that follow each other into one
// super-packet, if the device takes it: then they cross the kernel, and any node behind it, as one packet. The kernel
// splits it into the same packets for the receiver.
//
//	frames:  │ virtio │ IP │ UDP │ 1200 bytes │   │ virtio │ IP │ UDP │ 1200 bytes │   │ virtio │ IP │ UDP │ 700 bytes │
//	write:   │ virtio │ IP │ UDP │ 1200 bytes │ 1200 bytes │ 700 bytes │
//
// Use it from one goroutine.
type Writer struct {
	failed *atomic.Uint64 // counts packets that a device has rejected

	// The packets that are not written yet. There are several only if they form a super-packet.
	device  Device
	frames  []*Frame
	length  int  // of all headers
	size    int  // of the first one's payload
	sum     int  // of all payloads
	full    bool // no other can follow
	pieces  [][]byte
	headers [packet.VirtioLen + packet.IPv6HeaderLen + udpHeaderLen]byte
}

const udpHeaderLen = 8

// NewWriter returns a Writer that counts the packets that a device rejects.
func NewWriter(failed *atomic.Uint64) *Writer { return &Writer{failed: failed} }

// Write writes f, or keeps it until a later Write or Flush. It owns f, whose header is known.
func (w *Writer) Write(device Device, f *Frame) {
	size := 0
	if device.USO() {
		size = joinable(f)
	}
	if len(w.frames) > 0 && (w.full || device != w.device || !w.continues(f, size)) {
		w.Flush()
	}
	if len(w.frames) == 0 {
		w.device, w.size, w.sum, w.full = device, size, 0, size == 0
		w.length = packet.VirtioLen + f.header.HeaderLen + udpHeaderLen
	}
	w.frames = append(w.frames, f)
	w.sum += size
	if size < w.size || len(w.frames) == packet.MaxTrain {
		w.full = true
	}
	if w.full {
		w.Flush()
	}
}

// joinable returns the length of the datagram in f, or 0 if it cannot be part of a super-packet: its header has
// options, or its checksum was neither verified nor left to do.
func joinable(f *Frame) int {
	h, b := &f.header, f.Bytes()
	plain := packet.IPv4HeaderLen
	if h.Version == 6 {
		plain = packet.IPv6HeaderLen
	}
	p := b[packet.VirtioLen:]
	if h.Proto != packet.ProtoUDP || h.HeaderLen != plain || h.IsFragment() || len(p) <= plain+udpHeaderLen ||
		b[0] == 0 || b[1] != packet.GSONone {
		return 0
	}
	udp := p[plain:]
	if int(binary.BigEndian.Uint16(udp[4:])) != len(udp) || binary.BigEndian.Uint16(udp[6:]) == 0 {
		return 0
	}
	return len(udp) - udpHeaderLen
}

// continues reports whether the datagram in f, of that length, can follow those in w: all headers are the same, except
// for the identification and the fields that depend on the length.
func (w *Writer) continues(f *Frame, size int) bool {
	first := w.frames[0]
	if size == 0 || size > w.size || f.header.Version != first.header.Version ||
		w.length-packet.VirtioLen+w.sum+size > 65535 {
		return false
	}
	a, b := first.Packet(), f.Packet()
	n := first.header.HeaderLen
	if !bytes.Equal(a[n:n+4], b[n:n+4]) { // ports
		return false
	}
	if first.header.Version == 4 {
		// version, type of service; flags, lifetime; addresses
		return bytes.Equal(a[:2], b[:2]) && bytes.Equal(a[6:9], b[6:9]) && bytes.Equal(a[12:20], b[12:20])
	}
	return bytes.Equal(a[:4], b[:4]) && bytes.Equal(a[7:40], b[7:40]) // traffic class, flow label; lifetime, addresses
}

// Flush writes the frames that Write has kept.
func (w *Writer) Flush() {
	if len(w.frames) == 0 {
		return
	}
	w.pieces = w.pieces[:0]
	if len(w.frames) == 1 {
		w.pieces = append(w.pieces, w.frames[0].Bytes())
	} else {
		w.pieces = append(w.pieces, w.joined())
		for _, f := range w.frames {
			w.pieces = append(w.pieces, f.Bytes()[w.length:])
		}
	}
	if w.device.Writev(w.pieces) != nil {
		w.failed.Add(uint64(len(w.frames)))
	}
	for _, f := range w.frames {
		f.Release()
	}
	clear(w.frames)
	clear(w.pieces)
	w.frames, w.device = w.frames[:0], nil
}

// joined returns the headers of the super-packet.
func (w *Writer) joined() []byte {
	first := w.frames[0]
	b := w.headers[:copy(w.headers[:], first.Bytes()[:w.length])]
	h := &first.header
	v := packet.Virtio{
		Flags: packet.VirtioNeedsChecksum, GSOType: packet.GSOUDPL4,
		HeaderLen: uint16(w.length - packet.VirtioLen), GSOSize: uint16(w.size),
		ChecksumStart: uint16(h.HeaderLen), ChecksumOffset: 6,
	}
	v.Put(b)
	p := b[packet.VirtioLen:]
	udp := p[h.HeaderLen:]
	length := udpHeaderLen + w.sum
	if h.Version == 4 {
		binary.BigEndian.PutUint16(p[2:], uint16(h.HeaderLen+length))
		p[10], p[11] = 0, 0
		binary.BigEndian.PutUint16(p[10:], ^packet.Checksum(p[:h.HeaderLen], 0))
	} else {
		binary.BigEndian.PutUint16(p[4:], uint16(length))
	}
	binary.BigEndian.PutUint16(udp[4:], uint16(length))
	binary.BigEndian.PutUint16(udp[6:], packet.PseudoHeader(packet.ProtoUDP, h.Src, h.Dst, length))
	return b
}
