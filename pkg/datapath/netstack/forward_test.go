package netstack

import (
	"bytes"
	"net/netip"
	"testing"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
)

// forwardTo is a PacketForwarder that takes packets to one address.
type forwardTo struct {
	to    netip.Addr
	buf   []byte
	taken chan []byte
	given int // buffers
}

func (d *forwardTo) Buffer() []byte {
	if d.buf == nil {
		d.buf = make([]byte, packet.VirtioLen+65535)
		d.given++
	}
	return d.buf
}

func (d *forwardTo) Forward(n int, h packet.Header) bool {
	if h.Dst != d.to {
		return false
	}
	d.taken <- d.buf[:n]
	d.buf = nil
	return true
}

// The PacketForwarder receives packets of any protocol byte for byte, with their virtio-net headers. The stack handles
// the packets that the forwarder does not take, and ignores packets to neighbors on a link.
func TestForwarderTakesPacketsWhole(t *testing.T) {
	d := &forwardTo{to: netip.MustParseAddr("198.19.3.4"), taken: make(chan []byte, 1)}
	w, s := newWire(t, Config{Dialer: dialer{}, Forwarder: d})
	send := func(dst string) []byte {
		t.Helper()
		virtio := packet.Virtio{Flags: packet.VirtioNeedsChecksum, ChecksumStart: 20, ChecksumOffset: 8}
		ip := packet.Outgoing{Src: appAddr.Addr(), Dst: netip.MustParseAddr(dst), Proto: 132, PayloadLen: 12} // SCTP
		p := make([]byte, packet.VirtioLen)
		virtio.Put(p)
		p = append(ip.Append(p), "twelve bytes"...)
		if err := w.dev.Writev([][]byte{p}); err != nil {
			t.Fatal(err)
		}
		return p
	}
	for range 2 {
		want := send("198.19.3.4")
		if got := <-d.taken; !bytes.Equal(got, want) {
			t.Errorf("forwarded %x, want %x", got, want)
		}
	}
	send("224.0.0.251")
	send("10.2.0.9")
	if got := w.receive(); got.Proto != packet.ProtoICMP || got.Src != netip.MustParseAddr("10.2.0.9") {
		t.Errorf("the stack's own packet got %+v for an answer", got.Header)
	}
	testenv.Until(t, "the packets are counted", func() bool {
		c := s.Stats()
		return c.Forwarded == 2 && c.Ignored == 1 && c.PacketsIn == 4
	})
	// Each packet that was taken has its own buffer; the other packets shared the third.
	if d.given != 3 {
		t.Errorf("%d buffers were used", d.given)
	}
}

// BenchmarkForward measures a forwarded packet, from the device's buffer to the forwarder.
func BenchmarkForward(b *testing.B) {
	d := &forwardTo{to: netip.MustParseAddr("198.19.3.4"), taken: make(chan []byte, 1)}
	var stats counters
	l := newLinkEndpoint(&null{}, d, &stats)
	ip := packet.Outgoing{Src: appAddr.Addr(), Dst: d.to, Proto: packet.ProtoUDP, PayloadLen: 1000}
	n := copy(d.Buffer(), append(ip.Append(make([]byte, packet.VirtioLen)), make([]byte, 1000)...))
	b.ReportAllocs()
	for b.Loop() {
		l.deliver(d.buf[:n])
		d.buf = <-d.taken
	}
}
