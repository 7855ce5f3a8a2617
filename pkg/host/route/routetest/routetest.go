// Package routetest contains the contract test of route.Router, which runs on every system. The helper relies on it.
package routetest

import (
	"net"
	"net/netip"
	"testing"

	"kubevpn/pkg/host/route"
)

// Router is a route.Router.
type Router interface {
	Set(cfg route.Config) (route.Applied, error)
	Close() error
}

var (
	addr4, addr6 = netip.MustParsePrefix("198.19.0.1/32"), netip.MustParsePrefix("fd00:198::1/128")
	first        = []netip.Prefix{netip.MustParsePrefix("10.96.0.0/16"), netip.MustParsePrefix("fd00:10:96::/112")}
	second       = []netip.Prefix{netip.MustParsePrefix("10.97.0.0/16"), netip.MustParsePrefix("fd00:10:97::/112")}
)

// TestRouter checks a Router. open returns a new one that has set nothing, and the name of a new link, which has
// neither addresses nor routes. It removes the link at the end of the test.
func TestRouter(t *testing.T, open func(t *testing.T) (r Router, link string)) {
	t.Run("sets_the_wanted_state", func(t *testing.T) {
		r, link := open(t)
		testStates(t, r, link)
	})
	t.Run("continues_after_an_error", func(t *testing.T) {
		r, link := open(t)
		testErrors(t, r, link)
	})
	t.Run("close_removes_everything", func(t *testing.T) {
		r, link := open(t)
		set(t, r, config(link, first))
		for range 2 {
			if err := r.Close(); err != nil {
				t.Errorf("Close: %v", err)
			}
		}
		routed(t, link, nil, first)
	})
}

func config(link string, routes []netip.Prefix) route.Config {
	return route.Config{Links: []route.Link{{
		Name: link, MTU: 1400, Addrs: []netip.Prefix{addr4, addr6}, Routes: routes,
	}}}
}

func set(t *testing.T, r Router, cfg route.Config) {
	t.Helper()
	if _, err := r.Set(cfg); err != nil {
		t.Fatalf("Set: %v", err)
	}
}

// testStates sets several states. A second Set of the same state changes nothing.
func testStates(t *testing.T, r Router, link string) {
	for range 2 {
		set(t, r, config(link, first))
		routed(t, link, first, second)
		ifi, err := net.InterfaceByName(link)
		if err != nil || ifi.MTU != 1400 || ifi.Flags&net.FlagUp == 0 {
			t.Errorf("the link is %+v, %v; want it up with MTU 1400", ifi, err)
		}
	}
	set(t, r, config(link, second))
	routed(t, link, second, first)
	set(t, r, config(link, append(first[:2:2], second...)))
	routed(t, link, append(first[:2:2], second...), nil)
	for range 2 {
		set(t, r, route.Config{})
		routed(t, link, nil, append(first[:2:2], second...))
	}
	set(t, r, config(link, first))
	routed(t, link, first, second)
	if err := r.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

func testErrors(t *testing.T, r Router, link string) {
	set(t, r, config(link, first))
	unmasked := netip.MustParsePrefix("10.98.0.1/16")
	for name, cfg := range map[string]route.Config{
		"unmasked_route": config(link, []netip.Prefix{unmasked}),
		"no_mtu":         {Links: []route.Link{{Name: link}}},
		"twice":          {Links: append(config(link, first).Links, config(link, second).Links...)},
	} {
		if _, err := r.Set(cfg); err == nil {
			t.Errorf("%s: Set accepted it", name)
		}
		routed(t, link, first, second) // nothing has changed
	}
	if _, err := r.Set(config("kubevpn-none", first)); err == nil {
		t.Error("Set accepted a link that does not exist")
	}
	set(t, r, config(link, second))
	routed(t, link, second, first)
	if err := r.Close(); err != nil {
		t.Errorf("Close: %v", err)
	}
}

// routed checks which networks the machine routes into the link, and that the link has addresses only with routes.
func routed(t *testing.T, link string, into, elsewhere []netip.Prefix) {
	t.Helper()
	ifi, err := net.InterfaceByName(link)
	if err != nil {
		t.Fatal(err)
	}
	addrs, err := ifi.Addrs()
	if err != nil {
		t.Fatal(err)
	}
	for _, want := range []netip.Prefix{addr4, addr6} {
		found := false
		for _, a := range addrs {
			found = found || a.(*net.IPNet).IP.Equal(want.Addr().AsSlice())
		}
		if found != (len(into) > 0) {
			t.Errorf("the addresses of %s are %v", link, addrs)
		}
	}
	for _, p := range into {
		if got, err := source(p); err != nil || got != addr4.Addr() && got != addr6.Addr() {
			t.Errorf("packets to %s have the source %v, %v; want that of the link", p, got, err)
		}
	}
	for _, p := range elsewhere {
		if got, err := source(p); err == nil && (got == addr4.Addr() || got == addr6.Addr()) {
			t.Errorf("packets to %s go into the link", p)
		}
	}
}

// source returns the address from which this machine sends to the network. It sends nothing.
func source(p netip.Prefix) (netip.Addr, error) {
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(netip.AddrPortFrom(p.Addr().Next(), 9)))
	if err != nil {
		return netip.Addr{}, err
	}
	defer conn.Close()
	return conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Unmap(), nil
}
