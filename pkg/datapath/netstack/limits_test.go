package netstack

import (
	"context"
	"net/netip"
	"syscall"
	"testing"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun/tuntest"
)

// source returns the n-th of many sources.
func source(n int) netip.AddrPort {
	return netip.AddrPortFrom(appAddr.Addr(), uint16(1024+n))
}

// A program that connects to what never answers holds so many SYNs and no more. The oldest stay, and new ones are dropped
// without an answer.
func TestHeldSYNsAreBounded(t *testing.T) {
	dialled := make(chan netip.AddrPort, 2*maxHeldSYNs)
	release := make(chan struct{})
	w, s := newWire(t, Config{Dialer: dialer{tcp: func(ctx context.Context, src, _ netip.AddrPort) (Stream, error) {
		dialled <- src
		select {
		case <-release:
			return nil, syscall.ECONNREFUSED
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}}})
	const sent = maxHeldSYNs + 1000
	for n := range sent {
		w.sendFrom(source(n), flagSYN, 1000, 0)
	}
	until(t, "all SYNs are read", func() bool { return s.Stats().PacketsIn == sent })
	if got := s.Stats(); got.TCP.Dropped != 1000 || got.PacketsOut != 0 {
		t.Errorf("%d SYNs were dropped and %d packets sent, want 1000 and none", got.TCP.Dropped, got.PacketsOut)
	}
	until(t, "the others are dialled", func() bool { return len(dialled) == maxHeldSYNs })
	close(release)
	refused := make(map[uint16]bool)
	for range maxHeldSYNs {
		if r := w.receive(); r.flags == flagRST|flagACK {
			refused[r.dstPort()] = true
		}
	}
	for n := range maxHeldSYNs {
		if !refused[source(n).Port()] {
			t.Fatalf("SYN %d of the first %d got no answer", n, maxHeldSYNs)
		}
	}
	until(t, "a new SYN is held again", func() bool {
		w.sendFrom(source(sent), flagSYN, 1000, 0)
		return len(dialled) > maxHeldSYNs
	})
}

// A program that sends to ever more ports gets so many flows and no more. Those that live go on.
func TestDatagramFlowsAreBounded(t *testing.T) {
	streams := make(chan *packets, 2*maxDatagramFlows)
	ours, theirs := tuntest.Pair(1500, true)
	t.Cleanup(func() { theirs.Close() })
	s := start(t, Config{Device: ours, Dialer: dialer{udp: func(context.Context, netip.AddrPort, netip.AddrPort) (PacketStream, error) {
		p := newPackets()
		streams <- p
		return p, nil
	}}})
	send := func(from netip.AddrPort) {
		t.Helper()
		udp := packet.UDP(from, podAddr, []byte("abc"), false)
		ip := packet.Outgoing{Src: from.Addr(), Dst: podAddr.Addr(), Proto: packet.ProtoUDP, PayloadLen: 11}
		if err := theirs.Writev([][]byte{ip.Append(make([]byte, packet.VirtioLen)), udp[:], []byte("abc")}); err != nil {
			t.Fatal(err)
		}
	}
	send(source(0))
	first := <-streams
	for n := range maxDatagramFlows + 1000 {
		send(source(n + 1))
	}
	until(t, "all datagrams are read", func() bool { return s.Stats().PacketsIn == maxDatagramFlows+1001 })
	if got := s.Stats().UDP; got.Open != maxDatagramFlows || got.Dropped != 1001 {
		t.Errorf("%d flows are open and %d datagrams dropped, want %d and 1001", got.Open, got.Dropped, maxDatagramFlows)
	}
	<-first.requests
	send(source(0))
	if got := string(<-first.requests); got != "abc" {
		t.Errorf("the oldest flow carries %q", got)
	}
}

// However many flows wait for their streams, what waits is bounded.
func TestQueuedDatagramsAreBounded(t *testing.T) {
	ours, theirs := tuntest.Pair(1500, true)
	t.Cleanup(func() { theirs.Close() })
	s := start(t, Config{Device: ours, Dialer: dialer{udp: func(ctx context.Context, _, _ netip.AddrPort) (PacketStream, error) {
		<-ctx.Done() // a tunnel that is down
		return nil, ctx.Err()
	}}})
	payload := make([]byte, 1400)
	const flows, each = 150, 700 // of less than a flow's limit, and more than the limit of all
	for range each {
		for n := range flows {
			udp := packet.UDP(source(n), podAddr, payload, false)
			ip := packet.Outgoing{Src: appAddr.Addr(), Dst: podAddr.Addr(), Proto: packet.ProtoUDP, PayloadLen: 8 + len(payload)}
			if err := theirs.Writev([][]byte{ip.Append(make([]byte, packet.VirtioLen)), udp[:], payload}); err != nil {
				t.Fatal(err)
			}
		}
	}
	until(t, "all datagrams are read", func() bool { return s.Stats().PacketsIn == flows*each })
	queued := s.datagrams.queued.Load()
	if most := int64(maxQueued + 2*len(payload) + queueOverhead); queued > most || queued < maxQueued/2 {
		t.Errorf("%d bytes wait, want about %d", queued, maxQueued)
	}
	s.datagrams.closeAll()
	until(t, "nothing waits", func() bool { return s.datagrams.queued.Load() == 0 })
}
