package interceptor

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"
)

const (
	// udpIdle is how long a flow lasts without a datagram.
	udpIdle = 60 * time.Second
	// maxFlows limits the flows of one port. The datagrams of more clients are dropped.
	maxFlows = 4096
	// maxQueued is how many datagrams of a flow wait for a dial or a slow connection.
	maxQueued = 64

	maxDatagram = 65535
)

var datagrams = sync.Pool{New: func() any { return new([maxDatagram]byte) }}

// ServePackets forwards the datagrams that arrive at pc, whose destination was dst. It returns nil when ctx ends, and
// an error when pc fails. It does not close pc. The datagrams of one client are a flow, which keeps its destination
// unless the target's owner goes away.
func (i *Interceptor) ServePackets(ctx context.Context, pc *net.UDPConn, dst netip.AddrPort) error {
	s := &packetServer{i: i, pc: pc, dst: dst, flows: make(map[netip.AddrPort]*packetFlow)}
	s.ctx, s.cancel = context.WithCancel(ctx)
	defer s.wg.Wait()
	defer s.cancel()
	stop := context.AfterFunc(ctx, func() { pc.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	b := make([]byte, maxDatagram)
	for {
		n, from, err := pc.ReadFromUDPAddrPort(b)
		switch {
		case ctx.Err() != nil:
			return nil
		case err != nil:
			return fmt.Errorf("receiving datagrams: %w", err)
		}
		from = netip.AddrPortFrom(from.Addr().Unmap(), from.Port())
		if i.config.Probe.classify(b[:n]) == kindProbe {
			if _, err := pc.WriteToUDPAddrPort(b[:n], from); err != nil {
				i.log.DebugContext(ctx, "cannot answer a probe", "client", from, "port", dst.Port(), "error", err)
			}
			continue
		}
		s.receive(from, b[:n])
	}
}

// packetServer serves one UDP port.
type packetServer struct {
	i      *Interceptor
	pc     *net.UDPConn
	dst    netip.AddrPort
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup

	mu    sync.Mutex
	flows map[netip.AddrPort]*packetFlow
}

// packetFlow carries the datagrams of one client.
type packetFlow struct {
	destination destination
	queue       chan []byte
	copies      []*packetCopy
	cancel      context.CancelFunc
	timer       *time.Timer
}

// packetCopy queues the datagrams of one client for a claim that mirrors.
type packetCopy struct {
	claim *Claim
	queue chan []byte
	late  bool // receive has dropped a datagram
}

// receive queues a datagram for its flow. It never waits.
func (s *packetServer) receive(from netip.AddrPort, b []byte) {
	f := s.flow(from)
	if f == nil {
		return
	}
	f.timer.Reset(udpIdle)
	b = append([]byte(nil), b...)
	select {
	case f.queue <- b:
	default: // the queue is full: drop the datagram
	}
	for _, c := range f.copies {
		select {
		case c.queue <- b:
		default:
			if !c.late {
				c.late = true
				c.claim.Stats.failed(errBehind)
			}
		}
	}
}

// flow returns the client's flow, or begins one. It returns nil if there are too many.
func (s *packetServer) flow(from netip.AddrPort) *packetFlow {
	s.mu.Lock()
	defer s.mu.Unlock()
	f := s.flows[from]
	if f != nil && !f.destination.application() && f.destination.claim.Target.Away() {
		s.end(from, f)
		f = nil
	}
	if f != nil {
		return f
	}
	if len(s.flows) >= maxFlows {
		return nil
	}
	claims := s.i.config.Claims("udp", s.dst.Port())
	t, mirrors := judgeRaw(claims)
	f = &packetFlow{destination: t, queue: make(chan []byte, maxQueued)}
	ctx, cancel := context.WithCancel(s.ctx)
	f.cancel = cancel
	f.timer = time.AfterFunc(udpIdle, cancel)
	s.flows[from] = f
	flow := Flow{Protocol: "udp", Client: from, Dst: s.dst}
	if from.Addr().IsLoopback() { // so was the destination
		flow.Dst = netip.AddrPortFrom(from.Addr(), s.dst.Port())
	}
	s.wg.Go(func() {
		if err := s.run(ctx, f, flow); err != nil && ctx.Err() == nil {
			s.i.log.DebugContext(ctx, "a UDP flow ended", "client", from, "port", s.dst.Port(), "error", err)
		}
		s.mu.Lock()
		defer s.mu.Unlock()
		s.end(from, f)
	})
	for _, claim := range mirrors {
		c := &packetCopy{claim: claim, queue: make(chan []byte, maxQueued)}
		f.copies = append(f.copies, c)
		s.wg.Go(func() { s.mirror(ctx, c, flow) })
	}
	return f
}

// end removes a flow. Call with mu held.
func (s *packetServer) end(from netip.AddrPort, f *packetFlow) {
	f.cancel()
	f.timer.Stop()
	if s.flows[from] == f {
		delete(s.flows, from)
	}
}

// run carries a flow until it is idle, or its destination fails. The client's next datagram begins another one.
func (s *packetServer) run(ctx context.Context, f *packetFlow, flow Flow) error {
	conn, err := s.i.dial(ctx, f.destination, flow)
	if err != nil && wentAway(f.destination, err) {
		s.mu.Lock()
		f.destination = destination{}
		s.mu.Unlock()
		conn, err = s.i.dial(ctx, f.destination, flow)
	}
	if err != nil {
		return err
	}
	if claim := f.destination.claim; claim != nil {
		claim.Stats.requests.Add(1)
	}
	err = forwardDatagrams(ctx, conn, f.queue, func(b []byte) {
		f.timer.Reset(udpIdle)
		if _, err := s.pc.WriteToUDPAddrPort(b, flow.Client); err != nil {
			s.i.log.Debug("cannot answer a datagram", "client", flow.Client, "port", s.dst.Port(), "error", err)
		}
	})
	if claim := f.destination.claim; claim != nil && err != nil && ctx.Err() == nil {
		claim.Stats.failed(err)
	}
	return err
}

// forwardDatagrams sends the queued datagrams and passes each answer to answered, until ctx ends or the connection
// fails. It closes conn.
func forwardDatagrams(ctx context.Context, conn net.Conn, queue <-chan []byte, answered func([]byte)) error {
	defer context.AfterFunc(ctx, func() { conn.Close() })() // a pending Write must not delay the end
	reading := make(chan error, 1)
	go func() {
		b := datagrams.Get().(*[maxDatagram]byte)
		defer datagrams.Put(b)
		for {
			n, err := conn.Read(b[:])
			if err != nil {
				reading <- err
				return
			}
			answered(b[:n])
		}
	}()
	for {
		var err error
		select {
		case <-ctx.Done():
		case failed := <-reading:
			conn.Close()
			return failed
		case b := <-queue:
			if _, err = conn.Write(b); err == nil {
				continue
			}
		}
		conn.Close() // ends the Read
		return cmp.Or(err, <-reading)
	}
}

// mirror sends the copies of a flow's datagrams to a claim's target.
func (s *packetServer) mirror(ctx context.Context, c *packetCopy, flow Flow) {
	conn, err := s.i.dial(ctx, destination{c.claim}, flow)
	if err != nil {
		return
	}
	c.claim.Stats.requests.Add(1)
	err = forwardDatagrams(ctx, conn, c.queue, func([]byte) {})
	if err != nil && ctx.Err() == nil {
		c.claim.Stats.failed(err)
	}
}
