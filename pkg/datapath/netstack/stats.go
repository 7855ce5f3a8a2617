package netstack

import (
	"sync/atomic"

	"kubevpn/pkg/datapath/packet"
)

// Stats counts since New.
type Stats struct {
	TCP, UDP, Echo FlowStats

	// PacketsIn and PacketsOut count packets read from and written to the device; a super-packet is one.
	PacketsIn, PacketsOut uint64
	// Malformed counts packets that could not be parsed, Ignored well-formed packets that address nobody in the
	// cluster: multicast, broadcast, link-local.
	Malformed, Ignored uint64
	// Forwarded counts packets that the PacketForwarder took.
	Forwarded uint64
	// WriteErrors counts packets that the device rejected, for example because the interface was down.
	WriteErrors uint64

	// TCP flows, SYNs that wait for a dial, UDP and echo flows, and bytes of datagrams that wait, now and at most.
	TCPFlows, HeldSYNs, DatagramFlows, QueuedBytes Use
}

// Use is a limit and its part that is in use.
type Use struct{ Used, Limit int64 }

// FlowStats counts the flows of one protocol.
type FlowStats struct {
	Open  int64  // flows that are open now
	Total uint64 // flows that were ever open; a TCP flow opens with its handshake
	// Refused, Unreachable and Silent count failed dials, and UDP and echo flows that failed later, by the report to
	// the application.
	Refused, Unreachable, Silent uint64
	// BytesOut counts payload from applications to the cluster, BytesIn payload to applications.
	BytesOut, BytesIn uint64
	// Dropped counts datagrams that found a queue full or were too long to send, and packets that would have opened a
	// flow beyond the limits.
	Dropped uint64
}

type counters struct {
	tcp, udp, echo                                                    flowCounters
	packetsIn, packetsOut, malformed, ignored, forwarded, writeErrors atomic.Uint64
}

type flowCounters struct {
	open                                                            atomic.Int64
	total, refused, unreachable, silent, bytesOut, bytesIn, dropped atomic.Uint64
}

// datagram returns the counters of UDP or echo flows.
func (c *counters) datagram(proto uint8) *flowCounters {
	if proto == packet.ProtoUDP {
		return &c.udp
	}
	return &c.echo
}

func (c *flowCounters) opened() {
	c.open.Add(1)
	c.total.Add(1)
}

// failed counts a failure that is reported with reason; 0 is silence.
func (c *flowCounters) failed(reason packet.Reason) {
	switch reason {
	case packet.PortUnreachable:
		c.refused.Add(1)
	case 0:
		c.silent.Add(1)
	default:
		c.unreachable.Add(1)
	}
}

func (c *flowCounters) read() FlowStats {
	return FlowStats{
		Open: c.open.Load(), Total: c.total.Load(),
		Refused: c.refused.Load(), Unreachable: c.unreachable.Load(), Silent: c.silent.Load(),
		BytesOut: c.bytesOut.Load(), BytesIn: c.bytesIn.Load(), Dropped: c.dropped.Load(),
	}
}

// Stats returns the counts. It may be called at any time.
func (s *Stack) Stats() Stats {
	c := &s.stats
	s.mu.Lock()
	forwarder := s.tcp
	s.mu.Unlock()
	held := 0
	if forwarder != nil { // there is none before start
		forwarder.mu.Lock()
		held = len(forwarder.held)
		forwarder.mu.Unlock()
	}
	return Stats{
		TCPFlows: Use{c.tcp.open.Load(), maxTCPFlows}, HeldSYNs: Use{int64(held), maxHeldSYNs},
		DatagramFlows: Use{c.udp.open.Load() + c.echo.open.Load(), maxDatagramFlows},
		QueuedBytes:   Use{s.datagrams.queued.Load(), maxQueued},
		TCP:           c.tcp.read(), UDP: c.udp.read(), Echo: c.echo.read(),
		PacketsIn: c.packetsIn.Load(), PacketsOut: c.packetsOut.Load(),
		Malformed: c.malformed.Load(), Ignored: c.ignored.Load(), Forwarded: c.forwarded.Load(),
		WriteErrors: c.writeErrors.Load(),
	}
}
