package connection

import (
	"fmt"
	"math/rand/v2"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"go4.org/netipx"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/route"
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

// stated and guessed are networks of a cluster.
func stated(s string) []client.CIDR  { return cidrs(s, client.FromNodes) }
func guessed(s string) []client.CIDR { return cidrs(s, client.FromPods) }

func cidrs(s string, source client.Source) (out []client.CIDR) {
	for _, p := range prefixes(s) {
		out = append(out, client.CIDR{Prefix: p, Source: source})
	}
	return out
}

// lan is a machine that is attached to these networks.
func lan(s string) func([]netip.Prefix) ([]route.Overlap, error) {
	local := prefixes(s)
	return func(ours []netip.Prefix) (found []route.Overlap, err error) {
		for _, o := range ours {
			for _, l := range local {
				if o.Overlaps(l) {
					found = append(found, route.Overlap{Kind: route.OverlapConnected, Prefix: o, Other: l, Link: "wlan0"})
				}
			}
		}
		return found, nil
	}
}

func text(list []netip.Prefix) string {
	var out []string
	for _, p := range list {
		out = append(out, p.String())
	}
	return strings.Join(out, " ")
}

func TestPlanRoutesOnlyPermittedNetworks(t *testing.T) {
	for _, tt := range []struct {
		name     string
		in       networks
		want     string
		warnings []string
	}{
		{
			name: "pods_and_services",
			in:   networks{Cluster: stated("10.244.1.0/24 10.244.2.0/24 10.96.0.0/16")},
			want: "10.96.0.0/16 10.244.1.0/24 10.244.2.0/24",
		},
		{
			name: "adjacent_prefixes_join",
			in:   networks{Cluster: slices.Concat(stated("10.244.0.0/24"), guessed("10.244.1.0/24"))},
			want: "10.244.0.0/23",
		},
		{
			name: "api_server_is_carved_out_not_dropped",
			in:   networks{Cluster: stated("10.0.0.0/30"), Path: addrs("10.0.0.1")},
			want: "10.0.0.0/32 10.0.0.2/31",
		},
		{
			name: "api_server_as_mapped_address",
			in:   networks{Extra: prefixes("10.0.0.0/31"), Path: addrs("::ffff:10.0.0.1")},
			want: "10.0.0.0/32",
		},
		{
			name: "exclude_wins_over_extra",
			in:   networks{Extra: prefixes("10.1.0.0/16"), Exclude: prefixes("10.1.128.0/17")},
			want: "10.1.0.0/17",
		},
		{
			name: "dns_outside_the_service_network",
			in:   networks{Cluster: stated("10.96.0.0/16"), DNS: addrs("169.254.20.10 10.97.0.10 8.8.8.8")},
			want: "10.96.0.0/16 10.97.0.10/32",
			warnings: []string{
				"169.254.20.10 (cluster DNS) is not routed: it is link-local",
				"8.8.8.8 (cluster DNS) is not routed: it is outside of private address space; --extra-cidr 8.8.8.8 routes it",
			},
		},
		{
			name: "a_ClusterIP_outside_what_was_guessed",
			in:   networks{Cluster: guessed("10.96.208.0/24"), VIPs: addrs("10.96.0.1 10.96.208.7")},
			want: "10.96.0.1/32 10.96.208.0/24",
		},
		{
			name: "resolver_without_its_network",
			in:   networks{Own: addrs("198.19.0.53")},
			want: "198.19.0.53/32",
		},
		{
			name: "a resolver that may not be routed",
			in:   networks{Own: addrs("203.0.113.5 10.0.0.1"), Path: addrs("10.0.0.1")},
		},
		{
			name: "inner_networks",
			in:   networks{Cluster: stated("10.244.1.0/24"), Inner: prefixes("198.19.0.0/16 fd6b:7670:6e00::/48"), Own: addrs("198.19.0.53")},
			want: "10.244.1.0/24 198.19.0.0/16",
		},
		{
			name: "inner_networks_of_a_cluster_with_IPv6",
			in:   networks{Cluster: stated("fd00:96::/112"), Inner: prefixes("198.19.0.0/16 fd6b:7670:6e00::/48")},
			want: "198.19.0.0/16 fd00:96::/112 fd6b:7670:6e00::/48",
		},
		{
			name: "dual_stack",
			in:   networks{Cluster: stated("10.244.1.0/24 fd00:244:1::/64 fd00:96::/112")},
			want: "10.244.1.0/24 fd00:96::/112 fd00:244:1::/64",
		},
		{
			name: "what_would_take_over_the_machine",
			in:   networks{Extra: prefixes("0.0.0.0/0 127.0.0.0/8 224.0.0.0/8 0.0.0.0/1 ::/0 2000::/3")},
			want: "",
			warnings: []string{
				"0.0.0.0/0 (--extra-cidr) is not routed: it is a default route",
				"127.0.0.0/8 (--extra-cidr) is not routed: it is loopback",
				"224.0.0.0/8 (--extra-cidr) is not routed: it is multicast",
				"0.0.0.0/1 (--extra-cidr) is not routed: it is too wide",
				"::/0 (--extra-cidr) is not routed: it is a default route",
				"2000::/3 (--extra-cidr) is not routed: it is too wide",
			},
		},
		{
			name: "public endpoints are not routed",
			in:   networks{Cluster: guessed("10.244.1.0/24 140.82.121.0/24 8.8.8.0/24")},
			want: "10.244.1.0/24",
			warnings: []string{
				"140.82.121.0/24 (guessed from pods' addresses) is not routed: it is outside of private address space; --extra-cidr 140.82.121.0/24 routes it",
				"8.8.8.0/24 (guessed from pods' addresses) is not routed: it is outside of private address space; --extra-cidr 8.8.8.0/24 routes it",
			},
		},
		{
			name: "a special network does not make the state fail",
			in:   networks{Cluster: slices.Concat(stated("10.244.1.0/24 0.0.0.0/24"), guessed("255.255.255.0/24 ::/64"))},
			want: "10.244.1.0/24 255.255.255.0/25 255.255.255.128/26 255.255.255.192/27 255.255.255.224/28 255.255.255.240/29 255.255.255.248/30 " +
				"255.255.255.252/31 255.255.255.254/32",
			warnings: []string{
				"0.0.0.0/24 (the nodes' pod CIDRs) is not routed: it is in 0.0.0.0/8, a special-purpose network",
				"::/64 (guessed from pods' addresses) is not routed: it is in ::/8, a special-purpose network",
			},
		},
		{
			name: "pods of GKE in class E and its Services",
			in:   networks{Cluster: slices.Concat(stated("240.10.0.0/16 34.118.224.0/20"), guessed("241.0.1.0/24"))},
			want: "34.118.224.0/20 240.10.0.0/16 241.0.1.0/24",
		},
		{
			name: "extra networks merge to a /7",
			in:   networks{Extra: prefixes("10.0.0.0/8 11.0.0.0/8")},
			want: "10.0.0.0/7",
		},
		{
			name: "an extra network without its special part",
			in:   networks{Extra: prefixes("169.252.0.0/14")},
			want: "169.252.0.0/15 169.255.0.0/16",
		},
		{
			name: "in_a_pod_of_the_cluster",
			in: networks{Cluster: slices.Concat(stated("10.244.0.0/22 10.96.0.0/16"), guessed("10.245.0.0/24")), InPod: true,
				Overlaps: lan("10.244.2.0/24 10.245.0.0/16")},
			want: "10.96.0.0/16 10.244.0.0/23 10.244.3.0/24",
			warnings: []string{
				"10.244.2.0/24 is reached without the tunnel: this machine is a pod in that network",
				"10.245.0.0/24 is reached without the tunnel: this machine is a pod in that network",
			},
		},
		{
			name: "a guess that meets a local network shrinks",
			in:   networks{NoMap: true, Cluster: slices.Concat(stated("10.244.1.0/24"), guessed("192.168.1.0/24 10.0.5.0/24")), Overlaps: lan("192.168.1.0/24 10.0.5.128/25")},
			want: "10.0.5.0/25 10.244.1.0/24",
			warnings: []string{
				"10.0.5.128/25 is not routed: it is guessed from addresses seen in the cluster, and 10.0.5.0/24 overlaps the network 10.0.5.128/25 of wlan0",
				"192.168.1.0/24 is not routed: it is guessed from addresses seen in the cluster, and 192.168.1.0/24 overlaps the network 192.168.1.0/24 of wlan0",
			},
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			got, err := plan(tt.in)
			if err != nil {
				t.Fatal(err)
			}
			if s := text(got.Routes); s != tt.want {
				t.Errorf("routes: got %q, want %q", s, tt.want)
			}
			if d := cmp.Diff(tt.warnings, got.Warnings, cmpopts.EquateEmpty()); d != "" {
				t.Errorf("warnings (-want +got):\n%s", d)
			}
			if len(got.Ask) > 0 || len(got.Overlaps) > 0 {
				t.Errorf("asks for %v, overlaps %v", got.Ask, got.Overlaps)
			}
		})
	}
}

// Stated networks outside of private address space are routed only after the user allows them.
func TestPublicNetworksRequireConsent(t *testing.T) {
	in := networks{Cluster: slices.Concat(stated("10.244.1.0/24 203.0.113.0/24 2001:db8:1::/64"), guessed("198.51.100.0/24"))}
	for _, tt := range []struct{ name, consent, exclude, routes, ask string }{
		{name: "not allowed", routes: "10.244.1.0/24", ask: "203.0.113.0/24 2001:db8:1::/64"},
		{name: "one allowed", consent: "203.0.113.0/24", routes: "10.244.1.0/24 203.0.113.0/24", ask: "2001:db8:1::/64"},
		{name: "a wider one allowed", consent: "203.0.113.0/24 2001:db8::/32", routes: "10.244.1.0/24 203.0.113.0/24 2001:db8:1::/64"},
		{name: "excluded", exclude: "203.0.113.0/24 2001:db8::/32", routes: "10.244.1.0/24"},
		{name: "excluded in part", exclude: "203.0.113.128/25 2001:db8::/32", routes: "10.244.1.0/24", ask: "203.0.113.0/24"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			in := in
			in.Consent, in.Exclude = prefixes(tt.consent), prefixes(tt.exclude)
			got, err := plan(in)
			if err != nil {
				t.Fatal(err)
			}
			var ask []netip.Prefix
			for _, c := range got.Ask {
				ask = append(ask, c.Prefix)
			}
			if text(got.Routes) != tt.routes || text(ask) != tt.ask {
				t.Errorf("routes %q, want %q; asks for %q, want %q", text(got.Routes), tt.routes, text(ask), tt.ask)
			}
		})
	}
}

func TestConsentErrorNamesNetworksAndSource(t *testing.T) {
	e := consentError(append(stated("203.0.113.0/24"), cidrs("2001:db8::/112", client.FromServiceCIDR)...))
	if want := "the cluster states networks outside of private address space, which are routed only if you allow it: " +
		"203.0.113.0/24 (the nodes' pod CIDRs), 2001:db8::/112 (ServiceCIDR objects)"; e.Code != api.ExitConsent || e.Message != want {
		t.Errorf("got %d %s", e.Code, e.Message)
	}
	if !strings.Contains(e.Hint, "--yes") || !strings.Contains(e.Hint, "--exclude-cidr 203.0.113.0/24 --exclude-cidr 2001:db8::/112") {
		t.Errorf("hint %q", e.Hint)
	}
	if e.Needs == nil || text(e.Needs.Networks) != "203.0.113.0/24 2001:db8::/112" {
		t.Errorf("needs %+v", e.Needs)
	}
	if many := consentError(stated(strings.Repeat("203.0.113.0/24 ", 20))); !strings.HasSuffix(many.Message, " and 12 more") {
		t.Errorf("got %s", many.Message)
	}
}

func TestStatedNetworkThatOverlapsLocalOneEndsConnect(t *testing.T) {
	got, err := plan(networks{NoMap: true, Cluster: slices.Concat(stated("10.244.0.0/24"), guessed("10.244.1.0/24")), Overlaps: lan("10.244.0.0/16")})
	if err != nil {
		t.Fatal(err)
	}
	if len(got.Overlaps) != 1 || overlapError(got.Overlaps).Code != api.ExitOverlap {
		t.Errorf("overlaps %v", got.Overlaps)
	}
}

// A manager that may not list nodes sends single addresses, possibly more than a device can have routes.
func TestManyAddressesAreJoined(t *testing.T) {
	var in networks
	for i := range 5000 {
		a := netip.AddrFrom4([4]byte{10, byte(8 + i%3), byte(i >> 8), byte(i)})
		in.Cluster = append(in.Cluster, client.CIDR{Prefix: netip.PrefixFrom(a, 32), Source: client.FromPods})
	}
	in.Cluster = append(in.Cluster, stated("172.20.0.0/16")...)
	// Each lies between two addresses that would be joined first.
	in.Path, in.Exclude, in.Overlaps = addrs("10.8.3.1"), prefixes("10.9.5.9/32"), lan("10.10.7.5/32 10.128.0.0/9")
	got, err := plan(in)
	if err != nil {
		t.Fatal(err)
	}
	checkPlanned(t, in, got)
	var routes netipx.IPSetBuilder
	for _, r := range got.Routes {
		routes.AddPrefix(r)
	}
	routed := routable.Set(&routes)
	for _, c := range in.Cluster {
		local, err := in.Overlaps([]netip.Prefix{c.Prefix})
		if err != nil {
			t.Fatal(err)
		}
		if !routed.ContainsPrefix(c.Prefix) && len(local) == 0 && !c.Prefix.Contains(in.Path[0]) && !c.Prefix.Overlaps(in.Exclude[0]) {
			t.Errorf("%v is not routed", c.Prefix)
		}
	}
}

// Prefixes that cannot be joined without covering a forbidden address are dropped, guesses first.
func TestTooManyNetworksAreDropped(t *testing.T) {
	in := networks{Cluster: stated("172.20.0.7/32")}
	for i := range 5000 {
		a := netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i << 1), 0})
		in.Cluster = append(in.Cluster, client.CIDR{Prefix: netip.PrefixFrom(a, 24), Source: client.FromPods})
		in.Exclude = append(in.Exclude, netip.PrefixFrom(netip.AddrFrom4([4]byte{10, byte(i >> 7), byte(i<<1) + 1, 0}), 24))
	}
	got, err := plan(in)
	if err != nil {
		t.Fatal(err)
	}
	checkPlanned(t, in, got)
	if !slices.Contains(got.Routes, netip.MustParsePrefix("172.20.0.7/32")) || len(got.Warnings) != 1 {
		t.Errorf("a stated network is dropped; warnings %q", got.Warnings)
	}
}

// A laptop that avoids all other inner networks gets an address in a private one, which others must not route.
func TestInnerNetworksOfOthersAreNotPrivate(t *testing.T) {
	s := newTestConnection(t)
	s.view.Update(func(v *view) {
		v.lease.Networks = prefixes("198.19.0.0/16")
		v.state.InnerNetworks = prefixes("10.0.0.0/8 10.219.0.0/16 198.18.0.0/16 198.19.0.0/16 203.0.113.0/24 fd4e:19c6:8b7a::/48")
	})
	s.routes.learnInner()
	if got, want := text(s.routes.known().Inner), "198.18.0.0/16 198.19.0.0/16 fd4e:19c6:8b7a::/48"; got != want {
		t.Errorf("inner networks %q, want %q", got, want)
	}
	s.view.Update(func(v *view) { v.lease.Networks = prefixes("10.219.0.0/16") })
	s.routes.learnInner()
	if got, want := text(s.routes.known().Inner), "10.219.0.0/16 198.18.0.0/16 198.19.0.0/16 fd4e:19c6:8b7a::/48"; got != want {
		t.Errorf("inner networks %q, want %q", got, want)
	}
}

// A warning about other laptops goes with the last of them, and comes again with another.
func TestWarningsAboutLaptopsFollowTheirNetworks(t *testing.T) {
	s := newTestConnection(t)
	for _, networks := range []string{"203.0.113.0/24", "198.18.0.0/16", "203.0.113.0/24 198.18.0.0/16"} {
		s.view.Update(func(v *view) { v.state.InnerNetworks = prefixes(networks) })
		s.routes.learnInner()
		got, want := s.status.report.Load().shown.Warnings, strings.Contains(networks, "203.0.113.0/24")
		if want != (len(got) == 1 && strings.Contains(got[0], "203.0.113.0/24 are not reached")) || !want && len(got) > 0 {
			t.Errorf("%s: warnings %q", networks, got)
		}
	}
}

func TestWarningsAreBounded(t *testing.T) {
	s := newTestConnection(t)
	for i := range 10 * maxWarnings {
		s.status.warn(fmt.Sprint("network ", i))
	}
	if n := len(s.Status().Warnings); n != maxWarnings {
		t.Errorf("%d warnings", n)
	}
}

func TestUnstatedNetworksAreGuesses(t *testing.T) {
	got := networksOf(api.ManagerState{
		PodCIDRs: prefixes("10.244.0.0/23"), StatedPodCIDRs: append(prefixes("10.244.0.0/24"), netip.Prefix{}),
		ServiceCIDRs: append(prefixes("10.96.0.0/24"), netip.Prefix{}), Ignored: prefixes("8.8.8.0/24"),
	})
	want := slices.Concat(stated("10.244.0.0/24"), guessed("10.244.1.0/24"), cidrs("10.96.0.0/24", client.FromServices), guessed("8.8.8.0/24"))
	if !slices.Equal(got, want) {
		t.Errorf("got %v, want %v", got, want)
	}
}

// checkPlanned fails the test if the routes are too many or hold an address that must not be routed.
func checkPlanned(t *testing.T, in networks, got planned) {
	t.Helper()
	if err := routable.Check(got.Routes, got.Named); err != nil {
		t.Fatalf("the helper refuses %v", err)
	}
	space := routable.Space(slices.Concat(in.Extra, in.Consent)...)
	for _, r := range got.Routes {
		if !space.ContainsPrefix(r) || r != r.Masked() {
			t.Errorf("%v may not be routed", r)
		}
		if i := slices.IndexFunc(in.Path, func(a netip.Addr) bool { return r.Contains(a.Unmap()) }); i >= 0 {
			t.Errorf("%v holds %v, which the connection needs", r, in.Path[i])
		}
		if i := slices.IndexFunc(in.Exclude, r.Overlaps); i >= 0 {
			t.Errorf("%v overlaps %v, which is excluded", r, in.Exclude[i])
		}
	}
	if in.Overlaps == nil {
		return
	}
	if !in.NoMap {
		checkMapped(t, in, got)
		return
	}
	found, err := in.Overlaps(got.Routes)
	if err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(fmt.Sprint(got.Overlaps), fmt.Sprint(found)); d != "" {
		t.Errorf("overlaps (-told +found):\n%s", d)
	}
	for _, c := range found { // with a guess alone there is none
		at := narrower(c.Prefix, c.Other)
		wanted := slices.ContainsFunc(in.Extra, at.Overlaps) || slices.ContainsFunc(in.Cluster, func(n client.CIDR) bool {
			return !n.Source.Guessed() && at.Overlaps(n.Prefix)
		}) || slices.ContainsFunc(slices.Concat(in.DNS, in.VIPs, in.Own), at.Contains) ||
			slices.ContainsFunc(in.Inner, at.Overlaps) // learnInner has looked at them
		if !wanted {
			t.Errorf("a guess hides a local network: %v", c)
		}
	}
}

// random returns a prefix that is private, public or special.
func random(r *rand.Rand) netip.Prefix {
	bases := prefixes("10.0.0.0/8 10.0.0.0/12 172.16.0.0/12 192.168.0.0/16 100.64.0.0/10 198.18.0.0/15 240.0.0.0/4 255.255.0.0/16 34.118.224.0/19 " +
		"8.0.0.0/7 203.0.113.0/24 0.0.0.0/6 127.0.0.0/8 169.254.0.0/15 224.0.0.0/3 fd00::/8 fc00::/7 2001:db8::/32 fe80::/9 ff00::/8 ::/8")
	base := bases[r.IntN(len(bases))]
	b := base.Addr().AsSlice()
	for i := base.Bits(); i < len(b)*8; i++ {
		if r.IntN(2) == 1 {
			b[i/8] |= 1 << (7 - i%8)
		}
	}
	a, _ := netip.AddrFromSlice(b)
	return netip.PrefixFrom(a, base.Bits()+r.IntN(a.BitLen()-base.Bits()+1)).Masked()
}

// For any input of the cluster and the user, the helper accepts the routes, and they cover no forbidden address.
func TestHelperAcceptsWhateverPlanReturns(t *testing.T) {
	r := rand.New(rand.NewPCG(1, 2))
	list := func(n int) (out []netip.Prefix) {
		for range r.IntN(n + 1) {
			out = append(out, random(r))
		}
		return out
	}
	sources := []client.Source{client.FromNodes, client.FromServiceCIDR, client.FromAnswer, client.FromServices, client.FromPods}
	for range 3000 {
		in := networks{Extra: list(2), Exclude: list(2), Consent: list(2), Inner: list(1), NoMap: r.IntN(2) == 0}
		for _, p := range list(6) {
			in.Cluster = append(in.Cluster, client.CIDR{Prefix: p, Source: sources[r.IntN(len(sources))]})
		}
		for _, to := range []*[]netip.Addr{&in.DNS, &in.VIPs, &in.Path, &in.Own, &in.Hosts} {
			for _, p := range list(2) {
				*to = append(*to, p.Addr())
			}
		}
		in.Overlaps = lan(text(list(3)))
		if r.IntN(3) == 0 { // what the attack needs: addresses of the routes themselves
			in.Path = append(in.Path, random(r).Addr())
		}
		got, err := plan(in)
		if err != nil {
			t.Fatal(err)
		}
		if checkPlanned(t, in, got); t.Failed() {
			t.Fatalf("of %+v", in)
		}
	}
}

// The plan routes exactly the networks that are included and not excluded.
func FuzzPlan(f *testing.F) {
	f.Add([]byte{10, 96, 0, 0}, 16, []byte{10, 96, 3, 4}, 30, []byte{10, 96, 3, 5}, []byte{10, 96, 3, 5})
	f.Add([]byte{10, 96, 0, 0}, 16, []byte{10, 96, 3, 4}, 30, []byte{10, 97, 3, 5}, []byte{10, 96, 3, 1})
	f.Add([]byte{8, 8, 8, 0}, 24, []byte{10, 96, 3, 4}, 30, []byte{10, 97, 3, 5}, []byte{8, 8, 8, 8})
	f.Add([]byte("\xfd0123456789abcdef"[:16]), 64, []byte("\xfd0123456789abcde0"[:16]), 120, []byte{10, 97, 3, 5}, []byte("\xfd0123456789abcde1"[:16]))
	f.Fuzz(func(t *testing.T, pods []byte, podBits int, exclude []byte, excludeBits int, leased, probe []byte) {
		a, ok := netip.AddrFromSlice(pods)
		b, ok2 := netip.AddrFromSlice(exclude)
		c, ok3 := netip.AddrFromSlice(leased)
		at, ok4 := netip.AddrFromSlice(probe)
		if !ok || !ok2 || !ok3 || !ok4 || a.Is4In6() || b.Is4In6() {
			return
		}
		in, out := netip.PrefixFrom(a, podBits), netip.PrefixFrom(b, excludeBits)
		if !in.IsValid() || !out.IsValid() || routable.Refuse(in) != "" {
			return
		}
		got, err := plan(networks{Cluster: []client.CIDR{{Prefix: in, Source: client.FromNodes}}, Exclude: []netip.Prefix{out}, Path: []netip.Addr{c}})
		if err != nil {
			t.Fatal(err)
		}
		if len(got.Ask) > 0 {
			if len(got.Routes) > 0 || routable.Space().ContainsPrefix(in) {
				t.Errorf("%v is asked for, and routed: %v", in, got.Routes)
			}
			return
		}
		routed := false
		for _, p := range got.Routes {
			if p.Masked() != p {
				t.Errorf("%v is not masked", p)
			}
			routed = routed || p.Contains(at)
		}
		if want := in.Contains(at) && routable.Space().Contains(at) && !out.Contains(at) && c.Unmap() != at; routed != want {
			t.Errorf("%v routed: %v, want %v, of %v without %v and %v: %v", at, routed, want, in, out, c, got.Routes)
		}
	})
}

func TestReverseDomainsCoverTheNetwork(t *testing.T) {
	for _, tt := range []struct{ in, want string }{
		{"10.96.0.0/16", "96.10.in-addr.arpa"},
		{"10.244.0.0/23", "0.244.10.in-addr.arpa 1.244.10.in-addr.arpa"},
		{"10.97.0.10/32", "10.0.97.10.in-addr.arpa"},
		{"10.0.0.0/8", "10.in-addr.arpa"},
		{"255.255.255.255/32", "255.255.255.255.in-addr.arpa"},
		{"fd00:96::/112", "0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.6.9.0.0.0.0.d.f.ip6.arpa"},
		{"::ffff:10.0.0.0/104", "a.0.f.f.f.f.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.ip6.arpa"},
	} {
		if got := strings.Join(reverseDomains(prefixes(tt.in)), " "); got != tt.want {
			t.Errorf("reverseDomains(%s) = %q, want %q", tt.in, got, tt.want)
		}
	}
}

func TestLeaseDeterminesAddresses(t *testing.T) {
	sameAddr, samePrefix := cmp.Comparer(func(a, b netip.Addr) bool { return a == b }), cmp.Comparer(func(a, b netip.Prefix) bool { return a == b })
	lease := api.Lease{Addrs: addrs("198.19.4.9 fd6b:7670:6e00::4:9"), Networks: prefixes("198.19.0.0/16 fd6b:7670:6e00::/48"), Resolver: addrs("198.19.0.53")[0]}
	sent := lease
	sent.Addrs = []netip.Addr{lease.Addrs[1], lease.Addrs[0]}
	for _, l := range []api.Lease{lease, sent} {
		got, err := leased(l)
		if err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(lease, got, sameAddr, samePrefix); d != "" {
			t.Errorf("(-want +got):\n%s", d)
		}
	}
	for routes, want := range map[string]string{"10.244.0.0/16": "198.19.4.9/32", "fd00::/64": "198.19.4.9/32 fd6b:7670:6e00::4:9/128"} {
		if d := cmp.Diff(prefixes(want), linkAddrs(lease, prefixes(routes)), samePrefix); d != "" {
			t.Errorf("with %s (-want +got):\n%s", routes, d)
		}
	}
	for name, none := range map[string]api.Lease{"nothing": {}, "ipv6_only": {Addrs: lease.Addrs[1:], Networks: lease.Networks[1:]}} {
		_, err := leased(none)
		if e := api.AsError(err); e == nil || e.Code != api.ExitOverlap {
			t.Errorf("%s: got %v", name, err)
		}
	}
}

func TestMatchDomainsAreBounded(t *testing.T) {
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
			got, left := matchDomains([]string{"cluster.local"}, tt.reverse, tt.namespaces)
			if d := cmp.Diff(tt.want, got); d != "" || left != tt.left {
				t.Errorf("%d left out, want %d; (-want +got):\n%s", left, tt.left, d)
			}
		})
	}
}

func TestHostsAreRoutedOnlyIfPermitted(t *testing.T) {
	in := networks{
		NoMap: true, Cluster: stated("10.96.0.0/16 10.244.1.0/24"), Consent: prefixes("203.0.113.0/24"), Exclude: prefixes("10.20.9.0/24"),
		Path: addrs("10.0.0.1"), Overlaps: lan("192.168.1.0/24 10.20.2.0/24"),
		Hosts: addrs("10.20.1.4 10.20.1.5 10.96.7.7 fd00:20::5 203.0.113.9 192.168.1.7 10.20.2.3 10.20.9.9 10.0.0.1 8.8.8.8 169.254.169.254 127.0.0.1"),
	}
	p, err := plan(in)
	if err != nil {
		t.Fatal(err)
	}
	if want := "10.20.1.4/32 10.20.1.5/32 10.96.0.0/16 10.244.1.0/24 203.0.113.9/32 fd00:20::5/128"; text(p.Routes) != want {
		t.Errorf("routes %s, want %s", text(p.Routes), want)
	}
	for address, want := range map[string]string{
		"10.20.1.4": "", "10.96.7.7": "", "203.0.113.9": "",
		"192.168.1.7":     "192.168.1.7/32 overlaps the network 192.168.1.0/24 of wlan0",
		"10.20.2.3":       "10.20.2.3/32 overlaps the network 10.20.2.0/24 of wlan0",
		"10.20.9.9":       "it is excluded",
		"10.0.0.1":        "the connection itself needs it outside of the tunnel",
		"8.8.8.8":         "it is outside of private address space; --extra-cidr 8.8.8.8 routes it",
		"169.254.169.254": "it is link-local",
		"127.0.0.1":       "it is loopback",
	} {
		if got, ok := p.Hosts[netip.MustParseAddr(address)]; !ok || got != want {
			t.Errorf("%s is not routed because %q, want %q", address, got, want)
		}
	}
	if len(p.Overlaps) > 0 || len(p.Ask) > 0 || len(p.Warnings) > 0 {
		t.Errorf("hosts cause %v, %v, %q", p.Overlaps, p.Ask, p.Warnings)
	}
	in.Cluster = nil
	for n := range routable.MaxRoutes {
		in.Cluster = append(in.Cluster, stated(fmt.Sprintf("10.%d.%d.%d/32", 64+n>>11, n>>3&255, n&7*32))...)
	}
	if p, err = plan(in); err != nil || len(p.Routes) != routable.MaxRoutes || p.Hosts[in.Hosts[0]] != "this connection has too many routes" {
		t.Errorf("%d routes, %q, %v", len(p.Routes), p.Hosts[in.Hosts[0]], err)
	}
}
