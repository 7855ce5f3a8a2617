package netstack

import (
	"context"
	"net/netip"
	"slices"
	"sync"

	"gvisor.dev/gvisor/pkg/tcpip/header"
	"gvisor.dev/gvisor/pkg/tcpip/stack"
	"gvisor.dev/gvisor/pkg/tcpip/transport/tcp"

	"kubevpn/pkg/datapath/packet"
)

// tcpForwarder holds SYNs until the far dial has ended.
//
//	SYN ──▶ held ──DialTCP──▶ success ─▶ CreateEndpoint: SYN-ACK, ACK ─▶ tcpFlow
//	         │  ▲                refused ─▶ RST
//	         │  └ same SYN again: absorbed
//	         │                   unreachable ─▶ ICMP, quoting the SYN
//	         │                   else ─▶ forgotten; the next SYN dials again
//	         └ RST, or a SYN with another sequence number: the application gave up.
//	           The dial is canceled, and the SYN forgotten when it has ended.
//
// gVisor's forwarder starts a goroutine per SYN and remembers the SYN until Complete is called. When maxHeldSYNs are
// held or maxTCPFlows are open, the forwarder drops new SYNs and keeps the old ones. The application repeats a dropped
// SYN after a second, when there is room unless the dials hang; an RST would mean that the server refused.
type tcpForwarder struct {
	s  *Stack
	gv *tcp.Forwarder

	mu   sync.Mutex
	held map[stack.TransportEndpointID]*heldSYN
}

// heldSYN is a SYN whose dial is in progress.
type heldSYN struct {
	sequence uint32
	packet   []byte // IP and TCP header, which an ICMP error quotes
	ctx      context.Context
	cancel   context.CancelFunc
	gaveUp   bool // the application gave up; guarded by tcpForwarder.mu
}

const (
	maxHeldSYNs = 8 << 10
	maxTCPFlows = 16 << 10
)

func newTCPForwarder(s *Stack, gv *stack.Stack) *tcpForwarder {
	f := &tcpForwarder{s: s, held: make(map[stack.TransportEndpointID]*heldSYN)}
	f.gv = tcp.NewForwarder(gv, tcpBuffer, maxHeldSYNs+1, f.dial) // handle applies maxHeldSYNs first
	return f
}

// handle handles a TCP packet that belongs to no connection. The goroutine that reads the device calls it. If it
// returns false, gVisor answers RST, unless the packet is an RST.
func (f *tcpForwarder) handle(id stack.TransportEndpointID, pkt *stack.PacketBuffer) bool {
	if f.s.isLocal(id.LocalAddress) {
		return false
	}
	h := header.TCP(pkt.TransportHeader().Slice())
	flags := h.Flags()
	f.mu.Lock()
	defer f.mu.Unlock()
	if held := f.held[id]; held != nil {
		again := flags.Contains(header.TCPFlagSyn) && h.SequenceNumber() == held.sequence
		if !again && flags&(header.TCPFlagRst|header.TCPFlagSyn) != 0 {
			// This dial must end first; the next SYN from the same port dials again.
			held.gaveUp = true
			held.cancel()
		}
		return true
	}
	if !flags.Contains(header.TCPFlagSyn) || flags.Contains(header.TCPFlagAck) || id.LocalPort == 0 ||
		id.RemotePort == 0 {
		return false
	}
	if len(f.held) >= maxHeldSYNs || int64(len(f.held))+f.s.stats.tcp.open.Load() >= maxTCPFlows {
		f.s.stats.tcp.dropped.Add(1)
		return true
	}
	held := &heldSYN{
		sequence: h.SequenceNumber(),
		packet:   slices.Concat(pkt.NetworkHeader().Slice(), h),
	}
	held.ctx, held.cancel = context.WithCancel(f.s.ctx)
	f.held[id] = held
	// The goroutine of dial counts as a flow from here on. dial first waits for f.mu.
	f.s.flows.Add(1)
	if !f.gv.HandlePacket(id, pkt) {
		f.s.flows.Done()
		held.cancel()
		delete(f.held, id)
		return false
	}
	return true
}

// dial dials for one held SYN, in a goroutine of its own. If the dial succeeds, it then runs the flow.
func (f *tcpForwarder) dial(r *tcp.ForwarderRequest) {
	defer f.s.flows.Done()
	id := r.ID()
	f.mu.Lock()
	held := f.held[id]
	f.mu.Unlock()
	src := netip.AddrPortFrom(addrOf(id.RemoteAddress), id.RemotePort)
	dst := netip.AddrPortFrom(addrOf(id.LocalAddress), id.LocalPort)

	stream, err := f.s.cfg.Dialer.DialTCP(held.ctx, src, dst)
	f.mu.Lock()
	gaveUp := held.gaveUp || f.s.ctx.Err() != nil
	f.mu.Unlock()
	var flow *tcpFlow
	switch {
	case err != nil:
		if !gaveUp {
			f.reject(r, held, dst, err)
			break
		}
		r.Complete(false)
	case gaveUp:
		stream.Reset()
		stream.Close()
		r.Complete(false)
	default:
		flow = f.accept(r, stream)
	}
	// Only after Complete: gVisor's forwarder would ignore a SYN that arrived between the two, and it would stay held.
	f.mu.Lock()
	delete(f.held, id)
	f.mu.Unlock()
	held.cancel()
	held = nil // the flow may live long
	if flow != nil {
		flow.run()
	}
}

// reject answers the SYN of a failed dial.
func (f *tcpForwarder) reject(r *tcp.ForwarderRequest, held *heldSYN, dst netip.AddrPort, dialErr error) {
	reason := reasonOf(dialErr)
	refused := reason == packet.PortUnreachable
	f.s.stats.tcp.failed(reason)
	r.Complete(refused)
	f.s.log.Debug("dial failed", "proto", "tcp", "dst", dst, "err", dialErr)
	if refused || reason == 0 {
		return
	}
	if err := f.s.link.sendError(reason, dst.Addr(), held.packet); err != nil {
		f.s.log.Debug("cannot report a failed dial", "proto", "tcp", "dst", dst, "err", err)
	}
}

// accept completes the handshake with the application. It owns stream. It returns nil if the handshake fails.
func (f *tcpForwarder) accept(r *tcp.ForwarderRequest, stream Stream) *tcpFlow {
	flow := &tcpFlow{s: f.s, stream: stream}
	ep, err := r.CreateEndpoint(&flow.queue)
	r.Complete(false)
	if err != nil { // the application closed its connection meanwhile, or the stack ends
		stream.Reset()
		stream.Close()
		return nil
	}
	flow.ep = ep
	return flow
}
