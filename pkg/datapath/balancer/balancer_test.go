package balancer

import (
	"net/netip"
	"slices"
	"testing"
)

var addr = netip.MustParseAddr

func port(s string) netip.AddrPort { return netip.MustParseAddrPort(s) }

// ep makes an endpoint from a list of words: "ready", "serving", "terminating", "node=N", "zoneHint=Z",
// "nodeHint=N".
func ep(addr string, words ...string) Endpoint {
	e := Endpoint{Addr: port(addr)}
	for _, w := range words {
		switch {
		case w == "ready":
			e.Ready, e.Serving = true, true
		case w == "serving":
			e.Serving = true
		case w == "terminating":
			e.Terminating = true
		case w[:5] == "node=":
			e.Node = w[5:]
		case w[:9] == "zoneHint=":
			e.ZoneHints = append(e.ZoneHints, w[9:])
		case w[:9] == "nodeHint=":
			e.NodeHints = append(e.NodeHints, w[9:])
		default:
			panic(w)
		}
	}
	return e
}

// svc is a Service web at 10.96.0.10:80/TCP.
func svc(endpoints ...Endpoint) Service {
	return Service{
		Name:       Name{"default", "web"},
		ClusterIPs: []netip.Addr{addr("10.96.0.10")},
		Ports:      []Port{{Protocol: TCP, Port: 80, Endpoints: endpoints}},
	}
}

func local(s Service) Service { s.LocalOnly = true; return s }

// candidates returns the endpoints that a Pick would try, sorted, or its verdict if that is not Chosen.
func candidates(b *Balancer, protocol Protocol, dst string) []string {
	p, v := b.Pick(protocol, port(dst), "laptop", RoundRobin)
	if v != Chosen {
		return []string{v.String()}
	}
	var got []string
	for ok := true; ok; ok = p.Next() {
		got = append(got, p.Endpoint().String())
	}
	slices.Sort(got)
	return got
}

func TestPickFollowsKubeProxy(t *testing.T) {
	// The manager is on node n1 in zone z1.
	tests := []struct {
		name string
		svc  Service
		want []string
	}{
		{"ready-only", svc(ep("10.0.0.1:8080", "ready"), ep("10.0.0.2:8080"), ep("10.0.0.3:8081", "ready")),
			[]string{"10.0.0.1:8080", "10.0.0.3:8081"}},
		{"terminating-not-used-while-one-is-ready", svc(ep("10.0.0.1:80", "ready"), ep("10.0.0.2:80", "serving", "terminating")),
			[]string{"10.0.0.1:80"}},
		{"terminating-fallback", svc(ep("10.0.0.1:80", "serving", "terminating"), ep("10.0.0.2:80", "terminating"), ep("10.0.0.3:80")),
			[]string{"10.0.0.1:80"}},
		{"serving-but-neither-ready-nor-terminating", svc(ep("10.0.0.1:80", "serving")), []string{"refused"}},
		{"ready-while-terminating-is-ready", svc(ep("10.0.0.1:80", "ready", "terminating")), []string{"10.0.0.1:80"}}, // publishNotReadyAddresses
		{"none-ready", svc(ep("10.0.0.1:80")), []string{"refused"}},
		{"no-endpoints", svc(), []string{"refused"}},
		{"other-family-does-not-count", svc(ep("[fd00::1]:80", "ready")), []string{"refused"}},
		{"duplicates-count-once", svc(ep("10.0.0.1:80"), ep("10.0.0.1:80", "ready"), ep("10.0.0.1:80", "ready")), []string{"10.0.0.1:80"}},
		{"of-duplicates-the-one-here", local(svc(ep("10.0.0.1:80", "ready"), ep("10.0.0.1:80", "ready", "node=n1"))), []string{"10.0.0.1:80"}},
		{"same-address-two-ports", svc(ep("10.0.0.1:80", "ready"), ep("10.0.0.1:81", "ready")), []string{"10.0.0.1:80", "10.0.0.1:81"}},

		{"local", local(svc(ep("10.0.0.1:80", "ready", "node=n1"), ep("10.0.0.2:80", "ready", "node=n2"))), []string{"10.0.0.1:80"}},
		{"local-none-here-drops", local(svc(ep("10.0.0.2:80", "ready", "node=n2"))), []string{"dropped"}},
		{"local-none-here-terminating-elsewhere-drops", local(svc(ep("10.0.0.2:80", "serving", "terminating", "node=n2"))), []string{"dropped"}},
		{"local-unready-here-drops-for-ready-elsewhere", local(svc(ep("10.0.0.1:80", "node=n1"), ep("10.0.0.2:80", "ready", "node=n2"))), []string{"dropped"}},
		{"local-none-anywhere-refuses", local(svc(ep("10.0.0.2:80", "node=n2"))), []string{"refused"}},
		{"local-terminating-here-before-ready-elsewhere", local(svc(ep("10.0.0.1:80", "serving", "terminating", "node=n1"), ep("10.0.0.2:80", "ready", "node=n2"))),
			[]string{"10.0.0.1:80"}},
		{"local-ignores-hints", local(svc(ep("10.0.0.1:80", "ready", "node=n1", "zoneHint=z2"), ep("10.0.0.2:80", "ready", "node=n2", "zoneHint=z1"))),
			[]string{"10.0.0.1:80"}},

		{"zone-hints", svc(ep("10.0.0.1:80", "ready", "zoneHint=z1"), ep("10.0.0.2:80", "ready", "zoneHint=z2"), ep("10.0.0.3:80", "ready", "zoneHint=z2", "zoneHint=z1")),
			[]string{"10.0.0.1:80", "10.0.0.3:80"}},
		{"zone-hint-missing-on-one-ready", svc(ep("10.0.0.1:80", "ready", "zoneHint=z1"), ep("10.0.0.2:80", "ready")), []string{"10.0.0.1:80", "10.0.0.2:80"}},
		{"zone-hint-missing-on-one-unready", svc(ep("10.0.0.1:80", "ready", "zoneHint=z1"), ep("10.0.0.2:80", "ready", "zoneHint=z2"), ep("10.0.0.3:80")),
			[]string{"10.0.0.1:80"}},
		{"zone-hints-for-other-zones-only", svc(ep("10.0.0.1:80", "ready", "zoneHint=z2"), ep("10.0.0.2:80", "ready", "zoneHint=z3")),
			[]string{"10.0.0.1:80", "10.0.0.2:80"}},
		{"zone-hint-here-only-on-unready", svc(ep("10.0.0.1:80", "zoneHint=z1"), ep("10.0.0.2:80", "ready", "zoneHint=z2")), []string{"10.0.0.2:80"}},
		{"node-hints-before-zone-hints", svc(ep("10.0.0.1:80", "ready", "nodeHint=n1", "zoneHint=z2"), ep("10.0.0.2:80", "ready", "nodeHint=n2", "zoneHint=z1")),
			[]string{"10.0.0.1:80"}},
		{"node-hints-elsewhere-then-zone-hints", svc(ep("10.0.0.1:80", "ready", "nodeHint=n3", "zoneHint=z2"), ep("10.0.0.2:80", "ready", "nodeHint=n2", "zoneHint=z1")),
			[]string{"10.0.0.2:80"}},
		{"node-hint-missing-on-one", svc(ep("10.0.0.1:80", "ready", "nodeHint=n1"), ep("10.0.0.2:80", "ready")), []string{"10.0.0.1:80", "10.0.0.2:80"}},
		{"terminating-fallback-ignores-hints", svc(ep("10.0.0.1:80", "serving", "terminating", "zoneHint=z1"), ep("10.0.0.2:80", "serving", "terminating", "zoneHint=z2")),
			[]string{"10.0.0.1:80", "10.0.0.2:80"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := New("n1")
			b.SetZone("z1")
			b.Apply([]Service{tt.svc}, nil)
			if got := candidates(b, TCP, "10.96.0.10:80"); !slices.Equal(got, tt.want) {
				t.Errorf("got %v, want %v", got, tt.want)
			}
		})
	}
}

func TestHintsAreIgnoredWithoutZoneAndNode(t *testing.T) {
	b := New("")
	b.Apply([]Service{svc(ep("10.0.0.1:80", "ready", "node=", "zoneHint=z1"), ep("10.0.0.2:80", "ready", "zoneHint=z2"))}, nil)
	if got, want := candidates(b, TCP, "10.96.0.10:80"), []string{"10.0.0.1:80", "10.0.0.2:80"}; !slices.Equal(got, want) {
		t.Errorf("without a zone: got %v, want %v", got, want)
	}
	b.SetZone("z2")
	if got, want := candidates(b, TCP, "10.96.0.10:80"), []string{"10.0.0.2:80"}; !slices.Equal(got, want) {
		t.Errorf("after SetZone: got %v, want %v", got, want)
	}
	b.Apply([]Service{local(svc(ep("10.0.0.1:80", "ready")))}, nil)
	if got, want := candidates(b, TCP, "10.96.0.10:80"), []string{"dropped"}; !slices.Equal(got, want) {
		t.Errorf("an endpoint without a node is not on a manager without a node: got %v, want %v", got, want)
	}
}

func TestPickFindsPortsOfVirtualIPs(t *testing.T) {
	b := New("n1")
	b.Apply([]Service{{
		Name:       Name{"kube-system", "dns"},
		ClusterIPs: []netip.Addr{addr("10.96.0.53"), addr("fd00:96::53")},
		Ports: []Port{
			{Protocol: UDP, Port: 53, Endpoints: []Endpoint{ep("10.0.0.1:5353", "ready"), ep("[fd00::1]:5353", "ready")}},
			{Protocol: TCP, Port: 53, Endpoints: []Endpoint{ep("10.0.0.1:5454", "ready"), ep("[fd00::1]:5454", "ready")}},
			{Protocol: 132, Port: 53, Endpoints: []Endpoint{ep("10.0.0.1:5555", "ready")}},
		},
	}}, nil)
	tests := []struct {
		name     string
		protocol Protocol
		dst      string
		want     string
	}{
		{"udp", UDP, "10.96.0.53:53", "10.0.0.1:5353"},
		{"tcp", TCP, "10.96.0.53:53", "10.0.0.1:5454"},
		{"udp6", UDP, "[fd00:96::53]:53", "[fd00::1]:5353"},
		{"tcp6", TCP, "[fd00:96::53]:53", "[fd00::1]:5454"},
		{"unknown-port", TCP, "10.96.0.53:54", "refused"},
		{"unknown-port6", UDP, "[fd00:96::53]:54", "refused"},
		{"sctp", 132, "10.96.0.53:53", "refused"},
		{"not-a-service", TCP, "10.96.0.54:53", "not a service"},
		{"pod", TCP, "10.0.0.1:5454", "not a service"},
		{"not-a-service6", TCP, "[fd00:96::54]:53", "not a service"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := candidates(b, tt.protocol, tt.dst); !slices.Equal(got, []string{tt.want}) {
				t.Errorf("got %v, want %s", got, tt.want)
			}
		})
	}
	if name, ok := b.Service(addr("fd00:96::53")); !ok || name != (Name{"kube-system", "dns"}) {
		t.Errorf("Service(fd00:96::53) = %v, %v", name, ok)
	}
}

func TestApplyChangesServices(t *testing.T) {
	b := New("n1")
	step := func(name string, set []Service, remove []Name, dst, want string) {
		t.Helper()
		b.Apply(set, remove)
		if got := candidates(b, TCP, dst); !slices.Equal(got, []string{want}) {
			t.Errorf("%s: got %v, want %s", name, got, want)
		}
	}
	one, two := ep("10.0.0.1:80", "ready"), ep("10.0.0.2:80", "ready")
	other := svc(two)
	other.Name.Name = "other"
	moved := svc(one)
	moved.Ports[0].Port = 81
	step("add", []Service{svc(one)}, nil, "10.96.0.10:80", "10.0.0.1:80")
	step("endpoint-changes", []Service{svc(two)}, nil, "10.96.0.10:80", "10.0.0.2:80")
	step("last-endpoint-goes", []Service{svc()}, nil, "10.96.0.10:80", "refused")
	step("port-changes", []Service{moved}, nil, "10.96.0.10:81", "10.0.0.1:80")
	step("old-port-is-gone", nil, nil, "10.96.0.10:80", "refused")
	step("delete", nil, []Name{{"default", "web"}}, "10.96.0.10:81", "not a service")
	step("delete-twice", nil, []Name{{"default", "web"}}, "10.96.0.10:81", "not a service")
	step("again", []Service{svc(one)}, nil, "10.96.0.10:80", "10.0.0.1:80")
	step("address-has-a-new-owner-before-the-old-one-goes", []Service{other}, nil, "10.96.0.10:80", "10.0.0.2:80")
	step("the-old-one-goes", nil, []Name{{"default", "web"}}, "10.96.0.10:80", "10.0.0.2:80")
	step("replace-in-one-batch", []Service{svc(one)}, []Name{{"default", "other"}}, "10.96.0.10:80", "10.0.0.1:80")
	headless := svc(one)
	headless.ClusterIPs = nil
	step("address-goes", []Service{headless}, nil, "10.96.0.10:80", "not a service")
}

func TestSchedulersSpreadFlows(t *testing.T) {
	three := svc(ep("10.0.0.1:80", "ready"), ep("10.0.0.2:80", "ready"), ep("10.0.0.3:80", "ready"))
	pick := func(b *Balancer, client string, s Scheduler) (string, *Pick) {
		p, v := b.Pick(TCP, port("10.96.0.10:80"), client, s)
		if v != Chosen {
			t.Fatal(v)
		}
		return p.Endpoint().Addr().String(), &p
	}
	t.Run("rr", func(t *testing.T) {
		b := New("")
		b.Apply([]Service{three}, nil)
		var got []string
		for range 4 {
			a, _ := pick(b, "x", RoundRobin)
			got = append(got, a)
		}
		if want := []string{"10.0.0.1", "10.0.0.2", "10.0.0.3", "10.0.0.1"}; !slices.Equal(got, want) {
			t.Errorf("got %v, want %v", got, want)
		}
	})
	t.Run("lc", func(t *testing.T) {
		b := New("")
		b.Apply([]Service{three}, nil)
		counts := map[string]int{}
		held := map[string]*Pick{}
		for range 9 {
			a, p := pick(b, "x", LeastConnection)
			counts[a]++
			held[a] = p
		}
		if counts["10.0.0.1"] != 3 || counts["10.0.0.2"] != 3 || counts["10.0.0.3"] != 3 {
			t.Errorf("nine flows are spread %v, want three each", counts)
		}
		held["10.0.0.2"].Release()
		held["10.0.0.2"].Release() // counts once
		b.Apply([]Service{three}, nil)
		if a, _ := pick(b, "x", LeastConnection); a != "10.0.0.2" {
			t.Errorf("picked %s, want 10.0.0.2, which has the fewest flows, also after an update", a)
		}
	})
	t.Run("sh", func(t *testing.T) {
		b := New("")
		b.Apply([]Service{three}, nil)
		before := map[string]string{}
		used := map[string]int{}
		for i := range 300 {
			client := string(rune('a'+i%26)) + string(rune('a'+i/26))
			first, _ := pick(b, client, SourceHash)
			if again, _ := pick(b, client, SourceHash); again != first {
				t.Fatalf("%s was given %s and then %s", client, first, again)
			}
			before[client] = first
			used[first]++
		}
		for a, n := range used {
			if n < 60 || n > 140 {
				t.Errorf("%s has %d of 300 clients", a, n)
			}
		}
		b.Apply([]Service{svc(ep("10.0.0.1:80", "ready"), ep("10.0.0.3:80", "ready"))}, nil)
		for client, was := range before {
			if now, _ := pick(b, client, SourceHash); was != "10.0.0.2" && now != was {
				t.Fatalf("%s was moved from %s to %s because 10.0.0.2 went", client, was, now)
			}
		}
	})
	t.Run("random", func(t *testing.T) {
		b := New("")
		b.Apply([]Service{three}, nil)
		used := map[string]int{}
		for range 3000 {
			a, p := pick(b, "x", Random)
			p.Release()
			used[a]++
		}
		for _, a := range []string{"10.0.0.1", "10.0.0.2", "10.0.0.3"} {
			if used[a] < 800 || used[a] > 1200 {
				t.Errorf("%s was picked %d times of 3000", a, used[a])
			}
		}
	})
}

func TestParseSchedulerRejectsUnknownNames(t *testing.T) {
	for _, name := range []string{"rr", "lc", "sh", "random"} {
		if s, err := ParseScheduler(name); err != nil || s.String() != name {
			t.Errorf("ParseScheduler(%q) = %v, %v", name, s, err)
		}
	}
	for _, name := range []string{"", "wrr", "RR"} {
		if _, err := ParseScheduler(name); err == nil {
			t.Errorf("ParseScheduler(%q) gave no error", name)
		}
	}
}

func TestRetryGoesThroughAllOnce(t *testing.T) {
	for _, s := range []Scheduler{RoundRobin, LeastConnection, SourceHash, Random} {
		b := New("")
		b.Apply([]Service{svc(ep("10.0.0.1:80", "ready"), ep("10.0.0.2:80", "ready"), ep("10.0.0.3:80", "ready"))}, nil)
		p, _ := b.Pick(TCP, port("10.96.0.10:80"), "x", s)
		got := []string{p.Endpoint().String()}
		b.Apply([]Service{svc()}, nil) // a Pick tries the endpoints that were usable when it was made
		for p.Next() {
			got = append(got, p.Endpoint().String())
		}
		slices.Sort(got)
		if want := []string{"10.0.0.1:80", "10.0.0.2:80", "10.0.0.3:80"}; !slices.Equal(got, want) {
			t.Errorf("%v: tried %v, want %v", s, got, want)
		}
		if p.Next() || p.Endpoint().IsValid() {
			t.Errorf("%v: Next returns a candidate after the last", s)
		}
		for _, u := range p.view.usable {
			if n := u.active.Load(); n != 0 {
				t.Errorf("%v: %v counts %d flows after all have ended", s, u.addr, n)
			}
		}
	}
}

func TestStaleFollowsTheEndpoint(t *testing.T) {
	udp := func(endpoints ...Endpoint) []Service {
		s := svc(endpoints...)
		s.Ports[0].Protocol = UDP
		return []Service{s}
	}
	one := ep("10.0.0.1:80", "ready", "zoneHint=z1")
	tests := []struct {
		name string
		then []Service
		want bool
	}{
		{"same", udp(one), false},
		{"another-joins", udp(one, ep("10.0.0.2:80", "ready", "zoneHint=z2")), false},
		{"replaced", udp(ep("10.0.0.2:80", "ready")), true},
		{"terminating-but-serving", udp(ep("10.0.0.1:80", "serving", "terminating"), ep("10.0.0.2:80", "ready")), false},
		{"not-serving-another-is", udp(ep("10.0.0.1:80"), ep("10.0.0.2:80", "ready")), true},
		{"hints-prefer-another", udp(ep("10.0.0.1:80", "ready", "zoneHint=z2"), ep("10.0.0.2:80", "ready", "zoneHint=z1")), false},
		{"nothing-serves", udp(ep("10.0.0.1:80")), false},
		{"no-endpoints", udp(), false},
		{"deleted", nil, true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			b := New("n1")
			b.SetZone("z1")
			b.Apply(udp(one), nil)
			p, v := b.Pick(UDP, port("10.96.0.10:80"), "x", RoundRobin)
			if v != Chosen || p.Stale() {
				t.Fatalf("verdict %v, stale at once: %v", v, p.Stale())
			}
			if tt.then == nil {
				b.Apply(nil, []Name{{"default", "web"}})
			} else {
				b.Apply(tt.then, nil)
			}
			if got := p.Stale(); got != tt.want {
				t.Errorf("stale is %v, want %v", got, tt.want)
			}
		})
	}
	var none Pick
	if none.Stale() || none.Next() || none.Endpoint().IsValid() {
		t.Error("the zero Pick is not inert")
	}
	none.Release()
}
