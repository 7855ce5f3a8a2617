package watch

import (
	"context"
	"encoding/json"
	"errors"
	"log/slog"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/pkg/datapath/balancer"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// watched is a Publisher that runs, and its balancer.
type watched struct {
	*Publisher
	balancer *balancer.Balancer
}

// watching runs a publisher until the test ends.
func watching(t testing.TB, cfg Config, prepare ...func(*Publisher)) *watched {
	t.Helper()
	cfg.Balancer, cfg.Filter, cfg.Logger = balancer.New(cfg.Self.Node), new(access.Filter), slog.New(slog.DiscardHandler)
	cfg.Laptops = func() int { return 1 }
	cfg.Describe = func(state *api.ManagerState) {
		state.InnerNetworks = managertest.PrefixesOf("198.19.0.0/16", "fd4e:19c6:8b7a::/48")
	}
	p := New(cfg)
	for _, f := range prepare {
		f(p)
	}
	p.Changed() // as a session does
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := p.Run(ctx); err != nil {
			t.Errorf("watching: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return &watched{p, cfg.Balancer}
}

// hello plays the control stream of a session: the state when the publisher is ready, or after a while, and then the
// changes.
func (r *watched) hello(t testing.TB) *managertest.Control {
	t.Helper()
	r.Changed()
	select {
	case <-r.Ready:
	case <-time.After(3 * time.Second):
	}
	told, newer := r.Notices.Get()
	r.Changed() // as the router does with the lease
	messages := append([]api.ControlMessage{{Hello: &api.ManagerHello{State: told.State}}}, Changes(&Notice{State: told.State}, told)...)
	return managertest.NewControl(t, func() api.ControlMessage {
		t.Helper()
		for len(messages) == 0 {
			select {
			case <-newer:
			case <-time.After(managertest.Timeout):
				t.Fatal("no message")
			}
			var latest *Notice
			latest, newer = r.Notices.Get()
			messages = Changes(told, latest)
			told = latest
		}
		b, err := json.Marshal(messages[0])
		messages = messages[1:]
		var next api.ControlMessage
		if err := errors.Join(err, json.Unmarshal(b, &next)); err != nil {
			t.Fatal(err)
		}
		return next
	})
}
