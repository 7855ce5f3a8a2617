package manager

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/router"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

// session serves one laptop. Every stream that the laptop opens has its own goroutine, so a stream that waits for a
// dial or a slow pod does not delay the others. The manager's budget limits their number (limits.go).
//
//	Accept ─┬─ control: hello, then notices        (control.go)
//	        ├─ ticket: for the proxy port          (ticket.go)
//	        ├─ TCP:  dial ─ relay                  (tcp.go, relay.go)
//	        ├─ UDP:  socket ─ datagrams            (udp.go)
//	        ├─ echo: ICMP socket ─ pings           (echo.go)
//	        └─ IP:   frames ─ router               (packetstream.go, router.go)
type session struct {
	manager   *Manager
	transport *transport.Session
	log       *slog.Logger

	peer    *router.Peer
	buffers buffers
	flows   sync.WaitGroup

	greeted    atomic.Bool   // the control stream was opened
	identified chan struct{} // closed when by is set, once
	by         caller
}

func (m *Manager) newSession(s *transport.Session) *session {
	laptop := &session{
		manager: m, transport: s, buffers: buffers{session: s}, log: m.log.With("session", s.ID().String()[:8]),
		identified: make(chan struct{}),
	}
	connected := func() bool { return s.Err() == nil && s.Attached() }
	laptop.peer = router.NewPeer(m.router, laptop.log, connected, sync.OnceFunc(func() {
		// Close waits for the laptop, and the router calls this function with its mutex held. Before serve waits for
		// flows, it dismisses the peer, and the router no longer calls it.
		laptop.flows.Go(func() {
			laptop.log.Info("a newer session of the same client took the lease")
			s.Close()
		})
	}))
	return laptop
}

// serve answers the laptop until the session ends.
func (s *session) serve(ctx context.Context) {
	s.manager.publisher.begin(s.transport)
	defer s.manager.publisher.end(s.transport)
	if missing, _ := s.manager.watcher.state(); len(missing) > 0 {
		s.manager.watcher.poked.Raise() // an admin may have granted them in the meantime
	}
	if s.manager.proxy != nil {
		defer s.manager.proxy.tickets.forget(s.transport.ID()) // after all requests for tickets
	}
	defer s.flows.Wait()
	defer s.peer.Dismiss()
	for {
		in, err := s.transport.Accept(ctx)
		if err != nil {
			return // the transport has logged why
		}
		s.flows.Go(func() { s.answer(ctx, in) })
	}
}

// identify records the laptop's hello, once. Flows that arrived earlier wait for it.
func (s *session) identify(by caller) error {
	counts := cmp.Or(by.client, s.transport.ID().String()) // a laptop without an identity counts alone
	if by.user != nil {
		counts = "user " + by.user.Name
	}
	if err := s.transport.Admit(counts); err != nil {
		return err
	}
	s.by = by
	close(s.identified)
	return nil
}

// caller returns the laptop, or the zero caller before identify.
func (s *session) caller() caller {
	select {
	case <-s.identified:
		return s.by
	default:
		return caller{}
	}
}

// answer serves one stream until it ends.
func (s *session) answer(ctx context.Context, in *transport.Incoming) {
	gone := in.Done()
	if in.Proto != transport.ProtoControl {
		select {
		case <-s.identified:
		case <-gone:
		case <-ctx.Done():
		}
	}
	var err error
	switch in.Proto {
	case transport.ProtoControl:
		if s.greeted.Swap(true) {
			err = in.Reject(transport.CodeProhibited)
		} else {
			err = s.acceptControl(ctx, in)
		}
	case transport.ProtoTCP:
		err = s.acceptTCP(ctx, in, gone)
	case transport.ProtoUDP:
		err = s.acceptUDP(in)
	case transport.ProtoEcho:
		err = s.acceptEcho(in)
	case transport.ProtoIP:
		err = s.peer.Accept(in)
	case transport.ProtoTicket:
		err = s.acceptTicket(in)
	default:
		err = in.Reject(transport.CodeProhibited)
	}
	if err != nil { // the laptop no longer waits for an answer
		s.log.Debug("cannot answer a stream", "request", in.Request, "err", err)
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
	ended := s.manager.dialer.counts.began(transport.ProtoTCP)
	conn, pick, err := s.manager.dialer.dialTCP(dialCtx, unmap(in.Dst), s.caller())
	ended(err)
	if err != nil {
		return in.RejectError(err)
	}
	cancel() // the goroutine above
	st, err := in.Accept()
	if err != nil {
		pick.Release()
		conn.SetLinger(0)
		conn.Close()
		return err
	}
	// The dial has used 8 KiB of this goroutine's stack. The relay gets by with the 2 KiB of a new one.
	s.flows.Go(func() {
		defer pick.Release()
		relay(st, conn, gone, s.transport.Done(), &s.buffers)
	})
	return nil
}

func (s *session) acceptUDP(in *transport.Incoming) error {
	ended := s.manager.dialer.counts.began(transport.ProtoUDP)
	flow, err := s.manager.dialer.openUDP(unmap(in.Dst), s.caller())
	ended(err)
	if err != nil {
		return in.RejectError(err)
	}
	return s.acceptDatagrams(in, flow, flow.idle())
}

func (s *session) acceptEcho(in *transport.Incoming) error {
	ended := s.manager.dialer.counts.began(transport.ProtoEcho)
	pings, err := s.manager.dialer.openEcho(in.Dst.Addr().Unmap(), s.caller())
	ended(err)
	if err != nil {
		return in.RejectError(err)
	}
	return s.acceptDatagrams(in, pings, echoIdle)
}

func (s *session) acceptDatagrams(in *transport.Incoming, d datagrams, idle time.Duration) error {
	laptop, err := in.AcceptPackets()
	if err != nil {
		d.close()
		return err
	}
	s.flows.Go(func() { exchange(laptop, d, idle, &s.buffers) }) // as acceptTCP does
	return nil
}

const (
	maxClient = 256 // bytes of a client's identity
	maxExtra  = 256 // networks of --extra-cidr; the router compares a packet to a node with each
)

func parseCaller(hello api.ClientHello) (caller, error) {
	by := caller{client: hello.Client, scheduler: balancer.RoundRobin, extra: hello.ExtraCIDRs}
	if len(hello.Client) > maxClient || len(hello.ExtraCIDRs) > maxExtra {
		return by, fmt.Errorf("the identity has %d bytes and there are %d networks; at most %d and %d are allowed",
			len(hello.Client), len(hello.ExtraCIDRs), maxClient, maxExtra)
	}
	switch hello.Netstack {
	case "", api.NetstackGVisor, api.NetstackSystem:
	default:
		return by, fmt.Errorf("unknown netstack %q", hello.Netstack)
	}
	if hello.Scheduler == "" {
		return by, nil
	}
	scheduler, err := balancer.ParseScheduler(hello.Scheduler)
	by.scheduler = scheduler
	return by, err
}
