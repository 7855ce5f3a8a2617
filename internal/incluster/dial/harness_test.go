package dial

import (
	"context"
	"net/netip"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// running is a Dialer with a laptop's session, which has flows and no other streams.
type running struct {
	dialer *Dialer
	laptop *transport.Session
}

// identified runs a Dialer until the test ends. It may dial loopback, which a real one may not: that is where tests have
// their pods.
func identified(t testing.TB, scheduler string) *running {
	t.Helper()
	by := Caller{Client: "laptop", Scheduler: balancer.RoundRobin}
	if scheduler != "" {
		var err error
		if by.Scheduler, err = balancer.ParseScheduler(scheduler); err != nil {
			t.Fatal(err)
		}
	}
	d := New(balancer.New(""))
	d.Check = func(netip.AddrPort) error { return nil }
	d.CheckHost = func(netip.AddrPort, []netip.Prefix) error { return nil }
	d.InRange = func(netip.Addr) bool { return false }
	addr := managertest.Serve(t, func(ctx context.Context, s *transport.Session) {
		var streams sync.WaitGroup
		defer streams.Wait()
		flows := NewFlows(d, s, &streams)
		for {
			in, err := s.Accept(ctx)
			if err != nil {
				return
			}
			streams.Go(func() {
				switch in.Proto {
				case transport.ProtoTCP:
					flows.AcceptTCP(ctx, in, by)
				case transport.ProtoUDP:
					flows.AcceptUDP(in, by)
				default:
					flows.AcceptEcho(in, by)
				}
			})
		}
	})
	return &running{dialer: d, laptop: managertest.Connect(t, addr)}
}

// open opens a TCP flow to addr.
func (r *running) open(t testing.TB, addr string) (*transport.Stream, error) {
	t.Helper()
	return managertest.Open(t, r.laptop, addr)
}

// vip makes 10.96.0.1:80, of both protocols, a Service with these endpoints.
func (r *running) vip(endpoints ...string) {
	r.dialer.Balancer.Apply([]balancer.Service{managertest.VIP(endpoints...)}, nil)
}
