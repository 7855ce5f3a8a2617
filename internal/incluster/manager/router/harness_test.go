package router

import (
	"context"
	"encoding/json"
	"log/slog"
	"net"
	"net/netip"
	"reflect"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

var helloV1 = api.ClientHello{Protocol: api.Protocol, Version: "1", Client: "laptop"}

// running is a Router with sessions that have leases and packet streams, and no other streams.
type running struct {
	router *Router
	laptop *transport.Session
	addr   string // for sessions
	states wakeup.Broadcast
}

// start runs a Router until the test ends, with the addresses of its pod, and a gateway's listener unless it is nil.
func start(t testing.TB, gateways net.Listener, pod ...netip.Addr) *running {
	t.Helper()
	r := new(running)
	r.router = New((&access.Filter{Pod: pod}).AllowsDirect, r.states.Send, slog.New(slog.DiscardHandler))
	if gateways != nil {
		ctx, cancel := context.WithCancel(context.Background())
		var wg sync.WaitGroup
		wg.Go(func() {
			if err := r.router.ServeGateways(ctx, gateways); err != nil {
				t.Errorf("serving gateways: %v", err)
			}
		})
		t.Cleanup(func() {
			cancel()
			wg.Wait()
		})
	}
	r.addr = managertest.Serve(t, r.serve)
	r.laptop = managertest.Connect(t, r.addr)
	return r
}

// serve is a session of the manager.
func (r *running) serve(ctx context.Context, s *transport.Session) {
	var streams sync.WaitGroup
	defer streams.Wait()
	connected := func() bool { return s.Err() == nil && s.Attached() }
	p := NewPeer(r.router, r.router.log, connected, sync.OnceFunc(func() { streams.Go(func() { s.Close() }) }))
	defer p.Dismiss()
	for {
		in, err := s.Accept(ctx)
		if err != nil {
			return
		}
		streams.Go(func() {
			if in.Proto == transport.ProtoControl {
				r.control(ctx, p, in, &streams)
			} else {
				p.Accept(in)
			}
		})
	}
}

// control answers a hello, and then sends the router's part of the state whenever it changes.
func (r *running) control(ctx context.Context, p *Peer, in *transport.Incoming, streams *sync.WaitGroup) {
	st, err := in.Accept()
	if err != nil {
		return
	}
	defer st.Close()
	var hello api.ClientHello
	if err := json.NewDecoder(st).Decode(&hello); err != nil {
		return
	}
	lease, run := p.Admit(&hello, hello.Netstack == api.NetstackSystem, nil)
	if run != nil {
		streams.Go(func() { run(ctx) })
	}
	var told api.ManagerState
	for first := true; ; first = false {
		changed := r.states.Next()
		var state api.ManagerState
		r.router.Describe(&state)
		message := api.ControlMessage{State: &state}
		if first {
			message = api.ControlMessage{Hello: &api.ManagerHello{Protocol: hello.Protocol, Lease: lease, State: state}}
		}
		if first || !reflect.DeepEqual(told, state) {
			if err := json.NewEncoder(st).Encode(message); err != nil {
				return
			}
		}
		told = state
		select {
		case <-changed:
		case <-ctx.Done():
			return
		case <-in.Done():
			return
		}
	}
}
