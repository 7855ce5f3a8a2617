package session

import (
	"context"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"testing"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/dial"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/incluster/manager/router"
	"kubevpn/internal/incluster/manager/watch"
	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// testConfig configures start.
type testConfig struct {
	PodName, NodeName string
	Logger            *slog.Logger
}

// running is a Server on loopback without API access, with a laptop's session.
type running struct {
	*Server
	laptop *transport.Session
	addr   string // for sessions
}

// start runs a Server until the test ends. It may dial loopback.
func start(t testing.TB, cfg testConfig, prepare ...func(*Server)) *running {
	t.Helper()
	if cfg.Logger == nil {
		cfg.Logger = slog.New(slog.DiscardHandler)
	}
	var s *Server
	var w *watch.Publisher
	filter, b := new(access.Filter), balancer.New(cfg.NodeName)
	packets := router.New(filter.AllowsDirect, func() { w.Changed() }, cfg.Logger)
	w = watch.New(watch.Config{Self: watch.Self{Node: cfg.NodeName}, Balancer: b, Filter: filter, Describe: packets.Describe,
		Laptops: func() int { return s.Laptops() }, Logger: cfg.Logger})
	d := dial.New(b)
	d.Check = func(netip.AddrPort) error { return nil }
	d.CheckHost, d.InRange = filter.CheckHost, w.InServiceRange
	s = New(Config{PodName: cfg.PodName, Dialer: d, Router: packets, Watch: w, Logger: cfg.Logger})
	s.PodRoutes = func() ([]netip.Prefix, error) { return nil, nil }
	for _, f := range prepare {
		f(s)
	}
	config := transport.ServerConfig{OnSession: s.Serve, Admission: true, Logger: cfg.Logger}
	sessions := managertest.Listen(t)
	listeners := []net.Listener{sessions}
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	run := func(f func(context.Context) error) {
		wg.Go(func() {
			if err := f(ctx); err != nil && ctx.Err() == nil {
				t.Errorf("serving: %v", err)
			}
		})
	}
	if s.Proxy != nil {
		config.OnRefused = s.Proxy.Refused
		listeners = append(listeners, s.Proxy)
		run(s.Proxy.Run)
	}
	run(w.Run)
	run(func(ctx context.Context) error { return transport.NewServer(config).Serve(ctx, listeners...) })
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	addr := sessions.Addr().String()
	return &running{Server: s, laptop: managertest.Connect(t, addr), addr: addr}
}

// open opens a TCP flow to addr.
func (r *running) open(t testing.TB, addr string) (*transport.Stream, error) {
	t.Helper()
	return managertest.Open(t, r.laptop, addr)
}

var helloV1 = api.ClientHello{Protocol: api.Protocol, Version: "1", Client: "laptop"}
