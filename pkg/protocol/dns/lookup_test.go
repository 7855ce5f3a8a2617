package dns_test

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"testing"

	mdns "github.com/miekg/dns"

	"kubevpn/pkg/protocol/dns"
)

// records answers with the addresses of names, and NXDOMAIN for others.
type records map[string][]string

func (r records) ServeDNS(_ context.Context, q *mdns.Msg) (*mdns.Msg, error) {
	reply := new(mdns.Msg).SetReply(q)
	asked := q.Question[0]
	addrs, ok := r[asked.Name]
	if !ok {
		reply.Rcode = mdns.RcodeNameError
	}
	for _, text := range addrs {
		a := netip.MustParseAddr(text)
		header := mdns.RR_Header{Name: asked.Name, Rrtype: asked.Qtype, Class: mdns.ClassINET, Ttl: 1}
		switch {
		case asked.Qtype == mdns.TypeA && a.Is4():
			reply.Answer = append(reply.Answer, &mdns.A{Hdr: header, A: a.AsSlice()})
		case asked.Qtype == mdns.TypeAAAA && a.Is6():
			reply.Answer = append(reply.Answer, &mdns.AAAA{Hdr: header, AAAA: a.AsSlice()})
		}
	}
	return reply, nil
}

// failing answers every query with an error.
type failing struct{ error }

func (f failing) ServeDNS(context.Context, *mdns.Msg) (*mdns.Msg, error) { return nil, f.error }

func TestLookupAsksWhereANameBelongs(t *testing.T) {
	index := new(dns.Index)
	index.Apply(true, map[string][]string{"default": {"web"}, "corp": {"git"}}, nil)
	r := dns.New(dns.Config{Outside: records{"www.example.com.": {"192.0.2.1"}, "web.": {"192.0.2.2"}}})
	err := r.SetZones([]dns.Zone{{Domain: "cluster.local", Services: index, Cluster: records{
		"web.default.svc.cluster.local.": {"fd00::80", "10.96.0.80"}, "git.corp.svc.cluster.local.": {"10.96.0.90"},
		"www.example.com.": {"10.0.0.1"}, "empty.default.svc.cluster.local.": nil,
	}}})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string][]string{
		"web": {"10.96.0.80", "fd00::80"}, "web.default.svc.cluster.local.": {"10.96.0.80", "fd00::80"},
		"www.example.com": {"192.0.2.1"},
		"git.corp":        {"10.96.0.90"}, // unknown outside
		"missing.svc":     nil, "missing.example.com": nil, "empty.default.svc": nil,
	} {
		got, err := r.Lookup(t.Context(), name)
		var text []string
		for _, a := range got {
			text = append(text, a.String())
		}
		var missing *net.DNSError
		if !slices.Equal(text, want) || (len(want) == 0) != (errors.As(err, &missing) && missing.IsNotFound) {
			t.Errorf("%s: %v, %v; want %v", name, text, err, want)
		}
	}
}

// Two clusters have the same names. The first one answers for them, unless the name ends with an alias.
func TestAliasAlwaysMeansItsCluster(t *testing.T) {
	zone := func(alias, web string) dns.Zone {
		index := new(dns.Index)
		index.Apply(true, map[string][]string{"default": {"web"}, "billing": {"web"}, "staging": {"db"}}, nil)
		return dns.Zone{Name: alias, Alias: alias, Domain: "cluster.local", Services: index, Cluster: records{
			"web.default.svc.cluster.local.": {web}, "web.billing.svc.cluster.local.": {web}, "pod-0.web.billing.svc.cluster.local.": {web},
			"new.billing.svc.cluster.local.": {web}, "db.staging.svc.cluster.local.": {"10.0.0.9"},
			"10-0-0-1.billing.pod.cluster.local.": {web},
		}}
	}
	r := dns.New(dns.Config{Outside: records{"web.shop.example.": {"192.0.2.1"}, "example.": {"192.0.2.2"}, "production.": {"192.0.2.3"}}})
	if err := r.SetZones([]dns.Zone{zone("staging", "10.0.0.1"), zone("Production", "10.0.0.2")}); err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"web.billing": "10.0.0.1", "web.billing.svc.cluster.local": "10.0.0.1",
		"web.billing.production": "10.0.0.2", "WEB.Billing.Production.": "10.0.0.2", "web.billing.staging": "10.0.0.1",
		"web.billing.svc.production": "10.0.0.2", "pod-0.web.billing.production": "10.0.0.2", "web.production": "10.0.0.2",
		"new.billing.production":          "10.0.0.2", // which no list has yet
		"10-0-0-1.billing.pod.production": "10.0.0.2",
		"missing.billing.production":      "", "production": "192.0.2.3", "web.shop.example": "192.0.2.1",
		"db.staging": "10.0.0.9", // a namespace of both clusters
	} {
		got, err := r.Lookup(t.Context(), name)
		var missing *net.DNSError
		if text := strings.Trim(fmt.Sprint(got), "[]"); text != want || (want == "") != (errors.As(err, &missing) && missing.IsNotFound) {
			t.Errorf("%s: %s, %v; want %q", name, text, err, want)
		}
		q := new(mdns.Msg).SetQuestion(mdns.Fqdn(name), mdns.TypeA)
		reply, err := r.ServeDNS(t.Context(), q)
		if err != nil {
			t.Fatal(err)
		}
		// Programs get the name back that they have asked for: another resolver would follow an alias to the first cluster.
		if strings.HasSuffix(strings.ToLower(name), "production") && want != "" &&
			(len(reply.Answer) != 1 || reply.Answer[0].Header().Name != mdns.Fqdn(name)) {
			t.Errorf("%s: %v", name, reply)
		}
	}
}

// Whoever may write an EndpointSlice can give a name of the cluster any address.
func TestLookupDropsAddressesThatTheClusterDoesNotRoute(t *testing.T) {
	index := new(dns.Index)
	index.Apply(true, map[string][]string{"default": {"web", "evil", "both"}, "corp": {"git"}}, nil)
	r := dns.New(dns.Config{
		Outside: records{"www.example.com.": {"192.168.1.7"}},
		Routed:  func(a netip.Addr) bool { return netip.MustParsePrefix("10.96.0.0/12").Contains(a) },
	})
	err := r.SetZones([]dns.Zone{{Domain: "cluster.local", Services: index, Cluster: records{
		"web.default.svc.cluster.local.": {"10.96.0.80"}, "evil.default.svc.cluster.local.": {"192.168.1.7", "2001:db8::7"},
		"both.default.svc.cluster.local.": {"192.168.1.7", "10.96.0.81"}, "git.corp.svc.cluster.local.": {"192.168.1.7"},
	}}})
	if err != nil {
		t.Fatal(err)
	}
	for name, want := range map[string]string{
		"web": "[10.96.0.80]", "both": "[10.96.0.81]", "both.default": "[10.96.0.81]",
		"evil": "[]", "evil.default.svc": "[]", "evil.default.svc.cluster.local": "[]", "git.corp": "[]",
		"www.example.com": "[192.168.1.7]", // as without the proxy
	} {
		got, err := r.Lookup(t.Context(), name)
		if fmt.Sprint(got) != want || (len(got) == 0) != (err != nil && strings.Contains(err.Error(), "192.168.1.7, which is not routed")) {
			t.Errorf("%s: %v, %v; want %v", name, got, err, want)
		}
	}
}

func TestLookupReportsAFailure(t *testing.T) {
	r := dns.New(dns.Config{Outside: failing{errors.New("the network is down")}})
	var failed *net.DNSError
	if _, err := r.Lookup(t.Context(), "www.example.com"); !errors.As(err, &failed) || failed.IsNotFound ||
		failed.Err != "the network is down" {
		t.Errorf("%v", err)
	}
}

func TestSystemAnswersWithAddressesOfThisMachine(t *testing.T) {
	r := dns.New(dns.Config{Outside: dns.System{}})
	if got, err := r.Lookup(t.Context(), "localhost"); err != nil || !got[0].IsLoopback() {
		t.Errorf("localhost: %v, %v", got, err)
	}
}
