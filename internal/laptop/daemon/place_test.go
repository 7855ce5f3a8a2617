//go:build linux

package daemon

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/connection"
	"kubevpn/pkg/host/sandbox"
)

// fakePlace is a namespace whose device is a file.
type fakePlace struct {
	device   *os.File
	networks chan sandbox.Network
}

func newFakePlace(t *testing.T) *fakePlace {
	t.Helper()
	f, err := os.Create(filepath.Join(t.TempDir(), "device"))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { f.Close() })
	return &fakePlace{device: f, networks: make(chan sandbox.Network, 8)}
}

func (p *fakePlace) TUN() *os.File { return p.device }

func (p *fakePlace) SetNetwork(_ context.Context, n sandbox.Network) error {
	p.networks <- n
	return nil
}

func (p *fakePlace) Localhost(context.Context, []netip.AddrPort) (net.Listener, error) {
	return nil, errInside
}

var errInside = errors.New("dialed inside")

func (p *fakePlace) Dial(context.Context, string, string) (net.Conn, error) { return nil, errInside }

// placed is a connection that sets its link as a session does.
type placed struct {
	*fakeConnection
	network connection.Network
	t       *testing.T
}

func (c *placed) Run(ctx context.Context) error {
	f, err := c.network.CreateTUN(ctx, "kubevpn0", 1400)
	if err != nil {
		return err
	}
	defer f.Close()
	link := api.Link{
		Name: f.Name(), MTU: 1400, Addrs: []netip.Prefix{netip.MustParsePrefix("198.18.0.9/32")}, Routes: []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16")},
		Resolver: netip.MustParseAddr("198.18.0.53"), SearchDomains: []string{"default.svc.cluster.local"},
	}
	applied, err := c.network.SetLink(ctx, link)
	if err != nil {
		return err
	}
	if applied.ResolverMode != api.ResolverFile || len(applied.Upstreams) == 0 {
		c.t.Errorf("applied: %+v", applied)
	}
	close(c.connected)
	<-ctx.Done()
	return c.network.RemoveLink(context.WithoutCancel(ctx))
}

// connectionFactory makes connections only.
type connectionFactory struct {
	*rig
	new func(connection.Config) (Connection, error)
}

func (f connectionFactory) NewConnection(cfg connection.Config) (Connection, error) {
	return f.new(cfg)
}

func TestHoldConfiguresThePlace(t *testing.T) {
	place := newFakePlace(t)
	ctx, cancel := context.WithCancel(t.Context())
	ready := make(chan struct{})
	done := make(chan error, 1)
	go func() {
		done <- Hold(ctx, HoldConfig{
			Request: api.InterceptRequest{Connect: request("east")}, Place: place, Logger: discard(),
			Progress: func(e api.Event) {
				if e.Held {
					close(ready)
				}
			},
			Factory: connectionFactory{new: func(cfg connection.Config) (Connection, error) {
				if len(cfg.Client) != 32 {
					t.Errorf("the secret of the client has %d bytes, want 32", len(cfg.Client))
				}
				return &placed{&fakeConnection{id: "east", connected: make(chan struct{})}, cfg.Network, t}, nil
			}},
		})
	}()
	n := wait(t, place.networks, "a network")
	wait(t, ready, "ready")
	if n.MTU != 1400 || !slices.Equal(n.Addresses, []netip.Prefix{netip.MustParsePrefix("198.18.0.9/32")}) ||
		!slices.Equal(n.DNS, []netip.Addr{netip.MustParseAddr("198.18.0.53")}) || n.Search[0] != "default.svc.cluster.local" || !slices.Equal(n.Options, []string{"ndots:5"}) {
		t.Errorf("the network of the place: %+v", n)
	}
	cancel()
	if err := wait(t, done, "the end"); err != nil {
		t.Errorf("Hold: %v", err)
	}
	if _, err := place.device.Stat(); err != nil {
		t.Errorf("the place's device: %v", err)
	}
}

func TestPlaceGetsTheNamesOfAPod(t *testing.T) {
	place := newFakePlace(t)
	h := newPlaceHelper(place, "/dev/null", discard())
	own := api.Link{Resolver: netip.MustParseAddr("198.18.0.53"), SearchDomains: []string{"default.svc.cluster.local"}}
	names := api.PodNames{Servers: []netip.Addr{netip.MustParseAddr("10.96.0.10")}, Search: []string{"shop.example"},
		Options: []string{"ndots:2", "edns0"}, Hosts: "10.0.0.1 db\n"}
	for _, servers := range [][]netip.Addr{names.Servers, nil} { // without any, the connection's answers
		own.Names = new(names)
		own.Names.Servers = servers
		if _, err := h.Apply(t.Context(), api.NetworkState{Links: []api.Link{own}}); err != nil {
			t.Fatal(err)
		}
		n := wait(t, place.networks, "a network")
		want := servers
		if servers == nil {
			want = []netip.Addr{own.Resolver}
		}
		if !slices.Equal(n.DNS, want) || !slices.Equal(n.Search, names.Search) ||
			!slices.Equal(n.Options, names.Options) || n.Hosts != names.Hosts {
			t.Errorf("with the nameservers %v, the place has %+v", servers, n)
		}
	}
}

func TestHoldReportsAFailedConnection(t *testing.T) {
	why := api.Errorf(api.ExitUnreachable, "no cluster")
	err := Hold(t.Context(), HoldConfig{
		Request: api.InterceptRequest{Connect: request("east")}, Place: newFakePlace(t), Logger: discard(),
		Progress: func(e api.Event) {
			if e.Held {
				t.Error("it is ready")
			}
		},
		Factory: connectionFactory{new: func(connection.Config) (Connection, error) { return nil, why }},
	})
	if !errors.Is(err, why) {
		t.Errorf("Hold: %v", err)
	}
}

func TestNameserversAreRead(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	for _, tt := range []struct {
		conf    string
		servers []string
	}{
		{"nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch lan .\n", []string{"127.0.0.53:53"}},
		{"nameserver 192.0.2.1\nnameserver 2001:db8::1\nnameserver nonsense\n", []string{"192.0.2.1:53", "[2001:db8::1]:53"}},
		{"", []string{"127.0.0.1:53"}},
	} {
		if err := os.WriteFile(path, []byte(tt.conf), 0o600); err != nil {
			t.Fatal(err)
		}
		servers, err := nameservers(path)
		var got []string
		for _, s := range servers {
			got = append(got, s.String())
		}
		if err != nil || !slices.Equal(got, tt.servers) {
			t.Errorf("%q: %v, %v", tt.conf, got, err)
		}
	}
	if servers, err := nameservers(filepath.Join(t.TempDir(), "none")); err != nil || len(servers) != 1 {
		t.Errorf("without a file: %v, %v", servers, err)
	}
}

func TestPlaceHelperFollowsTheNameservers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "resolv.conf")
	put := func(text string) {
		t.Helper()
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	put("nameserver 192.0.2.1\n")
	h := newPlaceHelper(newFakePlace(t), path, discard())
	put("nameserver 192.0.2.2\n")
	h.look()
	select {
	case c := <-h.Changes():
		t.Errorf("a change of what was not applied: %+v", c)
	default:
	}
	link := api.Link{Name: "eth0", MTU: 1400, Addrs: []netip.Prefix{netip.MustParsePrefix("198.18.0.9/32")}}
	if _, err := h.Apply(t.Context(), api.NetworkState{Links: []api.Link{link}}); err != nil {
		t.Fatal(err)
	}
	for _, server := range []string{"192.0.2.3", "192.0.2.4"} { // nobody reads in between
		put("nameserver " + server + "\n")
		h.look()
	}
	if c := <-h.Changes(); len(c.Upstreams) != 1 || c.Upstreams[0].String() != "192.0.2.4:53" {
		t.Errorf("%+v", c)
	}
}
