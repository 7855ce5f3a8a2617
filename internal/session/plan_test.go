package session

import (
	"fmt"
	"net/netip"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
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
			name: "resolver_survives_an_exclusion",
			in:   networks{Pods: prefixes("198.19.0.0/24"), Exclude: prefixes("198.19.0.0/24"), Own: addrs("198.19.0.53")},
			want: "198.19.0.53/32",
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
	a := addressingFor(3)
	l := a.link(1500, prefixes("10.244.0.0/16"), nil, nil)
	if got, want := l.Name, "kubevpn3"; got != want {
		t.Errorf("name %q, want %q", got, want)
	}
	if d := cmp.Diff(prefixes("198.19.3.1/32"), l.Addrs, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Error(d)
	}
	l = a.link(1500, prefixes("fd00::/64"), nil, nil)
	if d := cmp.Diff(prefixes("198.19.3.1/32 fd6b:7670:6e00:3::1/128"), l.Addrs, cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })); d != "" {
		t.Error(d)
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
