package manager

import (
	"context"
	"fmt"
	"log/slog"
	"sync"

	"kubevpn/internal/api"
	"kubevpn/pkg/balancer"
	"kubevpn/pkg/transport"
)

// session is one laptop's. Every stream that the laptop opens has a goroutine of its own from the moment it
// arrives: one that waits (for a dial, for a slow pod) keeps none of the others waiting, and there is no limit
// by which one would be dropped.
//
//	Accept ─┬─ control: hello, then notices        (control.go)
//	        ├─ ticket: for the proxy port          (ticket.go)
//	        ├─ TCP:  dial ─ relay                  (tcp.go, relay.go)
//	        ├─ UDP:  socket ─ datagrams            (udp.go)
//	        ├─ echo: ICMP socket ─ pings           (echo.go)
//	        └─ IP:   frames ─ router               (lanes.go, router.go)
type session struct {
	m   *Manager
	s   *transport.Session
	log *slog.Logger

	peer  *peer
	flows sync.WaitGroup
	taken chan struct{} // closed when another session has the lease

	greeted chan struct{} // closed when by is known

	mu sync.Mutex
	by caller
}

func (m *Manager) newSession(s *transport.Session) *session {
	taken := make(chan struct{})
	return &session{
		m: m, s: s, log: m.log.With("session", s.ID().String()[:8]), greeted: make(chan struct{}), taken: taken,
		peer: newPeer(m.router, func() bool { return s.Err() == nil && s.Attached() }, sync.OnceFunc(func() { close(taken) })),
	}
}

// serve answers the laptop until the session ends.
func (s *session) serve(ctx context.Context) {
	s.m.publisher.begin(s.s)
	defer s.m.publisher.end(s.s)
	if missing, _ := s.m.watcher.state(); len(missing) > 0 {
		s.m.watcher.poke() // an admin may have granted it just now
	}
	if s.m.proxy != nil {
		defer s.m.proxy.tickets.forget(s.s.ID()) // once nobody asks for one any more
	}
	defer s.flows.Wait()
	defer s.m.router.dismiss(s.peer)
	s.flows.Go(func() {
		select {
		case <-s.taken:
			s.log.Info("a newer session of the same client has the lease")
			s.s.Close()
		case <-ctx.Done():
		}
	})
	for {
		in, err := s.s.Accept(ctx)
		if err != nil {
			return // the transport has logged why
		}
		s.flows.Go(func() { s.answer(ctx, in) })
	}
}

// greet notes who the laptop is. Flows that came earlier wait for it.
func (s *session) greet(by caller) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.by = by
	select {
	case <-s.greeted:
	default:
		close(s.greeted)
	}
}

func (s *session) caller() caller {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.by
}

// answer deals with one stream for as long as it lives.
func (s *session) answer(ctx context.Context, in *transport.Incoming) {
	gone := in.Done()
	if in.Proto != transport.ProtoControl {
		select {
		case <-s.greeted:
		case <-gone:
		case <-ctx.Done():
		}
	}
	var err error
	switch in.Proto {
	case transport.ProtoControl:
		err = s.acceptControl(ctx, in)
	case transport.ProtoTCP:
		err = s.acceptTCP(ctx, in, gone)
	case transport.ProtoUDP:
		err = s.acceptUDP(in)
	case transport.ProtoEcho:
		err = s.acceptEcho(in)
	case transport.ProtoIP:
		err = s.acceptLane(in)
	case transport.ProtoTicket:
		err = s.acceptTicket(in)
	default:
		err = in.Reject(transport.CodeProhibited)
	}
	if err != nil { // the laptop no longer waits for an answer
		s.log.Debug("answering", "request", in.Request, "err", err)
	}
}

func (s *session) acceptTCP(ctx context.Context, in *transport.Incoming, gone <-chan struct{}) error {
	dialCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-gone:
			cancel()
		case <-dialCtx.Done():
		}
	}()
	conn, pick, err := s.m.dialer.dialTCP(dialCtx, unmap(in.Dst), s.caller())
	if err != nil {
		return in.RejectError(err)
	}
	cancel() // the goroutine above
	defer pick.Release()
	st, err := in.Accept()
	if err != nil {
		conn.SetLinger(0)
		conn.Close()
		return err
	}
	relay(st, conn, gone, s.s.Done(), &s.m.dialer.buffers)
	return nil
}

func (s *session) acceptUDP(in *transport.Incoming) error {
	flow, err := s.m.dialer.openUDP(unmap(in.Dst), s.caller())
	if err != nil {
		return in.RejectError(err)
	}
	laptop, err := in.AcceptPackets()
	if err != nil {
		flow.conn.Close()
		flow.pick.Release()
		return err
	}
	flow.run(laptop)
	return nil
}

func (s *session) acceptEcho(in *transport.Incoming) error {
	p, err := s.m.dialer.openEcho(in.Dst.Addr().Unmap())
	if err != nil {
		return in.RejectError(err)
	}
	laptop, err := in.AcceptPackets()
	if err != nil {
		p.close()
		return err
	}
	ping(laptop, p, &s.m.dialer.buffers)
	return nil
}

func parseCaller(hello api.ClientHello) (caller, error) {
	by := caller{client: hello.Client, scheduler: balancer.RoundRobin}
	switch hello.Netstack {
	case "", api.NetstackGVisor, api.NetstackSystem:
	default:
		return by, fmt.Errorf("there is no netstack %q", hello.Netstack)
	}
	if hello.Scheduler == "" {
		return by, nil
	}
	scheduler, err := balancer.ParseScheduler(hello.Scheduler)
	by.scheduler = scheduler
	return by, err
}
