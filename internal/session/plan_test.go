package session

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
)

func prefixes(s string) (out []netip.Prefix) {
	for _, f := range strings.Fields(s) {
		out = append(out, netip.MustParsePrefix(f))
	}
	return out
}

func addrs(s string) (out []netip.Addr) {
	for _, f := range strings.Fields(s) {
		out = append(out, netip.MustParseAddr(f))
	}
	return out
}

func TestPlan(t *testing.T) {
	for _, tt := range []struct {
		name     string
		in       networks
		want     string
		warnings []string
	}{
		{
			name: "pods_and_services",
			in:   networks{Pods: prefixes("10.244.1.0/24 10.244.2.0/24"), Services: prefixes("10.96.0.0/16")},
			want: "10.96.0.0/16 10.244.1.0/24 10.244.2.0/24",
		},
		{
			name: "adjacent_prefixes_join",
			in:   networks{Pods: prefixes("10.244.0.0/24 10.244.1.0/24")},
			want: "10.244.0.0/23",
		},
		{
			name: "api_server_is_carved_out_not_dropped",
			in:   networks{Pods: prefixes("10.0.0.0/30"), Carrier: addrs("10.0.0.1")},
			want: "10.0.0.0/32 10.0.0.2/31",
		},
		{
			name: "api_server_as_mapped_address",
			in:   networks{Extra: prefixes("10.0.0.0/31"), Carrier: addrs("::ffff:10.0.0.1")},
			want: "10.0.0.0/32",
		},
		{
			name: "exclude_wins_over_extra",
			in:   networks{Extra: prefixes("10.1.0.0/16"), Exclude: prefixes("10.1.128.0/17")},
			want: "10.1.0.0/17",
		},
		{
			name: "dns_outside_the_service_network",
			in:   networks{Services: prefixes("10.96.0.0/16"), DNS: addrs("169.254.20.10 10.97.0.10")},
			want: "10.96.0.0/16 10.97.0.10/32",
			warnings: []string{
				"cluster DNS 169.254.20.10/32 is not routed: it is link-local",
			},
		},
		{
			name: "a_ClusterIP_outside_what_was_guessed",
			in:   networks{Services: prefixes("10.96.208.0/24"), VIPs: addrs("10.96.0.1 10.96.208.7")},
			want: "10.96.0.1/32 10.96.208.0/24",
		},
		{
			name: "resolver_survives_an_exclusion",
			in:   networks{Pods: prefixes("198.19.0.0/24"), Exclude: prefixes("198.19.0.0/24"), Own: addrs("198.19.0.53")},
			want: "198.19.0.53/32",
		},
		{
			name: "inner_networks",
			in:   networks{Pods: prefixes("10.244.1.0/24"), Inner: prefixes("198.19.0.0/16 fd6b:7670:6e00::/48"), Own: addrs("198.19.0.53")},
			want: "10.244.1.0/24 198.19.0.0/16",
		},
		{
			name: "inner_networks_of_a_cluster_with_IPv6",
			in:   networks{Services: prefixes("fd00:96::/112"), Inner: prefixes("198.19.0.0/16 fd6b:7670:6e00::/48")},
			want: "198.19.0.0/16 fd00:96::/112 fd6b:7670:6e00::/48",
		},
		{
			name: "dual_stack",
			in:   networks{Pods: prefixes("10.244.1.0/24 fd00:244:1::/64"), Services: prefixes("fd00:96::/112")},
			want: "10.244.1.0/24 fd00:96::/112 fd00:244:1::/64",
		},
		{
			name: "what_would_take_over_the_machine",
			in:   networks{Extra: prefixes("0.0.0.0/0 127.0.0.0/8 224.0.0.0/8 0.0.0.0/1 ::/0 2000::/3")},
			want: "",
			warnings: []string{
				"--extra-cidr 0.0.0.0/0 is not routed: it is a default route",
				"--extra-cidr 127.0.0.0/8 is not routed: it is loopback",
				"--extra-cidr 224.0.0.0/8 is not routed: it is multicast",
				"--extra-cidr 0.0.0.0/1 is not routed: it is too wide",
				"--extra-cidr ::/0 is not routed: it is a default route",
				"--extra-cidr 2000::/3 is not routed: it is too wide",
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			routes, warnings := plan(tt.in)
			var got []string
			for _, p := range routes {
				got = append(got, p.String())
			}
			if s := strings.Join(got, " "); s != tt.want {
				t.Errorf("routes: got %q, want %q", s, tt.want)
			}
			if d := cmp.Diff(tt.warnings, warnings); d != "" {
				t.Errorf("warnings (-want +got):\n%s", d)
			}
		})
	}
}

// What is asked for and not taken out again is routed, and nothing else.
func FuzzPlan(f *testing.F) {
	f.Add([]byte{10, 96, 0, 0}, 16, []byte{10, 96, 3, 4}, 30, []byte{10, 96, 3, 5}, []byte{10, 96, 3, 5})
	f.Add([]byte{10, 96, 0, 0}, 16, []byte{10, 96, 3, 4}, 30, []byte{10, 97, 3, 5}, []byte{10, 96, 3, 1})
	f.Add([]byte("\xfd0123456789abcdef"[:16]), 64, []byte("\xfd0123456789abcde0"[:16]), 120, []byte{10, 97, 3, 5}, []byte("\xfd0123456789abcde1"[:16]))
	f.Fuzz(func(t *testing.T, pods []byte, podBits int, exclude []byte, excludeBits int, carrier, probe []byte) {
		a, ok := netip.AddrFromSlice(pods)
		b, ok2 := netip.AddrFromSlice(exclude)
		c, ok3 := netip.AddrFromSlice(carrier)
		at, ok4 := netip.AddrFromSlice(probe)
		if !ok || !ok2 || !ok3 || !ok4 || a.Is4In6() || b.Is4In6() {
			return
		}
		in, out := netip.PrefixFrom(a, podBits), netip.PrefixFrom(b, excludeBits)
		if !in.IsValid() || !out.IsValid() || unroutable(in) != "" {
			return
		}
		routes, warnings := plan(networks{Pods: []netip.Prefix{in}, Exclude: []netip.Prefix{out}, Carrier: []netip.Addr{c}})
		if len(warnings) > 0 {
			t.Errorf("warnings %q", warnings)
		}
		routed := false
		for _, p := range routes {
			if p.Masked() != p {
				t.Errorf("%v is not masked", p)
			}
			routed = routed || p.Contains(at)
		}
		if want := in.Contains(at) && !out.Contains(at) && c.Unmap() != at; routed != want {
			t.Errorf("%v routed: %v, want %v, of %v without %v and %v: %v", at, routed, want, in, out, c, routes)
		}
	})
}

func TestReverseDomains(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"10.96.0.0/16", "96.10.in-addr.arpa"},
		{"10.244.0.0/23", "0.244.10.in-addr.arpa 1.244.10.in-addr.arpa"},
		{"10.97.0.10/32", "10.0.97.10.in-addr.arpa"},
		{"10.0.0.0/8", "10.in-addr.arpa"},
		{"255.255.255.255/32", "255.255.255.255.in-addr.arpa"},
		{"fd00:96::/112", "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.0.d.f.ip6.arpa"},
	} {
		if got := strings.Join(reverseDomains(prefixes(tt.in)), " "); got != tt.want {
			t.Errorf("reverseDomains(%s) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestAddressing(t *testing.T) {
	sameAddr, samePrefix := cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	lease := api.Lease{Addrs: addrs("198.19.4.9 fd6b:7670:6e00::4:9"), Networks: prefixes("198.19.0.0/16 fd6b:7670:6e00::/48"), Resolver: addrs("198.19.0.53")[0]}
	a, err := addressing{Device: "kubevpn3"}.leased(lease)
	if err != nil {
		t.Fatal(err)
	}
	want := addressing{Device: "kubevpn3", Laptop4: lease.Addrs[0], Laptop6: lease.Addrs[1], Resolver: lease.Resolver, Networks: lease.Networks}
	if d := cmp.Diff(want, a, sameAddr, samePrefix); d != "" {
		t.Errorf("(-want +got):\n%s", d)
	}
	for routes, want := range map[string]string{"10.244.0.0/16": "198.19.4.9/32", "fd00::/64": "198.19.4.9/32 fd6b:7670:6e00::4:9/128"} {
		l := a.link(1500, prefixes(routes), nil, nil)
		if d := cmp.Diff(prefixes(want), l.Addrs, samePrefix); d != "" {
			t.Errorf("with %s (-want +got):\n%s", routes, d)
		}
		if l.Name != "kubevpn3" || l.MTU != 1500 || l.Resolver != lease.Resolver {
			t.Errorf("got %+v", l)
		}
	}
	for name, none := range map[string]api.Lease{"nothing": {}, "ipv6_only": {Addrs: lease.Addrs[1:], Networks: lease.Networks[1:]}} {
		got, err := a.leased(none)
		if e := api.AsError(err); e == nil || e.Code != api.ExitClash {
			t.Errorf("%s: got %v", name, err)
		}
		if d := cmp.Diff(a, got, sameAddr, samePrefix); d != "" {
			t.Errorf("%s changed the addresses:\n%s", name, d)
		}
	}
}

func TestMatchDomains(t *testing.T) {
	many := func(n int, format string) (out []string) {
		for i := range n {
			out = append(out, fmt.Sprintf(format, i))
		}
		return out
	}
	for _, tt := range []struct {
		name                string
		reverse, namespaces []string
		want                []string
		left                int
	}{
		{
			name: "a_small_cluster", reverse: []string{"96.10.in-addr.arpa"}, namespaces: []string{"default", "shop"},
			want: []string{"cluster.local", "svc", "pod", "96.10.in-addr.arpa", "default", "shop"},
		},
		{
			name: "many_nodes_have_the_zone_above", reverse: append(many(200, "%d.244.10.in-addr.arpa"), "96.10.in-addr.arpa", "0.0.d.f.ip6.arpa"),
			want: []string{"cluster.local", "svc", "pod", "0.0.d.f.ip6.arpa", "244.10.in-addr.arpa", "96.10.in-addr.arpa"},
		},
		{
			name: "anywhere", reverse: many(200, "%d.in-addr.arpa"),
			want: []string{"cluster.local", "svc", "pod", "in-addr.arpa"},
		},
		{
			name: "many_namespaces", namespaces: many(300, "ns%d"),
			want: append([]string{"cluster.local", "svc", "pod"}, many(247, "ns%d")...), left: 53,
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, left := matchDomains("cluster.local", tt.reverse, tt.namespaces)
			if d := cmp.Diff(tt.want, got); d != "" || left != tt.left {
				t.Errorf("%d left out, want %d; (-want +got):\n%s", left, tt.left, d)
			}
		})
	}
}
