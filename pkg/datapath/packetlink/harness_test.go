package packetlink

import (
	"encoding/binary"
	"math/rand/v2"
	"net/netip"
	"testing"

	"go.uber.org/goleak"

	"kubevpn/pkg/datapath/packet"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// spec describes a test packet.
type spec struct {
	v6           bool
	proto        uint8
	sport, dport uint16
	payload      int    // bytes
	options      int    // bytes of TCP options
	flags        byte   // of TCP
	id           uint16 // of IPv4
	seq          uint32
	gso          int // size of a segment; 0: no super-packet
	partial      bool
	src, dst     netip.Addr // zero: 198.19.0.1 and 198.19.0.2, or fd42::1 and fd42::2
	ttl          uint8
}

func (s spec) addrs() (src, dst netip.Addr) {
	src, dst = netip.MustParseAddr("198.19.0.1"), netip.MustParseAddr("198.19.0.2")
	if s.v6 {
		src, dst = netip.MustParseAddr("fd42::1"), netip.MustParseAddr("fd42::2")
	}
	if s.src.IsValid() {
		src, dst = s.src, s.dst
	}
	return src, dst
}

// bytes returns a virtio-net header and its packet, as a TUN device would.
func (s spec) bytes() []byte {
	src, dst := s.addrs()
	if s.proto == 0 {
		s.proto = packet.ProtoTCP
	}
	head := 20 + s.options
	if s.proto == packet.ProtoUDP {
		head = 8
	}
	transport := make([]byte, head+s.payload)
	binary.BigEndian.PutUint16(transport, s.sport)
	binary.BigEndian.PutUint16(transport[2:], s.dport)
	field := 16
	if s.proto == packet.ProtoUDP {
		field = 6
		binary.BigEndian.PutUint16(transport[4:], uint16(len(transport)))
	} else {
		binary.BigEndian.PutUint32(transport[4:], s.seq)
		transport[12] = byte(head/4) << 4
		transport[13] = s.flags | 0x10
		for i := 20; i < head; i++ {
			transport[i] = 1 // NOP
		}
	}
	r := rand.NewChaCha8([32]byte{byte(s.payload)})
	r.Read(transport[head:])
	sum := packet.PseudoHeader(s.proto, src, dst, len(transport))
	if s.gso == 0 && !s.partial {
		sum = ^packet.Checksum(transport, sum)
	}
	binary.BigEndian.PutUint16(transport[field:], sum)

	out := packet.Outgoing{Src: src, Dst: dst, Proto: s.proto, PayloadLen: len(transport)}
	ip := out.Append(nil)
	switch {
	case s.v6 && s.ttl != 0:
		ip[7] = s.ttl
	case !s.v6:
		if s.ttl != 0 {
			ip[8] = s.ttl
		}
		if s.id != 0 {
			binary.BigEndian.PutUint16(ip[4:], s.id)
		}
		ip[10], ip[11] = 0, 0
		binary.BigEndian.PutUint16(ip[10:], ^packet.Checksum(ip, 0))
	}
	var v packet.Virtio
	if s.partial || s.gso > 0 {
		v = packet.Virtio{Flags: packet.VirtioNeedsChecksum, ChecksumStart: uint16(len(ip)), ChecksumOffset: uint16(field)}
	}
	if s.gso > 0 {
		v.GSOType = packet.GSOTCPv4
		if s.v6 {
			v.GSOType = packet.GSOTCPv6
		}
		v.GSOSize, v.HeaderLen = uint16(s.gso), uint16(len(ip)+head)
	}
	b := make([]byte, packet.VirtioLen, packet.VirtioLen+len(ip)+len(transport))
	v.Put(b)
	return append(append(b, ip...), transport...)
}

// frame puts b into a frame.
func frame(b []byte) *Frame {
	f := NewFrame()
	f.SetLen(copy(f.Buffer(), b))
	return f
}

// wire returns packets as a stream carries them.
func wire(packets ...[]byte) []byte {
	var w []byte
	for _, b := range packets {
		w = binary.BigEndian.AppendUint32(w, uint32(len(b)))
		w = append(w, b...)
	}
	return w
}
