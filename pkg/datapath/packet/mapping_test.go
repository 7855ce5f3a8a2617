package packet

import (
	"bytes"
	"net/netip"
	"testing"

	"gvisor.dev/gvisor/pkg/tcpip/checksum"
)

// mappings of tests: b4 and b6 are the cluster's, and the program knows c4 and c6.
var (
	testMappings = Mappings{
		{netip.MustParsePrefix("10.0.0.2/31"), netip.MustParsePrefix("198.18.5.6/31")},
		{netip.MustParsePrefix("fd00::/120"), netip.MustParsePrefix("fd6b:7670:ffff::/120")},
	}
	c4 = netip.MustParseAddr("198.18.5.6")
	c6 = netip.MustParseAddr("fd6b:7670:ffff::2")
	l4 = netip.MustParseAddr("198.19.4.9") // the laptop's inner addresses
	l6 = netip.MustParseAddr("fd6b:7670:6e00::9")
)

func TestMappingKeepsTheHostPart(t *testing.T) {
	for _, tt := range []struct{ cluster, local, a, b string }{
		{"10.0.0.0/8", "11.0.0.0/8", "10.1.2.3", "11.1.2.3"},
		{"10.0.3.0/24", "198.18.0.0/24", "10.0.3.255", "198.18.0.255"},
		{"10.0.3.128/25", "198.18.0.0/25", "10.0.3.129", "198.18.0.1"},
		{"10.0.3.4/32", "198.18.0.9/32", "10.0.3.4", "198.18.0.9"},
		{"fd00:1::/64", "fd6b:7670:1:2::/64", "fd00:1::aaaa:1", "fd6b:7670:1:2:0:0:aaaa:1"},
		{"fd00:1::/59", "fd6b:7670:1:20::/59", "fd00:1:0:1f::1", "fd6b:7670:1:3f::1"},
		{"fd00:1::7/128", "fd6b:7670::8/128", "fd00:1::7", "fd6b:7670::8"},
	} {
		ms := Mappings{{netip.MustParsePrefix(tt.cluster), netip.MustParsePrefix(tt.local)}}
		a, b := netip.MustParseAddr(tt.a), netip.MustParseAddr(tt.b)
		if got := ms.ToLocal(a); got != b {
			t.Errorf("%v: %v is %v, want %v", ms[0], a, got, b)
		}
		if got := ms.ToCluster(b); got != a {
			t.Errorf("%v: %v is %v, want %v", ms[0], b, got, a)
		}
		if other := netip.MustParseAddr("192.0.2.1"); ms.ToLocal(other) != other || ms.ToCluster(other) != other {
			t.Errorf("%v maps %v", ms[0], other)
		}
	}
	if none := (Mappings)(nil); none.ToLocal(a4) != a4 || none.ToCluster(a4) != a4 {
		t.Error("nil maps")
	}
}

// packetOf returns a virtio-net header and a packet with a complete checksum.
func packetOf(src, dst netip.Addr, proto uint8, transport []byte) []byte {
	out := Outgoing{Src: src, Dst: dst, Proto: proto, PayloadLen: len(transport)}
	b := append(out.Append(make([]byte, VirtioLen)), transport...)
	if at := transportChecksum(proto); at >= 0 {
		tail := b[len(b)-len(transport):]
		tail[at], tail[at+1] = 0, 0
		sum := uint16(0)
		if proto != ProtoICMP {
			sum = PseudoHeader(proto, src, dst, len(transport))
		}
		sum = ^Checksum(tail, sum)
		tail[at], tail[at+1] = byte(sum>>8), byte(sum)
	}
	return b
}

func transportChecksum(proto uint8) int {
	switch proto {
	case ProtoTCP:
		return 16
	case ProtoUDP:
		return 6
	case ProtoICMP, ProtoICMPv6:
		return 2
	}
	return -1
}

func tcp() []byte {
	b := make([]byte, 20, 64)
	copy(b, "\x12\x34\x00\x50\x01\x02\x03\x04\x05\x06\x07\x08\x50\x10\xff\xff")
	return append(b, "odd data "...)
}

func udp(payload string) []byte {
	return append([]byte{0x12, 0x34, 0, 53, 0, byte(8 + len(payload)), 0, 0}, payload...)
}

func echo() []byte { return []byte("\x08\x00\x00\x00\x00\x01\x00\x02ping") }

// quoting returns an ICMP error about the packet of b.
func quoting(kind byte, b []byte, most int) []byte {
	quote := b[VirtioLen:]
	return append([]byte{kind, 1, 0, 0, 0, 0, 5, 0xdc}, quote[:min(len(quote), most)]...)
}

// Packets have the same bytes as if their senders had used the other addresses.
func TestPacketsAreTranslated(t *testing.T) {
	fragment := func(src, dst netip.Addr, offset int, data []byte) []byte {
		o := Outgoing{Src: src, Dst: dst, Proto: ProtoUDP, PayloadLen: len(data), Fragment: true, ID: 7, FragmentOffset: offset, MoreFragments: true}
		return append(o.Append(make([]byte, VirtioLen)), data...)
	}
	whole := udp("in fragments ...")
	first := func(src, dst netip.Addr) []byte {
		sum := PseudoHeader(ProtoUDP, src, dst, len(whole))
		b := bytes.Clone(whole)
		sum = ^Checksum(b, sum)
		b[6], b[7] = byte(sum>>8), byte(sum)
		return fragment(src, dst, 0, b[:16])
	}
	nothing := packetOf(l4, c4, ProtoUDP, udp("no checksum"))
	nothing[len(nothing)-len("no checksum")-2], nothing[len(nothing)-len("no checksum")-1] = 0, 0
	to := packetOf(l4, b4, ProtoUDP, udp("no checksum"))
	to[len(to)-len("no checksum")-2], to[len(to)-len("no checksum")-1] = 0, 0
	for _, tt := range []struct {
		name       string
		sent       bool
		from, want []byte
	}{
		{"tcp sent", true, packetOf(l4, c4, ProtoTCP, tcp()), packetOf(l4, b4, ProtoTCP, tcp())},
		{"tcp received", false, packetOf(b4, l4, ProtoTCP, tcp()), packetOf(c4, l4, ProtoTCP, tcp())},
		{"tcp of another", false, packetOf(a4, l4, ProtoTCP, tcp()), packetOf(a4, l4, ProtoTCP, tcp())},
		{"tcp to the true address", true, packetOf(l4, b4, ProtoTCP, tcp()), packetOf(l4, b4, ProtoTCP, tcp())},
		{"tcp sent, IPv6", true, packetOf(l6, c6, ProtoTCP, tcp()), packetOf(l6, b6, ProtoTCP, tcp())},
		{"udp received, IPv6", false, packetOf(b6, l6, ProtoUDP, udp("x")), packetOf(c6, l6, ProtoUDP, udp("x"))},
		{"udp without a checksum", true, nothing, to},
		{"ping", true, packetOf(l4, c4, ProtoICMP, echo()), packetOf(l4, b4, ProtoICMP, echo())},
		{"ping, IPv6", true, packetOf(l6, c6, ProtoICMPv6, append([]byte{128}, echo()[1:]...)), packetOf(l6, b6, ProtoICMPv6, append([]byte{128}, echo()[1:]...))},
		{"another protocol", true, packetOf(l4, c4, 132, []byte("sctp")), packetOf(l4, b4, 132, []byte("sctp"))},
		{"first fragment", true, first(l4, c4), first(l4, b4)},
		{"later fragment", true, fragment(l4, c4, 16, []byte("rest")), fragment(l4, b4, 16, []byte("rest"))},
		{"unreachable, by the host", false,
			packetOf(b4, l4, ProtoICMP, quoting(icmpUnreachable, packetOf(l4, b4, ProtoUDP, udp("q")), 576)),
			packetOf(c4, l4, ProtoICMP, quoting(icmpUnreachable, packetOf(l4, c4, ProtoUDP, udp("q")), 576))},
		{"too big, by a router", false,
			packetOf(a4, l4, ProtoICMP, quoting(icmpUnreachable, packetOf(l4, b4, ProtoTCP, tcp()), 28)),
			packetOf(a4, l4, ProtoICMP, quoting(icmpUnreachable, packetOf(l4, c4, ProtoTCP, tcp()), 28))},
		{"time exceeded, IPv6, by a router", false,
			packetOf(a6.Next().Next().Next(), l6, ProtoICMPv6, quoting(3, packetOf(l6, b6, ProtoTCP, tcp()), 1232)),
			packetOf(netip.MustParseAddr("fd6b:7670:ffff::4"), l6, ProtoICMPv6, quoting(3, packetOf(l6, c6, ProtoTCP, tcp()), 1232))},
		{"unreachable, of this machine", true,
			packetOf(l4, c4, ProtoICMP, quoting(icmpUnreachable, packetOf(c4, l4, ProtoUDP, udp("q")), 576)),
			packetOf(l4, b4, ProtoICMP, quoting(icmpUnreachable, packetOf(b4, l4, ProtoUDP, udp("q")), 576))},
		{"unreachable, of this machine, IPv6", true,
			packetOf(l6, c6, ProtoICMPv6, quoting(1, packetOf(c6, l6, ProtoUDP, udp("q")), 576)),
			packetOf(l6, b6, ProtoICMPv6, quoting(1, packetOf(b6, l6, ProtoUDP, udp("q")), 576))},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got := bytes.Clone(tt.from)
			if tt.sent {
				testMappings.Sent(got)
			} else {
				testMappings.Received(got)
			}
			if !bytes.Equal(got, tt.want) {
				t.Errorf("% x\nbecame % x\nwant   % x", tt.from, got, tt.want)
			}
		})
	}
}

// The kernel completes the checksums of super-packets, from the sum of the pseudo header.
func TestSumsOfPseudoHeadersAreTranslated(t *testing.T) {
	v, _, p := superPacket(t, 0x10)
	b := make([]byte, VirtioLen, VirtioLen+len(p))
	v.Put(b)
	b = append(b, p...)
	testMappings.Received(b) // the source is a4, which is not mapped
	if !bytes.Equal(b[VirtioLen:], p) {
		t.Error("another packet changed")
	}
	ms := Mappings{{netip.PrefixFrom(a4, 32), netip.PrefixFrom(c4, 32)}}
	ms.Received(b)
	got := b[VirtioLen:]
	tcp := got[20:]
	if want := PseudoHeader(ProtoTCP, c4, b4, len(tcp)); got[36] != byte(want>>8) || got[37] != byte(want) {
		t.Errorf("the field holds %x, want %04x", got[36:38], want)
	}
}

// sums reports whether the checksums of a packet are right, as gVisor computes them. ok is false for packets without.
func sums(p []byte) (right, ok bool) {
	h, err := Parse(p)
	if err != nil || h.IsFragment() {
		return false, false
	}
	if h.Version == 4 && checksum.Checksum(p[:h.HeaderLen], 0) != 0xffff {
		return false, true
	}
	payload := p[h.HeaderLen:h.Len]
	at := transportChecksum(h.Proto)
	if at < 0 || len(payload) < at+2 || h.Proto == ProtoUDP && payload[6] == 0 && payload[7] == 0 {
		return false, false
	}
	sum := uint16(0)
	if h.Proto != ProtoICMP {
		sum = PseudoHeader(h.Proto, h.Src, h.Dst, len(payload))
	}
	return checksum.Checksum(payload, sum) == 0xffff, true
}

// Whatever the packet: right checksums stay right, and a truncated packet is no fault.
func FuzzMappings(f *testing.F) {
	add := func(b []byte) {
		f.Add(true, b)
		f.Add(false, b)
		f.Add(true, b[:len(b)-3])
		f.Add(false, b[:VirtioLen+22])
	}
	add(packetOf(l4, c4, ProtoTCP, tcp()))
	add(packetOf(b4, l4, ProtoUDP, udp("x")))
	add(packetOf(b6, l6, ProtoUDP, udp("x")))
	add(packetOf(a4, l4, ProtoICMP, quoting(icmpUnreachable, packetOf(l4, b4, ProtoTCP, tcp()), 28)))
	add(packetOf(b6, l6, ProtoICMPv6, quoting(1, packetOf(l6, b6, ProtoUDP, udp("q")), 576)))
	add(packetOf(l4, c4, ProtoICMP, quoting(icmpUnreachable, packetOf(c4, l4, ProtoUDP, udp("q")), 576)))
	f.Fuzz(func(t *testing.T, sent bool, b []byte) {
		was := bytes.Clone(b)
		testMappings.translate(b, sent)
		if len(b) < VirtioLen || bytes.Equal(b, was) {
			return
		}
		if right, ok := sums(was[VirtioLen:]); ok && right && was[0]&VirtioNeedsChecksum == 0 {
			if now, _ := sums(b[VirtioLen:]); !now {
				t.Errorf("% x\nbecame % x: a checksum is wrong", was, b)
			}
		}
	})
}

func BenchmarkMappings(b *testing.B) {
	for name, to := range map[string]netip.Addr{"mapped": c4, "other": a4} {
		b.Run(name, func(b *testing.B) {
			b.ReportAllocs()
			p := packetOf(l4, to, ProtoTCP, tcp())
			q := bytes.Clone(p)
			for b.Loop() {
				copy(q, p)
				testMappings.Sent(q)
			}
		})
	}
}
