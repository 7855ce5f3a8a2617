package helper

import (
	"fmt"
	"net/netip"
	"runtime"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/routable"
)

func prefixes(list ...string) []netip.Prefix {
	var out []netip.Prefix
	for _, s := range list {
		out = append(out, netip.MustParsePrefix(s))
	}
	return out
}

// device is a valid name of a link on this system.
func device() string {
	if runtime.GOOS == "darwin" {
		return "utun0"
	}
	return "kubevpn0"
}

func goodLink() api.Link {
	return api.Link{
		Name: device(), MTU: 1500,
		Addrs:         prefixes("198.19.0.1/32", "fd00:198::1/128"),
		Routes:        prefixes("10.96.0.0/12", "10.244.0.0/16", "198.19.0.0/16", "fd00:10:96::/112", "2001:db8::/32", "203.0.113.0/24"),
		Named:         prefixes("2001:db8::/32", "203.0.0.0/16"),
		Resolver:      netip.MustParseAddr("198.19.255.53"),
		MatchDomains:  []string{"cluster.local", "96.10.in-addr.arpa", "default"},
		SearchDomains: []string{"default.svc.cluster.local"},
	}
}

func TestCheckRejectsInvalidStates(t *testing.T) {
	link := func(change func(*api.Link)) api.NetworkState {
		l := goodLink()
		change(&l)
		return api.NetworkState{Links: []api.Link{l}, Resolver: &api.Resolver{Listen4: netip.MustParseAddrPort("127.0.0.1:5399")}}
	}
	addr := func(s string) func(*api.Link) { return func(l *api.Link) { l.Addrs = prefixes(s) } }
	route := func(s string) func(*api.Link) { return func(l *api.Link) { l.Routes = prefixes(s) } }
	domain := func(s string) func(*api.Link) { return func(l *api.Link) { l.MatchDomains = []string{s} } }
	listen := func(l4, l6 string) api.NetworkState {
		r := &api.Resolver{}
		if l4 != "" {
			r.Listen4 = netip.MustParseAddrPort(l4)
		}
		if l6 != "" {
			r.Listen6 = netip.MustParseAddrPort(l6)
		}
		return api.NetworkState{Resolver: r}
	}
	var links []api.Link
	for i := range 17 {
		links = append(links, api.Link{Name: fmt.Sprintf("kubevpn%d", i), MTU: 1500})
	}
	var many []netip.Prefix
	for i := range 4097 {
		many = append(many, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 8), byte(i), 0}), 24))
	}
	tests := []struct {
		name  string
		state api.NetworkState
		want  string // after "the root helper refuses "
	}{
		{"zero", api.NetworkState{}, ""},
		{"good", link(func(*api.Link) {}), ""},
		{"good_listeners", listen("127.0.0.1:5399", "[::1]:5399"), ""},
		{"no_ipv6_at_576", link(func(l *api.Link) { l.MTU, l.Addrs = 576, prefixes("198.18.0.1/32") }), ""},

		{"too_many_links", api.NetworkState{Links: links}, "17 links: the limit is 16"},
		{"same_name_twice", api.NetworkState{Links: []api.Link{goodLink(), goodLink()}}, "two links with the name kubevpn0"},
		{"other_link", link(func(l *api.Link) { l.Name = "eth0" }), `the link name "eth0": it must be ` + linkRule},
		{"path", link(func(l *api.Link) { l.Name = "kubevpn/.." }), `the link name "kubevpn/..": it must be ` + linkRule},
		{"newline", link(func(l *api.Link) { l.Name = device() + "\n" }), `the link name "kubevpn0\n": it must be ` + linkRule},
		{"long", link(func(l *api.Link) { l.Name = "kubevpn123456789" }), `the link name "kubevpn123456789": it must be ` + linkRule},
		{"small_mtu", link(func(l *api.Link) { l.MTU = 575 }), "MTU 575 of kubevpn0: it must be 576 to 65535"},
		{"large_mtu", link(func(l *api.Link) { l.MTU = 65536 }), "MTU 65536 of kubevpn0: it must be 576 to 65535"},
		{"mtu_without_ipv6", link(func(l *api.Link) { l.MTU = 1279 }), "MTU 1279 of kubevpn0: IPv6 requires 1280"},

		{"address_of_a_lan", link(addr("192.168.1.1/32")), "the address 192.168.1.1/32 of kubevpn0: it must be one address of [198.18.0.0/15 100.64.0.0/10 10.219.0.0/16 fd00::/8]"},
		{"address_of_the_world", link(addr("8.8.8.8/32")), "the address 8.8.8.8/32 of kubevpn0: it must be one address of [198.18.0.0/15 100.64.0.0/10 10.219.0.0/16 fd00::/8]"},
		{"a_network_as_address", link(addr("198.19.0.1/16")), "the address 198.19.0.1/16 of kubevpn0: it must be one address of [198.18.0.0/15 100.64.0.0/10 10.219.0.0/16 fd00::/8]"},
		{"no_address", link(func(l *api.Link) { l.Addrs = []netip.Prefix{{}} }), "the address invalid Prefix of kubevpn0: it must be one address of [198.18.0.0/15 100.64.0.0/10 10.219.0.0/16 fd00::/8]"},
		{"mapped_address", link(addr("::ffff:198.19.0.1/128")), "the address ::ffff:198.19.0.1/128 of kubevpn0: it must be one address of [198.18.0.0/15 100.64.0.0/10 10.219.0.0/16 fd00::/8]"},

		{"default_route", link(route("0.0.0.0/0")), "the route 0.0.0.0/0: it is a default route (link kubevpn0)"},
		{"half_of_the_world", link(route("128.0.0.0/1")), "the route 128.0.0.0/1: it is too wide (link kubevpn0)"},
		{"default_route_6", link(route("::/0")), "the route ::/0: it is a default route (link kubevpn0)"},
		{"global_unicast_6", link(route("2000::/3")), "the route 2000::/3: it is too wide (link kubevpn0)"},
		{"loopback", link(route("127.0.0.0/8")), "the route 127.0.0.0/8: it is loopback (link kubevpn0)"},
		{"one_loopback", link(route("127.0.0.53/32")), "the route 127.0.0.53/32: it is loopback (link kubevpn0)"},
		{"metadata", link(route("169.254.169.254/32")), "the route 169.254.169.254/32: it is link-local (link kubevpn0)"},
		{"around_link_local", link(route("169.0.0.0/8")), "the route 169.0.0.0/8: it is not in private address space, and not in a network that the user allowed (link kubevpn0)"},
		{"multicast", link(route("239.0.0.0/8")), "the route 239.0.0.0/8: it is multicast (link kubevpn0)"},
		{"broadcast", link(route("255.255.255.255/32")), "the route 255.255.255.255/32: it is in 255.255.255.255/32, a special-purpose network (link kubevpn0)"},
		{"unspecified", link(route("0.0.0.0/32")), "the route 0.0.0.0/32: it is in 0.0.0.0/8, a special-purpose network (link kubevpn0)"},
		{"loopback_6", link(route("::1/128")), "the route ::1/128: it is loopback (link kubevpn0)"},
		{"link_local_6", link(route("fe80::/16")), "the route fe80::/16: it is link-local (link kubevpn0)"},
		{"multicast_6", link(route("ff02::/16")), "the route ff02::/16: it is multicast (link kubevpn0)"},
		{"mapped", link(route("::ffff:10.0.0.0/104")), "the route ::ffff:10.0.0.0/104: it is not a masked prefix (link kubevpn0)"},
		{"host_bits", link(route("10.96.1.0/16")), "the route 10.96.1.0/16: it is not a masked prefix (link kubevpn0)"},
		{"too_many_routes", link(func(l *api.Link) { l.Routes = many }), "4097 routes: at most 4096 (link kubevpn0)"},
		{"too_many_named", link(func(l *api.Link) { l.Named = many }), "4097 networks that the user allowed: at most 4096 (link kubevpn0)"},
		{"a public network that nobody allowed", link(route("140.82.121.0/24")), "the route 140.82.121.0/24: it is not in private address space, and not in a network that the user allowed (link kubevpn0)"},
		{"a named default route", link(func(l *api.Link) { l.Named = prefixes("0.0.0.0/0") }), "the network 0.0.0.0/0 that the user allowed: it is a default route (link kubevpn0)"},
		{"a special address in a named network", link(func(l *api.Link) { l.Named, l.Routes = prefixes("169.0.0.0/8"), prefixes("169.254.0.0/15") }),
			"the route 169.254.0.0/15: it is link-local (link kubevpn0)"},
		{"pods of GKE in class E", link(route("240.10.0.0/16")), ""},
		{"adjacent extra networks merged to a /7", link(func(l *api.Link) { l.Named, l.Routes = prefixes("10.0.0.0/8", "11.0.0.0/8"), prefixes("10.0.0.0/7") }), ""},

		{"resolver_elsewhere", link(func(l *api.Link) { l.Resolver = netip.MustParseAddr("8.8.8.8") }), fmt.Sprintf("the resolver 8.8.8.8 of kubevpn0: it must be in %v or routed into the link", routable.Inner())},
		{"resolver_is_the_link", link(func(l *api.Link) { l.Resolver = netip.MustParseAddr("198.19.0.1") }), "the resolver 198.19.0.1 of kubevpn0: it is the link's own address, so queries would not reach the link"},
		{"listens_on_the_lan", listen("192.168.1.1:53", ""), "the resolver 192.168.1.1:53: it must be a port on IPv4 loopback"},
		{"listens_everywhere", listen("", "[::]:53"), "the resolver [::]:53: it must be a port on IPv6 loopback"},
		{"listens_on_mapped", listen("", "[::ffff:127.0.0.1]:53"), "the resolver [::ffff:127.0.0.1]:53: it must be a port on IPv6 loopback"},
		{"listens_on_no_port", listen("127.0.0.1:0", ""), "the resolver 127.0.0.1:0: it must be a port on IPv4 loopback"},

		{"public_suffix", link(domain("com")), `a domain of kubevpn0: domain "com" is a public suffix: names below it belong to others`},
		{"everything", link(domain("")), `a domain of kubevpn0: domain "" has 0 bytes, not 1 to 253`},
		{"not_a_name", link(domain("a b")), `a domain of kubevpn0: domain "a b" has ' ' in the wrong place`},
		{"too_many_domains", link(func(l *api.Link) { l.MatchDomains = strings.Split(strings.Repeat("a.b,", 513), ",") }), "515 domains of kubevpn0: the limit is 512"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := ""
			if err := check(tt.state, nil); err != nil {
				got = strings.TrimPrefix(err.Error(), "the root helper refuses ")
				if e := api.AsError(err); e.Code != api.ExitNetwork {
					t.Errorf("exit code %d", e.Code)
				}
			}
			if want := strings.ReplaceAll(tt.want, "kubevpn0", device()); got != want {
				t.Errorf("got  %s\nwant %s", got, want)
			}
		})
	}
}

func TestLinkNamesAreThoseOfTheSystem(t *testing.T) {
	for goos, names := range map[string]map[string]bool{
		"linux":   {"kubevpn0": true, "kubevpn63": true, "utun3": false, "kubevpn%d": false},
		"windows": {"kubevpn0": true, "utun3": false},
		"darwin":  {"utun": true, "utun3": true, "kubevpn0": false, "en0": false, "utun3\n": false, "utun123456": false},
	} {
		pattern, rule := linkNames(goos)
		for name, want := range names {
			if got := pattern.MatchString(name); got != want {
				t.Errorf("%s: %q is %v, but names must be %s", goos, name, got, rule)
			}
		}
	}
}
