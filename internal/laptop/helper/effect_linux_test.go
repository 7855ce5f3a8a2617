package helper

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// officeMachine gives the namespace a LAN, a tunnel of another user, and nameservers behind the LAN's gateway. They are
// all private, so the routes alone do not tell them from those of a cluster.
func officeMachine(t *testing.T) {
	t.Helper()
	privateEtc(t, "nameserver 10.1.2.3\nnameserver fd53::53\n")
	for _, c := range []string{
		"ip link add eth0 type veth peer name far0",
		"ip link set eth0 addrgenmode none", "ip link set far0 addrgenmode none", // no link-local address comes later
		"ip addr add 192.168.1.7/24 dev eth0",
		"ip addr add 100.64.9.9/32 dev eth0", "ip -6 addr add fd12::7/64 dev eth0 nodad", "ip link set eth0 up",
		"ip link set far0 up", "ip route add default via 192.168.1.1", "ip route add 172.20.0.0/16 via 192.168.1.2",
		"ip tuntap add kubevpn9 mode tun", "ip link set kubevpn9 up", "ip route add 10.97.0.0/16 dev kubevpn9",
	} {
		testenv.Run(t, c)
	}
	testenv.Eventually(t, testTimeout, func() error { // the kernel notices later that a link is up
		links, routes := testenv.Run(t, "ip -j link"), testenv.Run(t, "ip -j route")
		if strings.Count(links, `"operstate":"UP"`) != 2 || strings.Count(routes, `"linkdown"`) != 1 {
			return fmt.Errorf("links are still changing:\n%s\n%s", links, routes)
		}
		return nil
	})
}

// The policy allows all of these fields. It must judge what they do to the machine and to its other users.
func TestPolicyJudgesTheEffectOnTheMachine(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	officeMachine(t)
	state := func(change func(*api.Link)) api.NetworkState {
		l := goodLink()
		l.Routes, l.Named = prefixes("10.96.0.0/16", "10.244.0.0/16", "198.19.0.0/16", "fd00:10:96::/112"), nil
		change(&l)
		return api.NetworkState{Links: []api.Link{l}}
	}
	route := func(s string) api.NetworkState {
		return state(func(l *api.Link) { l.Routes = append(l.Routes, prefixes(s)...) })
	}
	resolver := func(s api.NetworkState, listen string) api.NetworkState {
		at := netip.MustParseAddrPort(listen)
		s.Resolver = &api.Resolver{Listen4: at}
		if at.Addr().Is6() {
			s.Resolver = &api.Resolver{Listen6: at}
		}
		return s
	}
	const queries = "name resolution: all DNS queries of this machine would go to the resolver"
	honest := state(func(*api.Link) {})
	for name, tt := range map[string]struct {
		state api.NetworkState
		want  string // after "the root helper refuses "
	}{
		"all queries, without a link":   {resolver(api.NetworkState{}, "127.0.0.1:5399"), queries},
		"all queries over IPv6":         {resolver(api.NetworkState{}, "[::1]:5399"), queries},
		"all queries, by resolv.conf":   {resolver(api.NetworkState{}, "127.0.0.1:53"), queries},
		"all queries, with a link":      {resolver(honest, "127.0.0.1:5399"), queries},
		"the nameserver":                {route("10.1.2.3/32"), "the route to 10.1.2.3: this machine asks this nameserver"},
		"around the nameserver":         {route("10.0.0.0/9"), "the route to 10.1.2.3: this machine asks this nameserver"},
		"the IPv6 nameserver":           {route("fd53::/64"), "the route to fd53::53: this machine asks this nameserver"},
		"the nameserver as a resolver":  {state(func(l *api.Link) { l.Resolver = netip.MustParseAddr("fd53::53") }), "the route to fd53::53: this machine asks this nameserver"},
		"the nameserver as own address": {state(func(l *api.Link) { l.Addrs = prefixes("fd53::53/128") }), "the route to fd53::53: this machine asks this nameserver"},
		"the gateway":                   {route("192.168.1.1/32"), "the route 192.168.1.1/32: 192.168.1.1/32 overlaps the "},
		"the gateway of a network":      {route("192.168.1.2/32"), "the route 192.168.1.2/32: 192.168.1.2/32 overlaps the "},
		"a host of the LAN":             {route("192.168.1.50/32"), "the route 192.168.1.50/32: 192.168.1.50/32 overlaps the "},
		"a host of the IPv6 LAN":        {route("fd12::99/128"), "the route fd12::99/128: fd12::99/128 overlaps the "},
		"the machine":                   {route("192.168.1.7/32"), "the route 192.168.1.7/32: 192.168.1.7/32 overlaps the "},
		"an address of the machine, which neighbours could no longer reach": {state(func(l *api.Link) { l.Addrs = prefixes("100.64.9.9/32") }),
			"the route 100.64.9.9/32: 100.64.9.9/32 overlaps the "},
		"the network of another user": {route("10.97.0.0/16"), "the route 10.97.0.0/16: 10.97.0.0/16 overlaps the "},
		"another network":             {route("172.20.0.0/16"), "the route 172.20.0.0/16: 172.20.0.0/16 overlaps the "},
	} {
		t.Run(name, func(t *testing.T) {
			before := machine(t)
			l := NewLocal(LocalConfig{UID: 1000, Policy: &Policy{file: "/etc/kubevpn/helper.yaml"}})
			f, err := l.CreateTUN(t.Context(), "kubevpn0", 1500)
			if err != nil {
				t.Fatal(err)
			}
			defer func() {
				if err := l.Close(); err != nil {
					t.Error(err)
				}
				f.Close()
				testenv.WaitGone(t, "kubevpn0")
				if diff := cmp.Diff(before, machine(t)); diff != "" {
					t.Errorf("left behind: -before +after\n%s", diff)
				}
			}()
			if _, err := l.Apply(t.Context(), honest); err != nil {
				t.Fatalf("the state of a cluster, without names: %v", err)
			}
			_, err = l.Apply(t.Context(), tt.state)
			if err == nil || !strings.HasPrefix(err.Error(), "the root helper refuses "+tt.want) {
				t.Fatalf("got %v, want %s", err, tt.want)
			}
			if hint := api.AsError(err).Hint; tt.want == queries &&
				hint != "only an administrator can allow it. Add this line to /etc/kubevpn/helper.yaml:\n  allQueries: true" {
				t.Errorf("the hint is %q", hint)
			}
			if rules := testenv.Run(t, "nft list ruleset"); strings.Contains(rules, "10.1.2.3") || strings.Contains(rules, "fd53::53") {
				t.Errorf("queries are redirected:\n%s", rules)
			}
			if _, err := l.Apply(t.Context(), honest); err != nil {
				t.Errorf("after the refusal: %v", err)
			}
		})
	}
}

// A connection keeps what it has when the machine joins a network that overlaps it, and the daemon can still remove
// parts. An administrator can allow all queries.
func TestPolicyLeavesConnectionsAlone(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	officeMachine(t)
	l := NewLocal(LocalConfig{UID: 1000, Policy: &Policy{AllQueries: true}})
	f, err := l.CreateTUN(t.Context(), "kubevpn0", 1500)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	state := api.NetworkState{Links: []api.Link{goodLink()}, Resolver: &api.Resolver{Listen4: netip.MustParseAddrPort("127.0.0.1:5399")}}
	state.Links[0].Routes, state.Links[0].Named = prefixes("10.96.0.0/16", "10.244.0.0/16", "198.19.0.0/16"), nil
	apply := func(when string) {
		t.Helper()
		if applied, err := l.Apply(t.Context(), state); err != nil || applied.ResolverMode != api.ResolverNFTables {
			t.Fatalf("%s: %+v, %v", when, applied, err)
		}
	}
	apply("first")
	checkNoSets(t)
	testenv.Run(t, "ip addr add 10.244.3.4/24 dev eth0") // another LAN
	apply("again")
	state.Links[0].Routes = state.Links[0].Routes[1:]
	apply("less")
	if err := l.Close(); err != nil {
		t.Error(err)
	}
}

// checkNoSets checks that no table has a set or a map, named or anonymous. An older nft, such as kube-proxy's on a
// machine that is also a node, crashes on what a newer one or a library writes into them
// (kubernetes/kubernetes#136786).
func checkNoSets(t *testing.T) {
	t.Helper()
	rules := testenv.Run(t, "nft -j list ruleset")
	if strings.Count(rules, `{"table": `) != 2 || !strings.Contains(rules, `"dnat"`) {
		t.Errorf("the tables of names and of neighbours are not there:\n%s", rules)
	}
	for _, word := range []string{"set", "map", "vmap", "elem", "meter", "flowtable"} {
		if strings.Contains(rules, `{"`+word+`":`) {
			t.Errorf("a table has a %s:\n%s", word, rules)
		}
	}
}
