package netstack

import (
	"context"
	"net/netip"
	"syscall"
	"testing"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/tun/tuntest"
)

// source returns the n-th of many sources.
func source(n int) netip.AddrPort {
	return netip.AddrPortFrom(appAddr.Addr(), uint16(1024+n))
}

// A program whose dials hang holds at most maxHeldSYNs SYNs. The stack drops further SYNs without an answer.
func TestHeldSYNsAreBounded(t *testing.T) {
	dialed := make(chan netip.AddrPort, 2*maxHeldSYNs)
	release := make(chan struct{})
	w, s := newWire(t, Config{Dialer: dialer{tcp: func(ctx context.Context, src, _ netip.AddrPort) (Stream, error) {
		dialed <- src
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
	testenv.Until(t, "all SYNs are read, and those above the limit dropped", func() bool {
		got := s.Stats() // which counts a packet before the SYN that it drops
		return got.PacketsIn == sent && got.TCP.Dropped >= 1000
	})
	if got := s.Stats(); got.TCP.Dropped != 1000 || got.PacketsOut != 0 {
		t.Errorf("%d SYNs were dropped and %d packets sent, want 1000 and none", got.TCP.Dropped, got.PacketsOut)
	}
	testenv.Until(t, "the others are dialed", func() bool { return len(dialed) == maxHeldSYNs })
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
	testenv.Until(t, "a new SYN is held again", func() bool {
		w.sendFrom(source(sent), flagSYN, 1000, 0)
		return len(dialed) > maxHeldSYNs
	})
}

// A program that sends from ever more ports gets at most maxDatagramFlows flows. Existing flows continue.
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
	testenv.Until(t, "all datagrams are read, and those above the limit dropped", func() bool {
		got := s.Stats()
		return got.PacketsIn == maxDatagramFlows+1001 && got.UDP.Dropped >= 1001
	})
	if got := s.Stats().UDP; got.Open != maxDatagramFlows || got.Dropped != 1001 {
		t.Errorf("%d flows are open and %d datagrams dropped, want %d and 1001", got.Open, got.Dropped, maxDatagramFlows)
	}
	<-first.requests
	send(source(0))
	if got := string(<-first.requests); got != "abc" {
		t.Errorf("the oldest flow carries %q", got)
	}
}

// The datagrams of all flows that wait for their streams are bounded together.
func TestQueuedDatagramsAreBounded(t *testing.T) {
	ours, theirs := tuntest.Pair(1500, true)
	t.Cleanup(func() { theirs.Close() })
	s := start(t, Config{Device: ours, Dialer: dialer{udp: func(ctx context.Context, _, _ netip.AddrPort) (PacketStream, error) {
		<-ctx.Done() // a tunnel that is down
		return nil, ctx.Err()
	}}})
	payload := make([]byte, 60000)
	const flows, each = 150, 16 // below queueLimit for one flow, above maxQueued for all
	for range each {
		for n := range flows {
			udp := packet.UDP(source(n), podAddr, payload, false)
			ip := packet.Outgoing{Src: appAddr.Addr(), Dst: podAddr.Addr(), Proto: packet.ProtoUDP, PayloadLen: 8 + len(payload)}
			if err := theirs.Writev([][]byte{ip.Append(make([]byte, packet.VirtioLen)), udp[:], payload}); err != nil {
				t.Fatal(err)
			}
		}
	}
	testenv.Until(t, "all datagrams are read", func() bool { return s.Stats().PacketsIn == flows*each })
	queued := s.datagrams.queued.Load()
	if most := int64(maxQueued + 2*len(payload) + queueOverhead); queued > most || queued < maxQueued/2 {
		t.Errorf("%d bytes wait, want about %d", queued, maxQueued)
	}
	s.datagrams.end(func(netip.Addr) bool { return true })
	testenv.Until(t, "nothing waits", func() bool { return s.datagrams.queued.Load() == 0 })
}
