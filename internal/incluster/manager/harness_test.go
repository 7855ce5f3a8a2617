package manager

import (
	"context"
	"log/slog"
	"net/netip"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

func TestMain(m *testing.M) {
	if childMain() {
		return
	}
	goleak.VerifyTestMain(m)
}

// running is a Manager on loopback, with a laptop's session.
type running struct {
	*Manager
	laptop *transport.Session
	health string
	addr   string // for sessions
}

// Start runs a Manager until the test ends. It may dial loopback, which a real one may not: that is where tests
// have their pods.
func start(t testing.TB, cfg Config, prepare ...func(*Manager)) *running {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	m := New(cfg)
	m.dialer.Check = func(netip.AddrPort) error { return nil }
	m.sessions.PodRoutes = func() ([]netip.Prefix, error) { return nil, nil } // the routes of this machine must not affect tests
	for _, p := range prepare {
		p(m)
	}
	ctx, cancel := context.WithCancel(context.Background())
	sessions, health := managertest.Listen(t), managertest.Listen(t)
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := m.serve(ctx, sessions, health); err != nil {
			t.Errorf("serving: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return &running{Manager: m, laptop: managertest.Connect(t, sessions.Addr().String()), health: "http://" + health.Addr().String(), addr: sessions.Addr().String()}
}

// identified is start, with a laptop that has said hello.
func identified(t testing.TB, scheduler string) *running {
	t.Helper()
	r := start(t, Config{})
	c := managertest.Hello(t, r.laptop, api.ClientHello{Protocol: api.Protocol, Client: "laptop", Scheduler: scheduler})
	if c.Next().Hello == nil {
		t.Fatal("no Hello")
	}
	return r
}

// open opens a TCP flow to addr.
func (r *running) open(t testing.TB, addr string) (*transport.Stream, error) {
	t.Helper()
	return managertest.Open(t, r.laptop, addr)
}

// vip makes 10.96.0.1:80, of both protocols, a Service with these endpoints.
func (r *running) vip(endpoints ...string) {
	r.balancer.Apply([]balancer.Service{managertest.VIP(endpoints...)}, nil)
}

var helloV1 = api.ClientHello{Protocol: api.Protocol, Version: "1", Client: "laptop"}
