package netstack

import (
	"sync/atomic"

	"kubevpn/pkg/datapath/packet"
)

// Stats are counts since the Stack was made.
type Stats struct {
	TCP, UDP, Echo FlowStats

	// PacketsIn and PacketsOut count packets read from and written to the device; a super-packet is one.
	PacketsIn, PacketsOut uint64
	// Malformed packets could not be read. Ignored ones were for nobody in the cluster: multicast, broadcast,
	// link-local.
	Malformed, Ignored uint64
	// Forwarded packets were taken by the PacketForwarder.
	Forwarded uint64
	// WriteErrors counts packets that the device did not take, for example as the interface was down.
	WriteErrors uint64
}

// FlowStats count the flows of one protocol.
type FlowStats struct {
	Open  int64  // now
	Total uint64 // that were ever open, which for TCP is after the handshake
	// Refused, Unreachable and Silent count the outcomes of failed dials, and of UDP and echo flows that failed
	// later.
	Refused, Unreachable, Silent uint64
	// BytesOut went from applications to the cluster, BytesIn came back.
	BytesOut, BytesIn uint64
	// Dropped counts datagrams that found the queue of their flow full or were too long to be sent, and packets that
	// would have begun a flow beyond the limits.
	Dropped uint64
}

type counters struct {
	tcp, udp, echo                                                        flowCounters
	packetsIn, packetsOut, malformed, ignoredCount, forwarded, writeError atomic.Uint64
}

type flowCounters struct {
	open                                                            atomic.Int64
	total, refused, unreachable, silent, bytesOut, bytesIn, dropped atomic.Uint64
}

// datagram returns the counters of the flows of UDP, or of ICMP.
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

func (c *flowCounters) failed(v verdict) {
	switch v {
	case refused:
		c.refused.Add(1)
	case silent:
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
	return Stats{
		TCP: c.tcp.read(), UDP: c.udp.read(), Echo: c.echo.read(),
		PacketsIn: c.packetsIn.Load(), PacketsOut: c.packetsOut.Load(),
		Malformed: c.malformed.Load(), Ignored: c.ignoredCount.Load(), Forwarded: c.forwarded.Load(),
		WriteErrors: c.writeError.Load(),
	}
}
