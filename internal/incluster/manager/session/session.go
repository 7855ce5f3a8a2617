package session

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"sync"
	"sync/atomic"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/incluster/manager/router"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// session serves one laptop. Every stream that the laptop opens has its own goroutine, so a stream that waits for a
// dial or a slow pod does not delay the others. The transport.Budget of the manager limits their number.
//
//	Accept ─┬─ control: hello, then notices  (control.go)
//	        ├─ ticket: for the proxy port    (ticket.go)
//	        ├─ TCP, UDP, echo                (package dial)
//	        └─ IP: packets                   (package router)
type session struct {
	server    *Server
	transport *transport.Session
	log       *slog.Logger

	peer    *router.Peer
	flows   *dial.Flows
	streams sync.WaitGroup // of all kinds

	greeted    atomic.Bool   // the control stream was opened
	identified chan struct{} // closed when by is set, once
	by         dial.Caller
}

func newSession(server *Server, s *transport.Session) *session {
	laptop := &session{
		server: server, transport: s, log: server.cfg.Logger.With("session", s.ID().String()[:8]),
		identified: make(chan struct{}),
	}
	laptop.flows = dial.NewFlows(server.cfg.Dialer, s, &laptop.streams)
	connected := func() bool { return s.Err() == nil && s.Attached() }
	laptop.peer = router.NewPeer(server.cfg.Router, laptop.log, connected, sync.OnceFunc(func() {
		// Close waits for the laptop, and the router calls this function with its mutex held. Before serve waits for
		// streams, it dismisses the peer, and the router no longer calls it.
		laptop.streams.Go(func() {
			laptop.log.Info("a newer session of the same client took the lease")
			s.Close()
		})
	}))
	return laptop
}

// serve answers the laptop until the session ends.
func (s *session) serve(ctx context.Context) {
	if s.server.Proxy != nil {
		defer s.server.Proxy.tickets.forget(s.transport.ID()) // after all requests for tickets
	}
	defer s.streams.Wait()
	defer s.peer.Dismiss()
	for {
		in, err := s.transport.Accept(ctx)
		if err != nil {
			return // the transport has logged why
		}
		s.streams.Go(func() { s.answer(ctx, in) })
	}
}

// identify records the laptop's hello, once. Flows that arrived earlier wait for it.
func (s *session) identify(by dial.Caller) error {
	counts := cmp.Or(by.Client, s.transport.ID().String()) // a laptop without an identity counts alone
	if by.User != nil {
		counts = "user " + by.User.Name
	}
	if err := s.transport.Admit(counts); err != nil {
		return err
	}
	s.by = by
	close(s.identified)
	return nil
}

// caller returns the laptop, or the zero caller before identify.
func (s *session) caller() dial.Caller {
	if !wakeup.IsClosed(s.identified) {
		return dial.Caller{}
	}
	return s.by
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
		err = s.flows.AcceptTCP(ctx, in, s.caller())
	case transport.ProtoUDP:
		err = s.flows.AcceptUDP(in, s.caller())
	case transport.ProtoEcho:
		err = s.flows.AcceptEcho(in, s.caller())
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

const (
	maxClient = 256 // bytes of a client's identity
	maxExtra  = 256 // networks of --extra-cidr; the router compares a packet to a node with each
)

func parseCaller(hello api.ClientHello) (dial.Caller, error) {
	by := dial.Caller{Client: hello.Client, Scheduler: balancer.RoundRobin, Extra: hello.ExtraCIDRs}
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
	by.Scheduler = scheduler
	return by, err
}
