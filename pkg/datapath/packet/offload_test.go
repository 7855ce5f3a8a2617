package packet

import (
	"bytes"
	"encoding/binary"
	"net/netip"
	"testing"
)

// superPacket returns a TCP super-packet of 10 bytes in segments of 4, with the checksum left to do.
func superPacket(t testing.TB, flags byte) (Virtio, Header, []byte) {
	tcp := append(unhex(t, "c000 0050 fffffffd 00000000 5000 ffff 0000 0000"), "0123456789"...)
	tcp[13] = flags
	binary.BigEndian.PutUint16(tcp[16:], PseudoHeader(ProtoTCP, a4, b4, len(tcp)))
	p := append(unhex(t, "4500 0032 ffff 4000 4006 0000"+addrs4), tcp...)
	h, err := Parse(p)
	if err != nil {
		t.Fatal(err)
	}
	return Virtio{Flags: VirtioNeedsChecksum, GSOType: GSOTCPv4, HeaderLen: 40, GSOSize: 4, ChecksumStart: 20, ChecksumOffset: 16}, h, p
}

func TestSplitMakesTheSegmentsOfLinux(t *testing.T) {
	const fin, psh, ack, cwr = 0x01, 0x08, 0x10, 0x80
	v, h, p := superPacket(t, fin|psh|ack|cwr)
	before := bytes.Clone(p)
	segments, err := Split(&v, &h, p)
	if err != nil {
		t.Fatal(err)
	}
	for i, want := range []struct {
		id    uint32
		seq   uint32
		flags byte
		data  string
	}{
		{0xffff, 0xfffffffd, ack | cwr, "0123"},
		{0, 1, ack, "4567"},
		{1, 5, fin | psh | ack, "89"},
	} {
		b := make([]byte, segments.Len())
		if n := segments.Put(b); n != 40+len(want.data) {
			t.Fatalf("segment %d: %d bytes", i, n)
		}
		g, err := Parse(b)
		if err != nil {
			t.Fatal(err)
		}
		tcp := b[20:]
		if g.Len != len(b) || g.ID != want.id || binary.BigEndian.Uint32(tcp[4:]) != want.seq || tcp[13] != want.flags || string(tcp[20:]) != want.data {
			t.Errorf("segment %d: %+v, %x", i, g, tcp)
		}
		if Checksum(b[:20], 0) != 0xffff || Checksum(tcp, PseudoHeader(ProtoTCP, a4, b4, len(tcp))) != 0xffff {
			t.Errorf("segment %d: checksums of %x", i, b)
		}
	}
	if segments.Len() != 0 || segments.Put(nil) != 0 {
		t.Error("there is a segment after the last")
	}
	if !bytes.Equal(p, before) {
		t.Error("the super-packet was changed")
	}
}

func TestSplitRejectsOtherPackets(t *testing.T) {
	for name, edit := range map[string]func(v *Virtio, h *Header, p []byte){
		"no_super_packet":  func(v *Virtio, _ *Header, _ []byte) { v.GSOType = GSONone },
		"udp":              func(v *Virtio, _ *Header, _ []byte) { v.GSOType = GSOUDPL4 },
		"other_version":    func(v *Virtio, _ *Header, _ []byte) { v.GSOType = GSOTCPv6 },
		"size_0":           func(v *Virtio, _ *Header, _ []byte) { v.GSOSize = 0 },
		"whole_checksum":   func(v *Virtio, _ *Header, _ []byte) { v.Flags = 0 },
		"other_protocol":   func(_ *Virtio, h *Header, _ []byte) { h.Proto = ProtoUDP },
		"fragment":         func(_ *Virtio, h *Header, _ []byte) { h.MoreFragments = true },
		"short_tcp_header": func(_ *Virtio, _ *Header, p []byte) { p[32] = 0x40 },
		"long_tcp_header":  func(_ *Virtio, _ *Header, p []byte) { p[32] = 0xf0 },
	} {
		v, h, p := superPacket(t, 0)
		edit(&v, &h, p)
		if _, err := Split(&v, &h, p); err != ErrVirtio {
			t.Errorf("%s: error %v", name, err)
		}
	}
}

func TestCompletedChecksumEqualsWholeChecksum(t *testing.T) {
	payload := []byte("payload")
	for name, srcDst := range map[string][2]string{"ipv4": {"10.0.0.1:5", "10.0.0.2:53"}, "ipv6": {"[fd00::1]:5", "[fd00::2]:53"}} {
		src, dst := netip.MustParseAddrPort(srcDst[0]), netip.MustParseAddrPort(srcDst[1])
		whole, partial := UDP(src, dst, payload, false), UDP(src, dst, payload, true)
		p := append(partial[:], payload...)
		v := Virtio{Flags: VirtioNeedsChecksum, ChecksumOffset: 6}
		CompleteChecksum(&v, p)
		if !bytes.Equal(p[:8], whole[:]) {
			t.Errorf("%s: %x, want %x", name, p[:8], whole)
		}
	}
	zero := []byte{0xff, 0xff, 0, 0} // the complement of the sum is 0, which would mean that there is none
	CompleteChecksum(&Virtio{ChecksumOffset: 2}, zero)
	if zero[2] != 0xff || zero[3] != 0xff {
		t.Errorf("checksum %x", zero[2:])
	}
}

func TestTransportLenRejectsContradictions(t *testing.T) {
	for _, tt := range []struct {
		name  string
		proto uint8
		b     string
		n     int
		ok    bool
	}{
		{"tcp", ProtoTCP, "c000 0050 00000000 00000000 5000 ffff 0000 0000 ff", 20, true},
		{"tcp_options", ProtoTCP, "c000 0050 00000000 00000000 6000 ffff 0000 0000 01010101", 24, true},
		{"tcp_options_missing", ProtoTCP, "c000 0050 00000000 00000000 6000 ffff 0000 0000", 24, false},
		{"tcp_cut_off", ProtoTCP, "c000 0050 00000000 00000000 5000 ffff 0000", 0, false},
		{"tcp_offset_below_5", ProtoTCP, "c000 0050 00000000 00000000 4000 ffff 0000 0000", 16, false},
		{"udp", ProtoUDP, "c000 0035 0008 0000", 8, true},
		{"udp_cut_off", ProtoUDP, "c000 0035 0008 00", 8, false},
		{"icmp", ProtoICMP, "0800 0000 0000 0000", 0, false},
	} {
		if n, ok := TransportLen(tt.proto, unhex(t, tt.b)); n != tt.n || ok != tt.ok {
			t.Errorf("%s: %d, %v; want %d, %v", tt.name, n, ok, tt.n, tt.ok)
		}
	}
}

func BenchmarkSplit64K(b *testing.B) {
	v, _, p := superPacket(b, 0)
	p = append(p, make([]byte, 65495-10)...)
	binary.BigEndian.PutUint16(p[2:], uint16(len(p)))
	v.GSOSize = 1400
	h, err := Parse(p)
	if err != nil {
		b.Fatal(err)
	}
	buf := make([]byte, 2000)
	b.SetBytes(int64(len(p)))
	b.ReportAllocs()
	for b.Loop() {
		segments, err := Split(&v, &h, p)
		if err != nil {
			b.Fatal(err)
		}
		for segments.Put(buf) > 0 {
		}
	}
}

func TestTrainTakesDatagramsOfOneSizeAndAShorterOne(t *testing.T) {
	many := make([]int, 100)
	for i := range many {
		many[i] = 5
	}
	for _, tt := range []struct {
		sizes         []int
		limit, n, sum int
	}{
		{[]int{}, 10, 0, 0},
		{[]int{4}, 10, 1, 4},
		{[]int{40}, 10, 1, 40},
		{[]int{0, 0}, 10, 1, 0},
		{[]int{4, 4, 3, 3}, 100, 3, 11},
		{[]int{4, 4, 5}, 100, 2, 8},
		{[]int{4, 4, 0}, 100, 2, 8},
		{[]int{4, 4, 4}, 11, 2, 8},
		{[]int{4, 4, 3}, 11, 3, 11},
		{many, 1000, 64, 320},
	} {
		if n, sum := Train(tt.sizes, tt.limit); n != tt.n || sum != tt.sum {
			t.Errorf("%v: %d datagrams of %d bytes, want %d of %d", tt.sizes, n, sum, tt.n, tt.sum)
		}
	}
}
