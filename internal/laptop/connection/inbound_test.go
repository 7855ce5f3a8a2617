package connection

import (
	"context"
	"encoding/binary"
	"io"
	"net/netip"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
)

const (
	laptop, other, pod = "198.19.4.9", "198.19.7.7", "10.244.0.2"
	syn, ack           = 0x02, 0x10
)

// datagram is a packet with its virtio-net header, and the beginning of its payload.
func datagram(src, dst string, proto uint8, payload []byte) []byte {
	ip := packet.Outgoing{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), Proto: proto, PayloadLen: len(payload)}
	return append(ip.Append(make([]byte, packet.VirtioLen)), payload...)
}

func ports(sport, dport uint16, n int) []byte {
	b := make([]byte, n)
	binary.BigEndian.PutUint16(b, sport)
	binary.BigEndian.PutUint16(b[2:], dport)
	return b
}

func tcpPacket(src, dst string, dport uint16, flags byte) []byte {
	b := ports(40000, dport, 20)
	b[12], b[13] = 5<<4, flags
	return datagram(src, dst, packet.ProtoTCP, b)
}

func udpPacket(src, dst string, sport, dport uint16) []byte {
	b := ports(sport, dport, 8)
	b[5] = 8
	return datagram(src, dst, packet.ProtoUDP, b)
}

// fragment makes a packet a part of one, whose payload begins at offset.
func fragment(b []byte, offset int, more bool) []byte {
	field := uint16(offset / 8)
	if more {
		field |= 0x2000
	}
	binary.BigEndian.PutUint16(b[packet.VirtioLen+6:], field)
	return b
}

func icmpPacket(src, dst string, kind byte) []byte {
	proto := uint8(packet.ProtoICMP)
	if netip.MustParseAddr(src).Is6() {
		proto = packet.ProtoICMPv6
	}
	return datagram(src, dst, proto, append([]byte{kind}, make([]byte, 7)...))
}

// passes reports whether the laptop's kernel gets a packet from the tunnel.
func (r *packetRig) passes(stream io.Writer, b []byte) bool {
	r.t.Helper()
	const marker = "198.19.9.9"
	r.deliver(stream, b, icmpPacket(marker, laptop, 8))
	if r.arrived().Src.String() == marker {
		return false
	}
	r.arrived() // the marker
	return true
}

func TestNewFlowsFromTheTunnelAreDenied(t *testing.T) {
	for _, netstack := range []string{api.NetstackGVisor, api.NetstackSystem} {
		t.Run(netstack, func(t *testing.T) {
			r := newPacketRig(t)
			stream := <-r.streams
			r.s.hasGateway(api.Gateway{MTU: 1450, IPv4: true}, netstack)
			peers := []string{other}
			if netstack == api.NetstackSystem {
				peers = append(peers, pod)
			}
			expect := func(want bool, about string, b []byte) {
				t.Helper()
				if got := r.passes(stream, b); got != want {
					t.Errorf("%s: passed is %v, want %v", about, got, want)
				}
			}
			for _, peer := range peers {
				expect(false, "a TCP connection", tcpPacket(peer, laptop, 8080, syn))
				expect(false, "a TCP connection with other flags", tcpPacket(peer, laptop, 8080, syn|0xc8))
				expect(false, "a TCP header in two fragments, the first", fragment(datagram(peer, laptop, packet.ProtoTCP, ports(1, 8080, 8)), 0, true))
				expect(false, "a TCP header in two fragments, the second", fragment(datagram(peer, laptop, packet.ProtoTCP, make([]byte, 12)), 8, false))
				expect(true, "an answer to a TCP connection", tcpPacket(peer, laptop, 40000, syn|ack))
				expect(true, "a segment of a TCP connection", tcpPacket(peer, laptop, 40000, ack))
				expect(false, "a datagram", udpPacket(peer, laptop, 53, 5353))
				expect(false, "a protocol without a name", datagram(peer, laptop, 253, []byte("hello")))
				expect(true, "a ping", icmpPacket(peer, laptop, 8))
				expect(true, "an ICMP error", icmpPacket(peer, laptop, 3))
				expect(false, "an ICMP redirect", icmpPacket(peer, laptop, 5))
			}
			for _, b := range [][]byte{udpPacket(laptop, other, 5353, 53), datagram(laptop, other, 253, []byte("hello"))} {
				if err := r.app.Writev([][]byte{b}); err != nil {
					t.Fatal(err)
				}
				for r.crossedTo(other).Proto == packet.ProtoICMP { // the other laptop hears what was denied above
				}
			}
			expect(true, "an answer to a datagram", udpPacket(other, laptop, 53, 5353))
			expect(true, "the rest of a long answer", fragment(datagram(other, laptop, packet.ProtoUDP, make([]byte, 16)), 1480, false))
			expect(false, "a datagram from another port", udpPacket(other, laptop, 54, 5353))
			expect(false, "a datagram to another port", udpPacket(other, laptop, 53, 5354))
			expect(false, "an answer of somebody else", udpPacket("198.19.7.8", laptop, 53, 5353))
			expect(true, "an answer in a protocol without a name", datagram(other, laptop, 253, []byte("hello")))

			r.s.packets.steer(func(s *steering) { s.open = inbound{{Port: 8080}, {Port: 5354, UDP: true}} })
			expect(true, "a TCP connection to an open port", tcpPacket(other, laptop, 8080, syn))
			expect(false, "a TCP connection to a UDP port", tcpPacket(other, laptop, 5354, syn))
			expect(true, "a datagram to an open port", udpPacket(other, laptop, 53, 5354))
			expect(false, "a datagram to a TCP port", udpPacket(other, laptop, 53, 8080))
			r.s.packets.steer(func(s *steering) { s.open = inbound{{All: true}} })
			expect(true, "any TCP connection", tcpPacket(other, laptop, 22, syn))
			expect(true, "any protocol", datagram(other, laptop, 254, []byte("hello")))
		})
	}
}

// A program on another laptop learns at once that the port is closed.
func TestDeniedFlowsAreReported(t *testing.T) {
	r := newPacketRig(t)
	stream := <-r.streams
	r.s.hasGateway(api.Gateway{MTU: 1450, IPv4: true}, api.NetstackSystem)
	r.deliver(stream, udpPacket(pod, laptop, 53, 5353), tcpPacket(other, laptop, 8080, syn))
	h := r.crossedTo(other) // and nothing before it: pods hear nothing
	if h.Src.String() != laptop || h.Proto != packet.ProtoICMP {
		t.Errorf("the other laptop hears %+v", h)
	}
}

// A flow expires after a while without packets, no matter when the last lookup was.
func TestIdleFlowsExpire(t *testing.T) {
	f := flow{proto: packet.ProtoUDP, remote: netip.MustParseAddrPort(other + ":53"), port: 5353}
	for _, tt := range []struct {
		about string
		after []time.Duration // each with a look-up at its end
		want  bool
	}{
		{"at once", []time.Duration{0}, true},
		{"just used", []time.Duration{flowTime - time.Second}, true},
		{"kept by its answers", []time.Duration{flowTime - 1, flowTime, flowTime, flowTime}, true},
		{"old", []time.Duration{2*flowTime + 1}, false},
		{"very old", []time.Duration{100*flowTime + 1}, false},
	} {
		t.Run(tt.about, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				ctx, cancel := context.WithCancel(t.Context())
				defer cancel()
				r := newRecent()
				go r.run(ctx)
				synctest.Wait()
				r.add(f)
				got := false
				for _, d := range tt.after {
					time.Sleep(d)
					got = r.has(f)
				}
				if got != tt.want {
					t.Errorf("known is %v", got)
				}
			})
		})
	}
}

// The table is bounded and always contains the latest flow.
func TestRecentFlowsAreBounded(t *testing.T) {
	r := newRecent()
	for i := range uint32(5 * maxFlows) {
		f := flow{remote: netip.AddrPortFrom(netip.AddrFrom4([4]byte{10, byte(i >> 16), byte(i >> 8), byte(i)}), 53)}
		r.add(f)
		if !r.has(f) {
			t.Fatalf("flow %d is not known", i)
		}
	}
	if n := len(r.now) + len(r.before); n > 2*maxFlows {
		t.Errorf("%d flows are kept", n)
	}
}

// For any packet of the tunnel, the filter reads nothing beyond its end and passes no new TCP connection.
func FuzzInbound(f *testing.F) {
	for _, b := range [][]byte{
		tcpPacket(other, laptop, 8080, syn), tcpPacket(other, laptop, 8080, ack), udpPacket(other, laptop, 1, 2), icmpPacket(other, laptop, 8),
		icmpPacket("fd00::1", "fd00::2", 129), fragment(tcpPacket(other, laptop, 80, ack), 8, true), datagram(other, laptop, 253, nil),
	} {
		f.Add(b[packet.VirtioLen:])
	}
	known := newRecent()
	f.Fuzz(func(t *testing.T, p []byte) {
		h, err := packet.Parse(p)
		if err != nil {
			return
		}
		p = p[:h.Len]
		in := inbound(nil)
		if !in.admits(known, &h, p) || h.Proto != packet.ProtoTCP || h.FragmentOffset != 0 {
			return
		}
		if flags := p[h.HeaderLen+13]; flags&(syn|ack) == syn {
			t.Fatalf("a new connection passed: %x", p)
		}
	})
}
