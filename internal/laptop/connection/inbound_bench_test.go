package connection

import (
	"log/slog"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/wire/transport/transporttest"
)

// BenchmarkRecent measures what it costs to remember a datagram's flow, and to recognise the answer.
func BenchmarkRecent(b *testing.B) {
	p := udpPacket(laptop, pod, 40000, 53)[packet.VirtioLen:]
	h, err := packet.Parse(p)
	if err != nil {
		b.Fatal(err)
	}
	answer := udpPacket(pod, laptop, 53, 40000)[packet.VirtioLen:]
	back, err := packet.Parse(answer)
	if err != nil {
		b.Fatal(err)
	}
	sent, none := newRecent(), inbound(nil)
	b.Run("add", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if f, ok := flowOf(&h, p, h.Dst); ok {
				sent.add(f)
			}
		}
	})
	b.Run("admits", func(b *testing.B) {
		b.ReportAllocs()
		for b.Loop() {
			if !none.admits(sent, &back, answer) {
				b.Fatal("the answer is not admitted")
			}
		}
	})
}

// BenchmarkForward measures a packet from the device's reader to the manager's end of a packet stream, without the
// system calls of a device and a socket. UDP passes recent, TCP does not.
func BenchmarkForward(b *testing.B) {
	for name, raw := range map[string][]byte{
		"udp": udpPacket(laptop, other, 40000, 53), "tcp": tcpPacket(laptop, other, 8080, ack),
	} {
		b.Run(name, func(b *testing.B) {
			session, manager := transporttest.Pair(b)
			var received, malformed atomic.Uint64
			go func() {
				for {
					in, err := manager.Accept(b.Context())
					if err != nil {
						return
					}
					st, err := in.Accept()
					if err != nil {
						return
					}
					go packetlink.Receive(st, int(in.Src.Port()), new(packetlink.Barriers), packetlink.DeliverFunc(func(f *packetlink.Frame) {
						received.Add(1)
						f.Release()
					}), &malformed)
				}
			}()
			now := new(current)
			now.set(session)
			p := newPacketPath(now, noHosts(), &shortcuts{open: newRecent()}, slog.New(slog.DiscardHandler))
			p.steer(func(s *steering) { s.own, s.inner = addrs(laptop), prefixes("198.19.0.0/16") })
			go p.run(b.Context())
			h, err := packet.Parse(raw[packet.VirtioLen:])
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			sent := uint64(0)
			for b.Loop() {
				n := copy(p.Buffer(), raw)
				if !p.Forward(n, h) {
					b.Fatal("not forwarded")
				}
				for sent++; sent-received.Load() > 1000; {
					time.Sleep(10 * time.Microsecond) // as the device's reader would wait
				}
			}
		})
	}
}
