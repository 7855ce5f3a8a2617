package connection

import (
	"context"
	"encoding/binary"
	"maps"
	"net/netip"
	"slices"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wakeup"
)

// inbound decides which packets of the tunnel this laptop's kernel receives: answers to what the laptop sent, and new
// flows to the ports that --allow-inbound opened. The laptop does not rely on the traffic manager or the gateway for
// it.
//
//	TCP            every segment but the first of a connection
//	ICMP           errors, whose flow the kernel checks; pings and their answers
//	UDP            if the laptop recently sent a datagram from that port to that peer and port
//	other          if the laptop recently sent a packet of that protocol to that peer
//
// Its elements are the open ports. It never changes.
type inbound []api.Inbound

const (
	tcpFlags = 13 // offset in the header
	tcpFIN   = 0x01
	tcpSYN   = 0x02
	tcpRST   = 0x04
	tcpACK   = 0x10
)

// admits reports whether the kernel receives a packet.
func (in inbound) admits(sent *recent, h *packet.Header, p []byte) bool {
	if slices.ContainsFunc(in, func(i api.Inbound) bool { return i.All }) {
		return true
	}
	transport := p[h.HeaderLen:]
	if h.FragmentOffset != 0 {
		// The kernel drops it without the first fragment. It must not overwrite TCP's flags, which were checked there.
		return h.Proto != packet.ProtoTCP || h.FragmentOffset > tcpFlags
	}
	switch h.Proto {
	case packet.ProtoTCP:
		if len(transport) <= tcpFlags {
			return false
		}
		return transport[tcpFlags]&(tcpSYN|tcpACK) != tcpSYN || in.opens(false, transport)
	case packet.ProtoICMP:
		return len(transport) > 0 && slices.Contains([]byte{0, 3, 8, 11, 12}, transport[0])
	case packet.ProtoICMPv6:
		return len(transport) > 0 && slices.Contains([]byte{1, 2, 3, 4, 128, 129}, transport[0])
	}
	f, ok := flowOf(h, p, h.Src)
	return ok && (h.Proto == packet.ProtoUDP && in.opens(true, transport) || sent.has(f))
}

// opens reports whether the destination port of a UDP or TCP header is open.
func (in inbound) opens(udp bool, transport []byte) bool {
	return slices.Contains(in, api.Inbound{UDP: udp, Port: binary.BigEndian.Uint16(transport[2:])})
}

// flow identifies packets that belong together, in both directions.
type flow struct {
	proto  uint8
	remote netip.AddrPort // without a port, unless it is TCP or UDP
	port   uint16         // the laptop's
}

// flowOf returns the flow of a packet from or to remote. A later fragment has none.
func flowOf(h *packet.Header, p []byte, remote netip.Addr) (flow, bool) {
	f := flow{proto: h.Proto, remote: netip.AddrPortFrom(remote, 0)}
	if h.FragmentOffset != 0 || h.Proto != packet.ProtoUDP && h.Proto != packet.ProtoTCP {
		return f, h.FragmentOffset == 0
	}
	if len(p) < h.HeaderLen+4 {
		return f, false
	}
	src, dst := binary.BigEndian.Uint16(p[h.HeaderLen:]), binary.BigEndian.Uint16(p[h.HeaderLen+2:])
	if remote != h.Src {
		src, dst = dst, src
	}
	f.remote, f.port = netip.AddrPortFrom(remote, src), dst
	return f, true
}

const (
	// flowTime is the shortest time for which recent remembers a flow without packets; the longest is twice that.
	// Netfilter uses the same time.
	flowTime = 2 * time.Minute
	// maxFlows limits the flows of each half of recent: 2 MB in all.
	maxFlows = 16384
)

// recent remembers the flows that the laptop used in the last minutes, in two sets: run discards the older set as a
// whole. It is safe for concurrent use. It reads no clock and allocates nothing for a packet of a known flow.
type recent struct {
	mu          sync.Mutex
	now, before map[flow]struct{}
	last        flow // in now: most packets belong to the flow of the packet before
}

func newRecent() *recent {
	return &recent{now: map[flow]struct{}{}, before: map[flow]struct{}{}}
}

// run forgets old flows until ctx ends.
func (r *recent) run(ctx context.Context) {
	for wakeup.Pause(ctx, flowTime) {
		r.mu.Lock()
		r.turn()
		r.mu.Unlock()
	}
}

// add remembers a flow.
func (r *recent) add(f flow) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.use(f)
}

// has reports whether it remembers the flow, and restarts the flow's time.
func (r *recent) has(f flow) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if f == r.last {
		return true
	}
	_, ok := r.now[f]
	if !ok {
		_, ok = r.before[f]
	}
	if ok {
		r.use(f)
	}
	return ok
}

// list returns the flows of the last flowTime, and perhaps older ones.
func (r *recent) list() []flow {
	r.mu.Lock()
	defer r.mu.Unlock()
	all := slices.Collect(maps.Keys(r.now))
	for f := range r.before {
		if _, again := r.now[f]; !again {
			all = append(all, f)
		}
	}
	return all
}

// use puts a flow into the newer set. The caller holds mu.
func (r *recent) use(f flow) {
	if f == r.last {
		return
	}
	if len(r.now) >= maxFlows {
		r.turn()
	}
	r.now[f] = struct{}{}
	r.last = f
}

// turn forgets the older set and begins a new one. The caller holds mu.
func (r *recent) turn() {
	r.now, r.before, r.last = r.before, r.now, flow{}
	clear(r.now)
}
