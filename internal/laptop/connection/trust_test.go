package connection

import (
	"context"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/protocol/dns"
)

func TestLeaseOutsideTheInnerNetworksIsRejected(t *testing.T) {
	good := api.Lease{
		Addrs: addrs("198.19.4.9 fd6b:7670:6e00::4:9"), Networks: prefixes("198.19.0.0/16 fd6b:7670:6e00::/48"), Resolver: netip.MustParseAddr("198.19.0.53"),
	}
	if _, err := leased(good); err != nil {
		t.Fatalf("a lease as managers give it: %v", err)
	}
	for _, tt := range []struct {
		name string
		edit func(*api.Lease)
	}{
		{"a public resolver", func(l *api.Lease) { l.Resolver = netip.MustParseAddr("203.0.113.5") }},
		{"a resolver of another inner network", func(l *api.Lease) { l.Resolver = netip.MustParseAddr("198.18.0.53") }},
		{"a resolver of IPv6", func(l *api.Lease) { l.Resolver = netip.MustParseAddr("fd6b:7670:6e00::53") }},
		{"the laptop's own address as resolver", func(l *api.Lease) { l.Resolver = l.Addrs[0] }},
		{"a mapped resolver", func(l *api.Lease) { l.Resolver = netip.MustParseAddr("::ffff:198.19.0.53") }},
		{"a public address", func(l *api.Lease) { l.Addrs[0] = netip.MustParseAddr("203.0.113.5") }},
		{"an address of the laptop's LAN", func(l *api.Lease) { l.Addrs[0] = netip.MustParseAddr("192.168.1.1") }},
		{"a public IPv6 address", func(l *api.Lease) { l.Addrs[1] = netip.MustParseAddr("2001:db8::1") }},
		{"two IPv4 addresses", func(l *api.Lease) { l.Addrs[1] = netip.MustParseAddr("198.19.4.10") }},
		{"a public network", func(l *api.Lease) { *l = lease("203.0.113.9", "203.0.113.0/24", "203.0.113.53") }},
		{"a private network that is no inner one", func(l *api.Lease) { *l = lease("192.168.1.9", "192.168.1.0/24", "192.168.1.53") }},
		{"a network wider than the inner space", func(l *api.Lease) { *l = lease("100.64.0.9", "100.0.0.0/8", "100.64.0.53") }},
		{"all of the shared address space", func(l *api.Lease) { *l = lease("100.64.1.9", "100.64.0.0/10", "100.64.0.53") }},
		{"all unique local addresses", func(l *api.Lease) { l.Networks[1] = netip.MustParsePrefix("fd00::/8") }},
		{"a network that is not masked", func(l *api.Lease) { l.Networks[0] = netip.MustParsePrefix("198.19.4.0/16") }},
		{"no network", func(l *api.Lease) { l.Networks = nil }},
	} {
		t.Run(tt.name, func(t *testing.T) {
			l := api.Lease{Addrs: slices.Clone(good.Addrs), Networks: slices.Clone(good.Networks), Resolver: good.Resolver}
			tt.edit(&l)
			if e := api.AsError(func() error { _, err := leased(l); return err }()); e == nil || e.Code != api.ExitIncompatible || e.Hint == "" {
				t.Errorf("got %+v, want exit code %d with a hint", e, api.ExitIncompatible)
			}
		})
	}
}

func lease(addr, network, resolver string) api.Lease {
	return api.Lease{Addrs: addrs(addr), Networks: prefixes(network), Resolver: netip.MustParseAddr(resolver)}
}

func TestInnerNetworksOutsideTheirSpaceAreDropped(t *testing.T) {
	s := newTestConnection(t)
	s.handshake.handle(api.ControlMessage{State: &api.ManagerState{InnerNetworks: prefixes("8.8.8.0/24 198.18.0.0/16 100.64.0.0/10")}})
	s.routes.learnInner()
	if slices.ContainsFunc(s.packets.steering.Load().inner, func(p netip.Prefix) bool { return p != netip.MustParsePrefix("198.18.0.0/16") }) {
		t.Errorf("routed: %v", s.packets.steering.Load().inner)
	}
	if w := strings.Join(s.Status().Warnings, "\n"); !strings.Contains(w, "8.8.8.0/24") || !strings.Contains(w, "100.64.0.0/10") {
		t.Errorf("warnings: %s", w)
	}
}

func TestResolverDoesNotOverrideExclusions(t *testing.T) {
	own := netip.MustParseAddr("198.19.0.53")
	for name, n := range map[string]networks{
		"--exclude-cidr": {Own: []netip.Addr{own}, Exclude: prefixes("198.19.0.0/24")},
		"API server":     {Own: []netip.Addr{own}, Path: []netip.Addr{own}},
	} {
		if p, err := plan(n); err != nil || len(p.Routes) > 0 {
			t.Errorf("%s: %v is routed all the same (%v)", name, p.Routes, err)
		}
	}
}

func TestExcludedNetworksAreNotLeased(t *testing.T) {
	s := newTestConnection(t)
	s.cfg.Request.ExcludeCIDRs = prefixes("198.18.0.0/15 10.0.0.0/24")
	avoid, err := s.handshake.taken()
	if err != nil || !slices.Contains(avoid, netip.MustParsePrefix("198.18.0.0/15")) {
		t.Errorf("the manager is asked to avoid %v (%v)", avoid, err)
	}
}

func TestDomainsOfTheInternetRequireConsent(t *testing.T) {
	for domain, want := range map[string]bool{
		"cluster.local": false, "k8s.internal": false, "lab": false, "corp.lan": false, "cluster.example": false,
		"com": true, "google.com": true, "k8s.example.com": true, "co.uk": true, "x.github.io": true,
		"foo.ck": true, "compute.amazonaws.com": true,
	} {
		if got := osdns.PublicDomain(domain); got != want {
			t.Errorf("PublicDomain(%q) = %v, want %v", domain, got, want)
		}
	}
}

func TestPublicDomainIsNotTakenWithoutConsent(t *testing.T) {
	s := newTestConnection(t)
	public := api.ManagerState{DNSDomain: "google.com", DNSServers: addrs("10.96.0.10")}
	_, err := s.handshake.accept(public)
	e := api.AsError(err)
	if e == nil || e.Code != api.ExitConsent || e.Needs == nil || e.Needs.Domain != "google.com" {
		t.Fatalf("got %+v, want exit code %d that needs google.com", e, api.ExitConsent)
	}
	s.cfg.Request.Consent.Domain = "google.com"
	if state, err := s.handshake.accept(public); err != nil || state.DNSDomain != "google.com" {
		t.Errorf("with consent: %v, %q", err, state.DNSDomain)
	}
	for _, none := range []string{"bad domain\n", "a..b", strings.Repeat("x.", 200) + "y"} {
		if state, err := s.handshake.accept(api.ManagerState{DNSDomain: none}); err != nil || state.DNSDomain != "" {
			t.Errorf("a domain that is none: %v, %q", err, state.DNSDomain)
		}
	}
}

func TestPublicDomainOfARunningConnectionIsAWarning(t *testing.T) {
	s := newTestConnection(t)
	n := &recording{}
	s.cfg.Network = n
	s.handshake.handle(api.ControlMessage{State: &api.ManagerState{DNSDomain: "cluster.local", DNSServers: addrs("10.96.0.10")}})
	s.greet("m-1")
	if err := s.routes.apply(t.Context(), planned{}); err != nil {
		t.Fatal(err)
	}
	s.handshake.handle(api.ControlMessage{State: &api.ManagerState{DNSDomain: "google.com", DNSServers: addrs("10.96.0.10")}})
	if err := s.routes.apply(t.Context(), planned{Routes: prefixes("10.0.0.0/24")}); err != nil {
		t.Fatal(err)
	}
	if n.zone == nil || n.zone.Domain != "cluster.local" {
		t.Errorf("the zone is %+v, want the old one", n.zone)
	}
	if slices.ContainsFunc(n.link.MatchDomains, func(d string) bool { return strings.Contains(d, "google") }) {
		t.Errorf("the link asks for %q", n.link.MatchDomains)
	}
	if w := strings.Join(s.Status().Warnings, "\n"); !strings.Contains(w, "google.com") {
		t.Errorf("warnings: %q", w)
	}
}

func TestZoneIsInstalledOnlyAfterTheLinkWasAccepted(t *testing.T) {
	s := newTestConnection(t)
	n := &recording{refuses: api.Errorf(api.ExitNetwork, "the root helper refuses it")}
	s.cfg.Network = n
	s.handshake.handle(api.ControlMessage{State: &api.ManagerState{DNSDomain: "cluster.local", DNSServers: addrs("10.96.0.10")}})
	if err := s.routes.apply(t.Context(), planned{Routes: prefixes("10.0.0.0/24")}); err == nil {
		t.Fatal("the refusal was lost")
	}
	if n.zone != nil {
		t.Errorf("names go to the cluster by a link that was refused: %+v", n.zone)
	}
	n.refuses = nil
	if err := s.routes.apply(t.Context(), planned{Routes: prefixes("10.0.0.0/24")}); err != nil || n.zone == nil {
		t.Errorf("once accepted: %v, %+v", err, n.zone)
	}
}

// recording is a Network that keeps what it was given last.
type recording struct {
	still
	refuses error
	link    api.Link
	zone    *dns.Zone
}

func (r *recording) SetLink(_ context.Context, l api.Link) (api.NetworkApplied, error) {
	if r.refuses == nil {
		r.link = l
	}
	return api.NetworkApplied{}, r.refuses
}

func (r *recording) SetZone(z *dns.Zone) error {
	r.zone = z
	return nil
}

func TestWarningsOfAManagerAreBounded(t *testing.T) {
	s := newTestConnection(t)
	for n := range 10 * maxWarnings {
		s.handshake.handle(api.ControlMessage{State: &api.ManagerState{DNSDomain: strings.Repeat("-", n%50+1) + " " + strings.Repeat("x", n/50)}})
	}
	if r := s.status.report.Load(); len(r.shown.Warnings) > maxWarnings || len(r.warned) > maxWarnings {
		t.Errorf("%d warnings are kept, %d remembered", len(r.shown.Warnings), len(r.warned))
	}
}

func TestNetworksOfClientDefaultsRequireConsent(t *testing.T) {
	for _, tt := range []struct {
		name    string
		origin  api.Origin
		extra   string
		consent string
		ask     string
	}{
		{name: "of the user", origin: api.OriginFlag, extra: "10.20.0.0/16"},
		{name: "of the cluster", origin: api.OriginCluster, extra: "10.20.0.0/16 10.30.0.0/16", ask: "10.20.0.0/16 10.30.0.0/16"},
		{name: "one is allowed", origin: api.OriginCluster, extra: "10.20.0.0/16 10.30.0.0/16", consent: "10.20.0.0/16", ask: "10.30.0.0/16"},
		{name: "a wider one is allowed", origin: api.OriginCluster, extra: "10.20.0.0/16", consent: "10.0.0.0/8"},
		{name: "a narrower one is allowed", origin: api.OriginCluster, extra: "10.20.0.0/16", consent: "10.20.0.0/24", ask: "10.20.0.0/16"},
		{name: "none", origin: api.OriginCluster},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r := api.ConnectRequest{
				ConnectSettings: api.ConnectSettings{ExtraCIDRs: prefixes(tt.extra)},
				Consent:         api.Consent{Networks: append(prefixes(tt.consent), netip.Prefix{})},
				Settings:        []api.Setting{{Key: "extraCIDRs", Origin: tt.origin, Source: "ConfigMap kubevpn/kubevpn-client-defaults"}},
			}
			err := checkDefaults(&r)
			if tt.ask == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			e := api.AsError(err)
			if e == nil || e.Code != api.ExitConsent || e.Needs == nil || !slices.Equal(e.Needs.Networks, prefixes(tt.ask)) ||
				!strings.Contains(e.Message, "ConfigMap kubevpn/kubevpn-client-defaults") || !strings.Contains(e.Hint, "--extra-cidr ''") {
				t.Fatalf("got %+v, want a question about %s", e, tt.ask)
			}
			r.Consent = r.Consent.With(*e.Needs)
			if err := checkDefaults(&r); err != nil {
				t.Errorf("asked again: %v", err)
			}
		})
	}
}

func TestDomainsOfClientDefaultsRequireConsent(t *testing.T) {
	r := api.ConnectRequest{
		ConnectSettings: api.ConnectSettings{ExtraDomains: []string{"corp.test", "git.example.com"}},
		Consent:         api.Consent{ExtraDomains: []string{"corp.test"}},
		Settings:        []api.Setting{{Key: "extraDomains", Origin: api.OriginCluster, Source: "ConfigMap kubevpn/kubevpn-client-defaults"}},
	}
	e := api.AsError(checkDefaults(&r))
	if e == nil || e.Code != api.ExitConsent || e.Needs == nil || !slices.Equal(e.Needs.ExtraDomains, []string{"git.example.com"}) ||
		!strings.Contains(e.Message, "git.example.com (ConfigMap kubevpn/kubevpn-client-defaults)") || !strings.Contains(e.Hint, "--extra-domain ''") {
		t.Fatalf("got %+v, want a question about git.example.com", e)
	}
	r.Consent = r.Consent.With(*e.Needs)
	if err := checkDefaults(&r); err != nil {
		t.Errorf("asked again: %v", err)
	}
	r.Consent, r.Settings[0].Origin = api.Consent{}, api.OriginFile
	if err := checkDefaults(&r); err != nil {
		t.Errorf("a domain of the user: %v", err)
	}
}

// taking is a Network on which earlier connections have domains.
type taking struct {
	still
	domains []string
}

func (n *taking) DomainTaken(domain string) bool { return slices.Contains(n.domains, domain) }

func TestDomainsThatContradictAreRejected(t *testing.T) {
	for name, tt := range map[string]struct {
		extra, exclude, taken string
		code                  api.ExitCode
		says                  string
	}{
		"none":                          {},
		"ordinary ones":                 {extra: "corp.test", exclude: "mail.corp.test", taken: "other.test"},
		"the cluster's domain is below": {extra: "test"},
		"the cluster's domain excluded": {exclude: "k8s.test", code: api.ExitUsage, says: "k8s.test cannot be excluded: the cluster's own domain is k8s.test"},
		"a part of it excluded":         {exclude: "svc.k8s.test", code: api.ExitUsage, says: "svc.k8s.test cannot be excluded"},
		"excluded with all around it":   {exclude: "test", code: api.ExitUsage, says: "test cannot be excluded"},
		"the cluster's domain":          {extra: "k8s.test", code: api.ExitUsage, says: "k8s.test is no extra domain"},
		"a part of it":                  {extra: "svc.k8s.test", code: api.ExitUsage, says: "svc.k8s.test is no extra domain"},
		"another connection has it":     {extra: "corp.test", taken: "corp.test", code: api.ExitOverlap, says: "another connected cluster answers names under corp.test"},
		"another connection has a part": {extra: "corp.test", taken: "lab.corp.test"},
	} {
		t.Run(name, func(t *testing.T) {
			s := newTestConnection(t)
			s.cfg.Network = &taking{domains: strings.Fields(tt.taken)}
			s.cfg.Request.ExtraDomains, s.cfg.Request.ExcludeDomains = strings.Fields(tt.extra), strings.Fields(tt.exclude)
			s.cfg.Request.Settings = []api.Setting{{Key: "extraDomains", Source: "--extra-domain"}, {Key: "excludeDomains", Source: "my file"}}
			s.view.Update(func(v *view) { v.state.DNSDomain = "k8s.test" })
			err := s.checkDomains()
			if tt.code == api.ExitOK {
				if err != nil {
					t.Error(err)
				}
				return
			}
			if e := api.AsError(err); e == nil || e.Code != tt.code || !strings.HasPrefix(e.Message, tt.says) || !strings.Contains(e.Hint, "is set by") {
				t.Errorf("got %+v, want exit code %d and %q", e, tt.code, tt.says)
			}
		})
	}
}

func TestZoneHasTheDomains(t *testing.T) {
	s := newTestConnection(t)
	n := &recording{}
	s.cfg.Network = n
	s.cfg.Request.ExtraDomains, s.cfg.Request.ExcludeDomains = []string{"corp.test"}, []string{"mail.corp.test", "shop"}
	s.names.apply(fromManager, api.NameDelta{Reset: true, Add: map[string][]string{"shop": {"web"}, "billing": {"web"}}})
	s.handshake.handle(api.ControlMessage{State: &api.ManagerState{DNSDomain: "cluster.local", DNSServers: addrs("10.96.0.10")}})
	if err := s.routes.apply(t.Context(), planned{Routes: prefixes("10.0.0.0/24")}); err != nil {
		t.Fatal(err)
	}
	if n.zone == nil || !slices.Equal(n.zone.Extra, []string{"corp.test"}) || len(n.zone.Exclude) != 2 {
		t.Errorf("zone %+v", n.zone)
	}
	if want := []string{"cluster.local", "corp.test", "svc", "pod", "billing"}; !slices.Equal(n.link.MatchDomains, want) {
		t.Errorf("match domains %q, want %q", n.link.MatchDomains, want)
	}
}
