package router

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/managertest"
)

// laptops plays sessions on a lease table of its own.
type laptops struct {
	t     *testing.T
	l     *leases
	now   time.Time
	peers map[string]*Peer
	away  map[string]bool // cut off
	over  []string        // names of sessions that ended because another one took their lease
}

func newLaptops(t *testing.T) *laptops {
	ls := &laptops{t: t, l: newLeases(), now: time.Unix(0, 0), peers: map[string]*Peer{}, away: map[string]bool{}}
	ls.l.now = func() time.Time { return ls.now }
	return ls
}

// connect begins a session, named by its client and perhaps "/" and a number.
func (ls *laptops) connect(name string, w leaseRequest) []netip.Addr {
	ls.t.Helper()
	w.client, _, _ = strings.Cut(name, "/")
	p := NewPeer(nil, nil, func() bool { return !ls.away[name] }, func() { ls.over = append(ls.over, name) })
	lease := ls.l.take(p, w)
	ls.peers[name] = p
	ls.verify()
	for i, a := range lease.Addrs {
		if !lease.Networks[i].Contains(a) {
			ls.t.Errorf("%s: %v is not in %v", name, a, lease.Networks[i])
		}
	}
	return lease.Addrs
}

func (ls *laptops) disconnect(name string) {
	ls.l.release(ls.peers[name])
	delete(ls.peers, name)
	ls.verify()
}

// verify checks that the peers' own addresses contain no address twice.
func (ls *laptops) verify() {
	ls.t.Helper()
	by := map[netip.Addr]string{}
	for name, p := range ls.peers {
		for _, a := range p.addresses() {
			if other, held := by[a]; held {
				ls.t.Errorf("%v is held by %s and by %s", a, name, other)
			}
			by[a] = name
			if ls.l.taken[a].holder != p {
				ls.t.Errorf("%s has %v, which the leases do not give it", name, a)
			}
		}
	}
}

func TestLeasesFollowTheClient(t *testing.T) {
	four := func(as []netip.Addr) netip.Addr { return as[0] }
	tests := []struct {
		name string
		run  func(t *testing.T, ls *laptops)
	}{
		{"same-client-same-address", func(t *testing.T, ls *laptops) {
			other := newLaptops(t) // the manager was restarted, and forgot
			if a, b := ls.connect("a", leaseRequest{}), other.connect("a", leaseRequest{}); len(a) != 2 || !slices.Equal(a, b) {
				t.Errorf("%v and %v", a, b)
			}
		}},
		{"keeps-its-address", func(t *testing.T, ls *laptops) {
			keep := managertest.Addrs("198.19.77.3", "fd4e:19c6:8b7a::7:1")
			if got := ls.connect("a", leaseRequest{keep: keep}); !slices.Equal(got, keep) {
				t.Errorf("got %v", got)
			}
		}},
		{"keeps-its-address-in-another-pool", func(t *testing.T, ls *laptops) {
			keep := netip.MustParseAddr("100.96.9.9")
			if got := ls.connect("a", leaseRequest{keep: []netip.Addr{keep}}); four(got) != keep {
				t.Errorf("got %v", got)
			}
		}},
		{"asks-for-the-address-of-another", func(t *testing.T, ls *laptops) {
			a := ls.connect("a", leaseRequest{})
			if b := ls.connect("b", leaseRequest{keep: a}); four(a) == four(b) || a[1] == b[1] {
				t.Errorf("%v and %v", a, b)
			}
			ls.away["a"] = true // only a itself may take its address over
			if c := ls.connect("c", leaseRequest{keep: a}); four(a) == four(c) {
				t.Errorf("%v and %v", a, c)
			}
		}},
		{"asks-for-addresses-that-nobody-may-have", func(t *testing.T, ls *laptops) {
			for _, bad := range managertest.Addrs("198.19.0.1", "198.19.0.53", "198.19.0.255", "198.19.255.255", "10.0.0.1", "127.0.0.1",
				"fd4e:19c6:8b7a::1", "fd4e:19c6:8b7a::ffff", "fd4e:19c6:8b7a:1::1:1", "::ffff:198.19.7.7") {
				if got := ls.connect("a", leaseRequest{keep: []netip.Addr{bad, {}}}); slices.Contains(got, bad) || len(got) != 2 {
					t.Errorf("asked for %v, got %v", bad, got)
				}
				ls.disconnect("a")
			}
		}},
		{"quarantine", func(t *testing.T, ls *laptops) {
			a := ls.connect("a", leaseRequest{})
			ls.disconnect("a")
			ls.now = ls.now.Add(quarantine - time.Second)
			if b := ls.connect("b", leaseRequest{keep: a}); four(a) == four(b) {
				t.Errorf("got %v, which is kept for another client", b)
			}
			ls.now = ls.now.Add(time.Second)
			if c := ls.connect("c", leaseRequest{keep: a}); !slices.Equal(a, c) {
				t.Errorf("got %v, want %v, which is free again", c, a)
			}
		}},
		{"quarantine-is-not-for-the-client", func(t *testing.T, ls *laptops) {
			a := ls.connect("a", leaseRequest{keep: managertest.Addrs("198.19.3.3")})
			ls.disconnect("a")
			if again := ls.connect("a/2", leaseRequest{keep: a}); !slices.Equal(a, again) {
				t.Errorf("%v, and then %v", a, again)
			}
		}},
		{"two-sessions-of-a-client", func(t *testing.T, ls *laptops) {
			a := ls.connect("a/1", leaseRequest{})
			if b := ls.connect("a/2", leaseRequest{keep: a}); four(a) == four(b) {
				t.Errorf("both have %v", a)
			}
			if len(ls.over) != 0 {
				t.Errorf("ended: %v", ls.over)
			}
		}},
		{"takes-over-from-the-one-cut-off", func(t *testing.T, ls *laptops) {
			a := ls.connect("a/1", leaseRequest{})
			ls.away["a/1"] = true
			if b := ls.connect("a/2", leaseRequest{keep: a}); !slices.Equal(a, b) {
				t.Errorf("%v, and then %v", a, b)
			}
			if left := ls.peers["a/1"].addresses(); len(left) != 0 {
				t.Errorf("the older session still has %v", left)
			}
			if !slices.Contains(ls.over, "a/1") {
				t.Error("the older session has not ended")
			}
			ls.disconnect("a/1") // this must not free the address of another session
			if got := ls.connect("b", leaseRequest{keep: a}); four(got) == four(a) {
				t.Errorf("%v is in use", got)
			}
		}},
		{"avoids", func(t *testing.T, ls *laptops) {
			for _, tt := range []struct {
				avoid []netip.Prefix
				want4 string
			}{
				{nil, "198.19.0.0/16"},
				{managertest.PrefixesOf("198.19.128.0/20"), "198.18.0.0/16"},
				{managertest.PrefixesOf("198.18.0.0/15"), "100.96.0.0/16"},
				{managertest.PrefixesOf("198.18.0.0/15", "100.64.0.0/10"), "10.219.0.0/16"},
				{managertest.PrefixesOf("0.0.0.0/0", "0.0.0.0/1", "128.0.0.0/1"), "198.19.0.0/16"},
			} {
				got := ls.connect("a", leaseRequest{avoid: append(tt.avoid, managertest.PrefixesOf("fd4e:19c6:8b7a:7::/64", "::/0")...)})
				if !netip.MustParsePrefix(tt.want4).Contains(four(got)) || !netip.MustParsePrefix("fd93:a5d0:2e61::/48").Contains(got[1]) {
					t.Errorf("avoiding %v: %v", tt.avoid, got)
				}
				ls.disconnect("a")
			}
		}},
		{"avoids-its-previous-network", func(t *testing.T, ls *laptops) {
			got := ls.connect("a", leaseRequest{keep: managertest.Addrs("198.19.5.5"), avoid: managertest.PrefixesOf("198.19.0.0/24")})
			if !netip.MustParsePrefix("198.18.0.0/16").Contains(four(got)) {
				t.Errorf("got %v", got)
			}
		}},
		{"avoids-the-network-of-a-session-that-was-cut-off", func(t *testing.T, ls *laptops) {
			avoid := managertest.PrefixesOf("198.19.0.0/16")
			ls.connect("a/1", leaseRequest{})
			ls.connect("a/2", leaseRequest{keep: managertest.Addrs("198.19.7.7")})
			other := ls.connect("b", leaseRequest{})
			ls.away["a/1"], ls.away["b"] = true, true
			ls.connect("a/3", leaseRequest{avoid: avoid})
			if !slices.Equal(slices.Compact(ls.over), []string{"a/1"}) {
				t.Errorf("ended: %v", ls.over)
			}
			ls.disconnect("a/1") // its address is free already
			if got := ls.peers["b"].addresses(); !slices.Equal(got, other) {
				t.Errorf("another client has %v", got)
			}
			ls.disconnect("b")
			ls.away["a/2"] = true
			ls.connect("a/4", leaseRequest{avoid: avoid})
			for _, p := range ls.l.networks() {
				if p.Overlaps(avoid[0]) {
					t.Errorf("laptops need routes to %v", ls.l.networks())
				}
			}
		}},
		{"nothing-left", func(t *testing.T, ls *laptops) {
			got := ls.connect("a", leaseRequest{avoid: managertest.PrefixesOf("198.18.0.0/15", "100.64.0.0/10", "10.0.0.0/8", "fd4e:19c6:8b7a::/48", "fd93:a5d0:2e61::/48")})
			if len(got) != 0 || len(ls.l.networks()) != 0 {
				t.Errorf("got %v of %v", got, ls.l.networks())
			}
		}},
		{"full-pool", func(t *testing.T, ls *laptops) {
			ls.l.pools = [2][]netip.Prefix{managertest.PrefixesOf("198.19.0.0/23", "198.18.0.0/16"), nil}
			for i := range 254 { // 198.19.1.0 to 198.19.1.254 but the broadcast: 255 addresses
				if got := ls.connect(fmt.Sprint(i), leaseRequest{}); !netip.MustParsePrefix("198.19.1.0/24").Contains(four(got)) {
					t.Fatalf("laptop %d has %v", i, got)
				}
			}
			last := ls.connect("last", leaseRequest{})
			next := ls.connect("next", leaseRequest{})
			if !netip.MustParsePrefix("198.19.1.0/24").Contains(four(last)) || !netip.MustParsePrefix("198.18.0.0/16").Contains(four(next)) {
				t.Errorf("%v, then %v", last, next)
			}
			if got := ls.l.networks(); !slices.Equal(got, managertest.PrefixesOf("198.18.0.0/16", "198.19.0.0/23")) {
				t.Errorf("networks %v", got)
			}
		}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) { tt.run(t, newLaptops(t)) })
	}
}

// A laptop that avoids a network is not told of it for the sake of its own older session, whose end is not known yet.
func TestOwnOlderSessionsAreNoOtherLaptops(t *testing.T) {
	r := New(nil, func() {}, nil)
	admit := func(client string, avoid ...string) *Peer {
		p := NewPeer(r, nil, func() bool { return true }, nil)
		p.Admit(&api.ClientHello{Client: client, Avoid: managertest.PrefixesOf(avoid...)}, false, nil)
		return p
	}
	told := func(p *Peer) []netip.Prefix {
		networks, _ := r.networks()
		return slices.DeleteFunc(r.Others(p, networks), func(p netip.Prefix) bool { return p.Addr().Is6() })
	}
	first := admit("a")
	second := admit("a", "198.19.0.0/24")
	own, both := managertest.PrefixesOf("198.18.0.0/16"), managertest.PrefixesOf("198.18.0.0/16", "198.19.0.0/16")
	if got := told(second); !slices.Equal(got, own) {
		t.Errorf("the newer session is told of %v", got)
	}
	if got := told(first); !slices.Equal(got, both) {
		t.Errorf("the older session is told of %v", got)
	}
	other := admit("b")
	if got := told(second); !slices.Equal(got, both) {
		t.Errorf("beside another laptop, the newer session is told of %v", got)
	}
	other.Dismiss()
	first.Dismiss()
	if got := told(second); !slices.Equal(got, own) {
		t.Errorf("at last, the session is told of %v", got)
	}
}

// The state of laptops follows the leases, and an ended session receives nothing.
func TestRouterAdmitsEachPeerOnce(t *testing.T) {
	changes := 0
	r := New(nil, func() { changes++ }, nil)
	connected := func() bool { return true }
	p := NewPeer(r, nil, connected, nil)
	if lease, run := NewPeer(r, nil, connected, nil).Admit(&api.ClientHello{}, false, nil); run != nil || len(lease.Addrs) != 0 {
		t.Errorf("one without an identity got %+v", lease)
	}
	_, other := r.networks()
	hello := &api.ClientHello{Client: "a"}
	lease, run := p.Admit(hello, false, nil)
	if again, twice := p.Admit(hello, false, nil); run == nil || twice != nil || !slices.Equal(lease.Addrs, again.Addrs) {
		t.Errorf("%+v, then %+v", lease, again)
	}
	select {
	case <-other:
	default:
		t.Error("the router did not announce the network")
	}
	if lease.Resolver != netip.MustParseAddr("198.19.0.53") {
		t.Errorf("resolver %v", lease.Resolver)
	}
	networks, other := r.networks()
	if !slices.Equal(networks, managertest.PrefixesOf("198.19.0.0/16", "fd4e:19c6:8b7a::/48")) {
		t.Errorf("networks %v", networks)
	}
	p.Dismiss()
	<-other
	if t2 := r.routes.Load(); len(t2.peers) != 0 || t2.networks != nil || changes != 2 {
		t.Errorf("after the end: %+v, %d changes", t2, changes)
	}
	if lease, run := p.Admit(hello, false, nil); run != nil || len(lease.Addrs) != 0 {
		t.Errorf("after its end the session got %+v", lease)
	}
}
