package packet

import (
	"encoding/hex"
	"errors"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"gvisor.dev/gvisor/pkg/tcpip/checksum"
)

func unhex(t testing.TB, s string) []byte {
	t.Helper()
	b, err := hex.DecodeString(strings.Join(strings.Fields(s), ""))
	if err != nil {
		t.Fatal(err)
	}
	return b
}

var (
	a4 = netip.MustParseAddr("10.0.0.1")
	b4 = netip.MustParseAddr("10.0.0.2")
	a6 = netip.MustParseAddr("fd00::1")
	b6 = netip.MustParseAddr("fd00::2")
)

const (
	addrs4 = "0a000001 0a000002"
	addrs6 = "fd000000000000000000000000000001 fd000000000000000000000000000002"
)

func TestParseReadsHeadersAndRejectsMalformed(t *testing.T) {
	tests := []struct {
		name   string
		packet string
		want   Header
		err    error
	}{
		{name: "ipv4", packet: "4500 0018 0000 4000 4011 0000" + addrs4 + "01020304",
			want: Header{Src: a4, Dst: b4, Version: 4, Proto: 17, HeaderLen: 20, Len: 24}},
		{name: "ipv4 with options and padding behind it", packet: "4600 001c 1234 0000 4006 0000" + addrs4 + "01010100 01020304 ffff",
			want: Header{Src: a4, Dst: b4, Version: 4, Proto: 6, HeaderLen: 24, Len: 28, ID: 0x1234}},
		{name: "ipv4 middle fragment", packet: "4500 0018 0007 20b9 4011 0000" + addrs4 + "01020304",
			want: Header{Src: a4, Dst: b4, Version: 4, Proto: 17, HeaderLen: 20, Len: 24, ID: 7, FragmentOffset: 0xb9 * 8, MoreFragments: true}},
		{name: "ipv4 header length below 20", packet: "4400 0018 0000 4000 4011 0000" + addrs4 + "01020304", err: ErrHeader},
		{name: "ipv4 length below header", packet: "4500 0010 0000 4000 4011 0000" + addrs4, err: ErrHeader},
		{name: "ipv4 cut off", packet: "4500 0019 0000 4000 4011 0000" + addrs4 + "01020304", err: ErrTruncated},
		{name: "ipv6", packet: "60000000 0004 1140" + addrs6 + "01020304",
			want: Header{Src: a6, Dst: b6, Version: 6, Proto: 17, HeaderLen: 40, Len: 44}},
		{name: "ipv6 hop-by-hop and destination options", packet: "60000000 0014 0040" + addrs6 + "3c00010400000000 0600010400000000 01020304",
			want: Header{Src: a6, Dst: b6, Version: 6, Proto: 6, HeaderLen: 56, Len: 60}},
		{name: "ipv6 first fragment", packet: "60000000 000c 2c40" + addrs6 + "1100 0001 deadbeef 01020304",
			want: Header{Src: a6, Dst: b6, Version: 6, Proto: 17, HeaderLen: 48, Len: 52, ID: 0xdeadbeef, MoreFragments: true}},
		{name: "ipv6 last fragment is not looked into", packet: "60000000 000c 2c40" + addrs6 + "0000 0590 deadbeef 2c2c2c2c",
			want: Header{Src: a6, Dst: b6, Version: 6, Proto: 0, HeaderLen: 48, Len: 52, ID: 0xdeadbeef, FragmentOffset: 0x590}},
		{name: "ipv6 extension header beyond the packet", packet: "60000000 0008 0040" + addrs6 + "3c01010400000000", err: ErrTruncated},
		{name: "ipv6 endless extension headers", packet: "60000000 0048 0040" + addrs6 + strings.Repeat("0000010400000000", 9), err: ErrHeader},
		{name: "ipv6 cut off", packet: "60000000 0005 1140" + addrs6 + "01020304", err: ErrTruncated},
		{name: "empty", err: ErrTruncated},
		{name: "arp", packet: "0001080006040001", err: ErrVersion},
	}
	for _, tt := range tests {
		t.Run(strings.ReplaceAll(tt.name, " ", "_"), func(t *testing.T) {
			got, err := Parse(unhex(t, tt.packet))
			if !errors.Is(err, tt.err) {
				t.Fatalf("Parse: error %v, want %v", err, tt.err)
			}
			if diff := cmp.Diff(tt.want, got, cmp.Comparer(func(a, b netip.Addr) bool { return a == b })); diff != "" {
				t.Error(diff)
			}
		})
	}
}

func TestAppendedHeaderParsesBack(t *testing.T) {
	tests := []struct {
		name string
		out  Outgoing
		want string
	}{
		{"ipv4", Outgoing{Src: a4, Dst: b4, Proto: 17, PayloadLen: 4}, "4500 0018 0000 4000 4011 26d3" + addrs4},
		{"ipv4_fragment", Outgoing{Src: a4, Dst: b4, Proto: 17, PayloadLen: 8, Fragment: true, ID: 0x1234, FragmentOffset: 16, MoreFragments: true},
			"4500 001c 1234 2002 4011 3499" + addrs4},
		{"ipv6", Outgoing{Src: a6, Dst: b6, Proto: 58, PayloadLen: 9}, "60000000 0009 3a40" + addrs6},
		{"ipv6_fragment", Outgoing{Src: a6, Dst: b6, Proto: 58, PayloadLen: 8, Fragment: true, ID: 9, FragmentOffset: 1448},
			"60000000 0010 2c40" + addrs6 + "3a00 05a8 00000009"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := tt.out.Append(nil)
			if diff := cmp.Diff(hex.EncodeToString(unhex(t, tt.want)), hex.EncodeToString(got)); diff != "" {
				t.Error(diff)
			}
			h, err := Parse(append(got, make([]byte, tt.out.PayloadLen)...))
			if err != nil {
				t.Fatal(err)
			}
			if h.Src != tt.out.Src || h.Dst != tt.out.Dst || h.Proto != tt.out.Proto || h.FragmentOffset != tt.out.FragmentOffset ||
				h.MoreFragments != tt.out.MoreFragments || h.HeaderLen != len(got) || h.Version == 4 && Checksum(got, 0) != 0xffff {
				t.Errorf("read back: %+v", h)
			}
		})
	}
}

func TestParseVirtioRejectsOffsetsOutsideThePacket(t *testing.T) {
	packet := strings.Repeat("00", 100)
	tests := []struct {
		name   string
		header string
		want   Virtio
		err    error
	}{
		{"none", "0000 0000 0000 0000 0000", Virtio{}, nil},
		{"checksum", "0100 0000 0000 2800 1000", Virtio{Flags: 1, ChecksumStart: 40, ChecksumOffset: 16}, nil},
		{"tso4_ecn", "0181 3400 7805 1400 1000", Virtio{Flags: 1, GSOType: 0x81, HeaderLen: 52, GSOSize: 1400, ChecksumStart: 20, ChecksumOffset: 16}, nil},
		{"checksum_in_the_last_bytes", "0100 0000 0000 5200 1000", Virtio{Flags: 1, ChecksumStart: 82, ChecksumOffset: 16}, nil},
		{"checksum_outside", "0100 0000 0000 5300 1000", Virtio{}, ErrVirtio},
		{"checksum_overflow", "0100 0000 0000 ffff ffff", Virtio{}, ErrVirtio},
		{"segment_size_0", "0101 2800 0000 1400 1000", Virtio{}, ErrVirtio},
		{"headers_longer_than_packet", "0101 6500 7805 1400 1000", Virtio{}, ErrVirtio},
		{"unknown_type", "0003 2800 7805 1400 1000", Virtio{}, ErrVirtio},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := unhex(t, tt.header+packet)
			got, err := ParseVirtio(b)
			if !errors.Is(err, tt.err) || got != tt.want {
				t.Fatalf("ParseVirtio = %+v, %v; want %+v, %v", got, err, tt.want, tt.err)
			}
			if err == nil {
				var back [VirtioLen]byte
				got.Put(back[:])
				if diff := cmp.Diff(b[:VirtioLen], back[:]); diff != "" {
					t.Error(diff)
				}
			}
		})
	}
	if _, err := ParseVirtio(make([]byte, 9)); !errors.Is(err, ErrVirtio) {
		t.Errorf("9 bytes: %v", err)
	}
}

func TestChecksumEqualsReference(t *testing.T) {
	b := make([]byte, 300)
	for i := range b {
		b[i] = byte(i*i + 7)
	}
	for n := range b {
		for _, initial := range []uint16{0, 1, 0xfffe, 0xffff} {
			if got, want := Checksum(b[:n], initial), checksum.Checksum(b[:n], initial); got != want {
				t.Fatalf("Checksum(%d bytes, %#x) = %#x, want %#x", n, initial, got, want)
			}
		}
	}
	ones := make([]byte, 70000)
	for i := range ones {
		ones[i] = 0xff
	}
	if got, want := Checksum(ones, 0xffff), checksum.Checksum(ones, 0xffff); got != want {
		t.Fatalf("all ones: %#x, want %#x", got, want)
	}
}

func TestAppendErrorQuotesTheOriginal(t *testing.T) {
	syn4 := "4500 0028 1111 4000 4006 0000" + addrs4 + "c000 0050 01020304 00000000 5002 ffff 0000 0000"
	udp6 := "60000000 000c 1140" + addrs6 + "c000 0035 000c 0000 01020304"
	tests := []struct {
		name     string
		reason   Reason
		from     netip.Addr
		original string
		want     string // "" when none may be sent
	}{
		{"syn_host_unreachable", HostUnreachable, b4, syn4,
			"4500 0044 0000 4000 4001 26b7 0a000002 0a000001 0301 fe62 00000000" + syn4},
		{"syn_net_unreachable", NetUnreachable, b4, syn4,
			"4500 0044 0000 4000 4001 26b7 0a000002 0a000001 0300 fe63 00000000" + syn4},
		{"syn_prohibited", Prohibited, b4, syn4,
			"4500 0044 0000 4000 4001 26b7 0a000002 0a000001 030d fe56 00000000" + syn4},
		{"udp6_port_unreachable", PortUnreachable, b6, udp6,
			"60000000 003c 3a40 fd000000000000000000000000000002 fd000000000000000000000000000001 0104 d4e7 00000000" + udp6},
		{"sctp6_protocol_unreachable", ProtocolUnreachable, b6, "60000000 0008 8440" + addrs6 + "0001 0002 00000000",
			"60000000 0038 3a40 fd000000000000000000000000000002 fd000000000000000000000000000001 0401 2331 00000006 60000000 0008 8440" + addrs6 + "0001 0002 00000000"},
		{"other_family", HostUnreachable, b6, syn4, ""},
		{"about_an_icmp_error", HostUnreachable, b4, "4500 001c 0000 4000 4001 0000" + addrs4 + "0301 0000 00000000", ""},
		{"about_an_icmp6_error", HostUnreachable, b6, "60000000 0008 3a40" + addrs6 + "0104 0000 00000000", ""},
		{"about_a_later_fragment", HostUnreachable, b4, "4500 001c 0000 00b9 4011 0000" + addrs4 + "0301 0000 00000000", ""},
		{"to_multicast", HostUnreachable, b4, "4500 001c 0000 4000 4011 0000 0a000001 e00000fb 0301 0000 00000000", ""},
		{"from_nobody", HostUnreachable, b4, "4500 001c 0000 4000 4011 0000 00000000 0a000002 0301 0000 00000000", ""},
		{"too_short", HostUnreachable, b4, "4500 0017 0000 4000 4011 0000" + addrs4 + "030101", ""},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			original := unhex(t, tt.original)
			got, err := AppendError([]byte("x"), tt.reason, tt.from, original)
			if tt.want == "" {
				if !errors.Is(err, ErrNoError) || string(got) != "x" {
					t.Fatalf("%x, error %v; want none", got, err)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(hex.EncodeToString(unhex(t, tt.want)), hex.EncodeToString(got[1:])); diff != "" {
				t.Error(diff)
			}
			h, err := Parse(got[1:])
			if err != nil {
				t.Fatal(err)
			}
			sum := uint16(0)
			if h.Version == 6 {
				sum = PseudoHeader(h.Proto, h.Src, h.Dst, h.Len-h.HeaderLen)
			}
			if s := Checksum(got[1:][h.HeaderLen:], sum); s != 0xffff {
				t.Errorf("checksum of the message sums up to %#x", s)
			}
		})
	}
}

// A quote may be only the beginning of a packet, and is cut to the limit of an ICMP error.
func TestAppendErrorLimitsTheQuote(t *testing.T) {
	out := Outgoing{Src: a4, Dst: b4, Proto: ProtoUDP, PayloadLen: 4000}
	p := append(out.Append(nil), make([]byte, 4000)...)
	for _, tt := range []struct{ have, want int }{{4020, 576}, {600, 576}, {100, 128}, {28, 56}} {
		got, err := AppendError(nil, PortUnreachable, b4, p[:tt.have])
		if err != nil || len(got) != tt.want {
			t.Errorf("%d bytes of the packet: %d bytes, %v; want %d", tt.have, len(got), err, tt.want)
		}
	}
	out = Outgoing{Src: a6, Dst: b6, Proto: ProtoUDP, PayloadLen: 4000}
	p = append(out.Append(nil), make([]byte, 4000)...)
	for _, tt := range []struct{ have, want int }{{4040, 1280}, {100, 148}} {
		got, err := AppendError(nil, PortUnreachable, b6, p[:tt.have])
		if err != nil || len(got) != tt.want {
			t.Errorf("%d bytes of the IPv6 packet: %d bytes, %v; want %d", tt.have, len(got), err, tt.want)
		}
	}
}

func TestEchoReplyAnswersOnlyRequests(t *testing.T) {
	payload := []byte("hello, pod!")
	for _, tt := range []struct {
		src, dst netip.Addr
		proto    uint8
		typ      byte
	}{{b4, a4, ProtoICMP, 0}, {b6, a6, ProtoICMPv6, 129}} {
		header := EchoReply(tt.src, tt.dst, 0x1234, 7, payload)
		message := append(header[:], payload...)
		sum := uint16(0)
		if tt.proto == ProtoICMPv6 {
			sum = PseudoHeader(tt.proto, tt.src, tt.dst, len(message))
		}
		if message[0] != tt.typ || Checksum(message, sum) != 0xffff {
			t.Errorf("%v: %x", tt.src, message)
		}
		if _, _, ok := ParseEcho(tt.proto, message); ok {
			t.Errorf("%v: ParseEcho accepts a reply", tt.src)
		}
	}
	tests := []struct {
		proto   uint8
		message string
		ok      bool
	}{
		{ProtoICMP, "0800 0000 1234 0007", true},
		{ProtoICMPv6, "8000 0000 1234 0007", true},
		{ProtoICMP, "8000 0000 1234 0007", false},
		{ProtoICMPv6, "0800 0000 1234 0007", false},
		{ProtoICMP, "0801 0000 1234 0007", false},
		{ProtoICMP, "0800 0000 1234 00", false},
	}
	for _, tt := range tests {
		ident, seq, ok := ParseEcho(tt.proto, unhex(t, tt.message))
		if ok != tt.ok || ok && (ident != 0x1234 || seq != 7) {
			t.Errorf("ParseEcho(%d, %s) = %#x, %d, %v", tt.proto, tt.message, ident, seq, ok)
		}
	}
}

func TestUDPHeaderHasChecksum(t *testing.T) {
	payload := []byte{1, 2, 3}
	for _, addrs := range [][2]netip.Addr{{a4, b4}, {a6, b6}} {
		src, dst := netip.AddrPortFrom(addrs[0], 53), netip.AddrPortFrom(addrs[1], 40000)
		sum := PseudoHeader(ProtoUDP, addrs[0], addrs[1], 11)
		header := UDP(src, dst, payload, false)
		if s := Checksum(append(header[:], payload...), sum); s != 0xffff {
			t.Errorf("%v: sum %#x", src, s)
		}
		partial := UDP(src, dst, payload, true)
		if got := uint16(partial[6])<<8 | uint16(partial[7]); got != sum {
			t.Errorf("%v: partial sum %#x, want %#x", src, got, sum)
		}
	}
}

func TestHotPathDoesNotAllocate(t *testing.T) {
	var b [VirtioLen + 60]byte
	ip := Outgoing{Src: a6, Dst: b6, Proto: 17, PayloadLen: 10}
	packet := append(ip.Append(nil), make([]byte, 10)...)
	buf := make([]byte, 0, 2048)
	src, dst := netip.AddrPortFrom(a6, 1), netip.AddrPortFrom(b6, 2)
	got := testing.AllocsPerRun(100, func() {
		if _, err := ParseVirtio(b[:]); err != nil {
			t.Fatal(err)
		}
		if _, err := Parse(packet); err != nil {
			t.Fatal(err)
		}
		_ = ip.Append(buf)
		_ = UDP(src, dst, packet, false)
		if _, err := AppendError(buf, PortUnreachable, b6, packet); err != nil {
			t.Fatal(err)
		}
	})
	if got != 0 {
		t.Errorf("%v allocations", got)
	}
}

func FuzzParse(f *testing.F) {
	f.Add(unhex(f, "4600 001c 1234 0000 4006 0000"+addrs4+"01010100 01020304 ffff"))
	f.Add(unhex(f, "60000000 0014 0040"+addrs6+"3c00010400000000 0600010400000000 01020304"))
	f.Add(unhex(f, "60000000 000c 2c40"+addrs6+"1100 0001 deadbeef 01020304"))
	f.Fuzz(func(t *testing.T, p []byte) {
		h, err := Parse(p)
		if err != nil {
			return
		}
		if h.HeaderLen < IPv4HeaderLen || h.HeaderLen > h.Len || h.Len > len(p) || h.Src.Is4() != (h.Version == 4) {
			t.Errorf("%+v of %d bytes", h, len(p))
		}
	})
}

func FuzzParseVirtio(f *testing.F) {
	f.Add(unhex(f, "0181 3400 7805 1400 1000"+strings.Repeat("00", 100)))
	f.Fuzz(func(t *testing.T, p []byte) {
		v, err := ParseVirtio(p)
		if err != nil {
			return
		}
		if v.Flags&VirtioNeedsChecksum != 0 && VirtioLen+int(v.ChecksumStart)+int(v.ChecksumOffset)+2 > len(p) {
			t.Errorf("%+v of %d bytes", v, len(p))
		}
		var back [VirtioLen]byte
		v.Put(back[:])
		if string(back[:]) != string(p[:VirtioLen]) {
			t.Errorf("% x became % x", p[:VirtioLen], back)
		}
	})
}

func FuzzAppendError(f *testing.F) {
	f.Add(uint8(1), unhex(f, "4500 0028 1111 4000 4006 0000"+addrs4+"c000 0050 01020304 00000000 5002 ffff 0000 0000"))
	f.Add(uint8(4), unhex(f, "60000000 0fff 1140"+addrs6+"c000 0035 000c 0000 01020304"))
	f.Fuzz(func(t *testing.T, reason uint8, p []byte) {
		from := b4
		if len(p) > 0 && p[0]>>4 == 6 {
			from = b6
		}
		got, err := AppendError(nil, Reason(reason), from, p)
		if err != nil {
			return
		}
		h, err := Parse(got)
		if err != nil || h.Len != len(got) || h.Src != from || len(got) > maxErrorLen6 {
			t.Errorf("%x: %+v, %v", got, h, err)
		}
	})
}

func BenchmarkParse(b *testing.B) {
	b.ReportAllocs()
	ip := Outgoing{Src: a4, Dst: b4, Proto: 6, PayloadLen: 20}
	p := append(ip.Append(nil), make([]byte, 20)...)
	for b.Loop() {
		if _, err := Parse(p); err != nil {
			b.Fatal(err)
		}
	}
}

func BenchmarkChecksum64K(b *testing.B) {
	b.ReportAllocs()
	p := make([]byte, 65535)
	b.SetBytes(int64(len(p)))
	for b.Loop() {
		Checksum(p, 0)
	}
}

func BenchmarkAppendUDP(b *testing.B) {
	b.ReportAllocs()
	buf := make([]byte, 0, 64)
	src, dst := netip.AddrPortFrom(a4, 53), netip.AddrPortFrom(b4, 40000)
	payload := make([]byte, 100)
	for b.Loop() {
		ip := Outgoing{Src: a4, Dst: b4, Proto: ProtoUDP, PayloadLen: 8 + len(payload)}
		h := UDP(src, dst, payload, false)
		_ = append(ip.Append(buf), h[:]...)
	}
}
