package dns_test

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"slices"
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
