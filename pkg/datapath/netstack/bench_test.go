package netstack

import (
	"context"
	"net/netip"
	"os"
	"sync"
	"testing"

	"gvisor.dev/gvisor/pkg/buffer"
	"gvisor.dev/gvisor/pkg/tcpip"
	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
)

// null is a Device that discards writes and never returns a packet.
type null struct {
	closed chan struct{}
	once   sync.Once
}

func (d *null) MTU() int              { return 1500 }
func (d *null) GSO() bool             { return true }
func (d *null) USO() bool             { return true }
func (d *null) Writev([][]byte) error { return nil }
func (d *null) Read([]byte) (int, error) {
	<-d.closed
	return 0, os.ErrClosed
}

func (d *null) Close() error {
	d.once.Do(func() { close(d.closed) })
	return nil
}

// discard is a PacketStream that discards writes and never returns a packet.
type discard struct{ *packets }

func (discard) WritePacket([]byte) error { return nil }

// BenchmarkDeliverUDP measures a datagram of an open flow, from the device to the stream's queue.
func BenchmarkDeliverUDP(b *testing.B) {
	s := start(b, Config{Device: &null{closed: make(chan struct{})}, Dialer: dialer{
		udp: func(context.Context, netip.AddrPort, netip.AddrPort) (PacketStream, error) {
			return discard{newPackets()}, nil
		},
	}})
	testenv.Until(b, "it runs", func() bool { s.mu.Lock(); defer s.mu.Unlock(); return s.gv != nil })
	payload := make([]byte, 1000)
	udp := packet.UDP(appAddr, podAddr, payload, false)
	ip := packet.Outgoing{Src: appAddr.Addr(), Dst: podAddr.Addr(), Proto: packet.ProtoUDP, PayloadLen: 8 + len(payload)}
	p := append(append(ip.Append(make([]byte, packet.VirtioLen)), udp[:]...), payload...)
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		s.link.deliver(p)
	}
}

// BenchmarkSendUDP measures a datagram from the stream to the device.
func BenchmarkSendUDP(b *testing.B) {
	var stats counters
	l := newLinkEndpoint(&null{}, nil, &stats)
	payload := make([]byte, 1000)
	b.SetBytes(int64(len(payload)))
	b.ReportAllocs()
	for b.Loop() {
		if err := l.sendUDP(podAddr, appAddr, payload); err != nil {
			b.Fatal(err)
		}
	}
}

// BenchmarkWritePackets measures a TCP super-packet from gVisor to the device.
func BenchmarkWritePackets(b *testing.B) {
	var stats counters
	l := newLinkEndpoint(&null{}, nil, &stats)
	pkt := stack.NewPacketBuffer(stack.PacketBufferOptions{
		ReserveHeaderBytes: header.IPv4MinimumSize + header.TCPMinimumSize,
		Payload:            buffer.MakeWithView(buffer.NewViewSize(60000)),
	})
	defer pkt.DecRef()
	pkt.TransportHeader().Push(header.TCPMinimumSize)
	pkt.NetworkHeader().Push(header.IPv4MinimumSize)
	pkt.GSOOptions = stack.GSO{Type: stack.GSOTCPv4, NeedsCsum: true, CsumOffset: 16, MSS: 1400, L3HdrLen: 20}
	b.SetBytes(60000)
	b.ReportAllocs()
	for b.Loop() {
		var list stack.PacketBufferList
		list.PushBack(pkt)
		if n, err := l.WritePackets(list); n != 1 || err != nil {
			b.Fatal(n, tcpip.Error(err))
		}
	}
}
