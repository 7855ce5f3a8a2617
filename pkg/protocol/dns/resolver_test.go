package dns

import (
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/miekg/dns"
)

func TestQueriesReachTheRightServer(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	for _, test := range []struct {
		name     string
		qtype    uint16
		want     string
		cluster  []string // the questions to cluster DNS
		upstream []string // the questions to the upstream
	}{
		{"web.default.svc.cluster.local", dns.TypeA,
			"NOERROR web.default.svc.cluster.local. A 10.96.0.10",
			[]string{"udp web.default.svc.cluster.local. A"}, nil},
		{"WeB.deFAult.SVC.cluster.LOCAL", dns.TypeA, // 0x20
			"NOERROR WeB.deFAult.SVC.cluster.LOCAL. A 10.96.0.10",
			[]string{"udp WeB.deFAult.SVC.cluster.LOCAL. A"}, nil},
		{"none.default.svc.cluster.local", dns.TypeA, "NXDOMAIN",
			[]string{"udp none.default.svc.cluster.local. A"}, nil},
		{"a.b.c.d.e.f.cluster.local", dns.TypeA, "NXDOMAIN",
			[]string{"udp a.b.c.d.e.f.cluster.local. A"}, nil},
		{"dns-version.cluster.local", dns.TypeTXT,
			"NOERROR dns-version.cluster.local. TXT \"1.1.0\"",
			[]string{"udp dns-version.cluster.local. TXT"}, nil},

		{"web", dns.TypeA,
			"NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10",
			[]string{"udp web.default.svc.cluster.local. A"}, nil},
		{"WEB", dns.TypeA,
			"NOERROR WEB. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10",
			[]string{"udp web.default.svc.cluster.local. A"}, nil},
		{"web", dns.TypeAAAA, // IPv4 only: no such data
			"NOERROR web. CNAME web.default.svc.cluster.local.",
			[]string{"udp web.default.svc.cluster.local. AAAA"}, nil},
		{"dual", dns.TypeAAAA,
			"NOERROR dual. CNAME dual.default.svc.cluster.local.; dual.default.svc.cluster.local. AAAA fd00:96::30",
			[]string{"udp dual.default.svc.cluster.local. AAAA"}, nil},
		{"web", dns.TypeHTTPS,
			"NOERROR web. CNAME web.default.svc.cluster.local.",
			[]string{"udp web.default.svc.cluster.local. HTTPS"}, nil},
		{"web", dns.TypeCNAME, "NOERROR web. CNAME web.default.svc.cluster.local.",
			[]string{"udp web.default.svc.cluster.local. CNAME"}, nil},
		{"web", dns.TypeANY,
			"NOERROR web. CNAME web.default.svc.cluster.local.; web.default.svc.cluster.local. A 10.96.0.10",
			[]string{"udp web.default.svc.cluster.local. ANY"}, nil},
		{"web", 65280, "NOERROR web. CNAME web.default.svc.cluster.local.", // private use
			[]string{"udp web.default.svc.cluster.local. TYPE65280"}, nil},
		{"web.billing", dns.TypeA,
			"NOERROR web.billing. CNAME web.billing.svc.cluster.local.; web.billing.svc.cluster.local. A 10.96.0.11",
			// billing is a Service of this namespace as well: a pod's search list tries its endpoints first.
			[]string{"udp web.billing.default.svc.cluster.local. A", "udp web.billing.svc.cluster.local. A"}, nil},
		{"web.billing.svc", dns.TypeA,
			"NOERROR web.billing.svc. CNAME web.billing.svc.cluster.local.; web.billing.svc.cluster.local. A 10.96.0.11",
			[]string{"udp web.billing.svc.cluster.local. A"}, nil},
		{"none.billing.svc", dns.TypeA, "NXDOMAIN", []string{"udp none.billing.svc.cluster.local. A"}, nil},
		{"anything.of.this.svc", dns.TypeA, "NXDOMAIN", []string{"udp anything.of.this.svc.cluster.local. A"}, nil},
		{"billing.svc", dns.TypeA, "NXDOMAIN", []string{"udp billing.svc.cluster.local. A"}, nil},
		{"db", dns.TypeA,
			"NOERROR db. CNAME db.default.svc.cluster.local.; db.default.svc.cluster.local. A 10.244.0.5; db.default.svc.cluster.local. A 10.244.0.6",
			[]string{"udp db.default.svc.cluster.local. A"}, nil},
		{"db-0.db", dns.TypeA,
			"NOERROR db-0.db. CNAME db-0.db.default.svc.cluster.local.; db-0.db.default.svc.cluster.local. A 10.244.0.5",
			[]string{"udp db-0.db.default.svc.cluster.local. A"}, nil},
		{"db-0.db.default", dns.TypeA,
			"NOERROR db-0.db.default. CNAME db-0.db.default.svc.cluster.local.; db-0.db.default.svc.cluster.local. A 10.244.0.5",
			[]string{"udp db-0.db.default.svc.cluster.local. A"}, nil},
		{"db-0.db.default.svc", dns.TypeA,
			"NOERROR db-0.db.default.svc. CNAME db-0.db.default.svc.cluster.local.; db-0.db.default.svc.cluster.local. A 10.244.0.5",
			[]string{"udp db-0.db.default.svc.cluster.local. A"}, nil},
		{"db-9.db", dns.TypeA, "NXDOMAIN", []string{"udp db-9.db.default.svc.cluster.local. A"}, nil},
		{"_http._tcp.web", dns.TypeSRV,
			"NOERROR _http._tcp.web. CNAME _http._tcp.web.default.svc.cluster.local.; _http._tcp.web.default.svc.cluster.local. SRV 0 100 80 web.default.svc.cluster.local.",
			[]string{"udp _http._tcp.web.default.svc.cluster.local. SRV"}, nil},
		{"_http._tcp.web.default", dns.TypeSRV,
			"NOERROR _http._tcp.web.default. CNAME _http._tcp.web.default.svc.cluster.local.; _http._tcp.web.default.svc.cluster.local. SRV 0 100 80 web.default.svc.cluster.local.",
			[]string{"udp _http._tcp.web.default.svc.cluster.local. SRV"}, nil},
		{"_http._tcp.web.billing.svc", dns.TypeSRV,
			"NOERROR _http._tcp.web.billing.svc. CNAME _http._tcp.web.billing.svc.cluster.local.; _http._tcp.web.billing.svc.cluster.local. SRV 0 100 80 web.billing.svc.cluster.local.",
			[]string{"udp _http._tcp.web.billing.svc.cluster.local. SRV"}, nil},
		{"10-244-0-5.default.pod", dns.TypeA,
			"NOERROR 10-244-0-5.default.pod. CNAME 10-244-0-5.default.pod.cluster.local.; 10-244-0-5.default.pod.cluster.local. A 10.244.0.5",
			[]string{"udp 10-244-0-5.default.pod.cluster.local. A"}, nil},
		{"stale", dns.TypeA, "NXDOMAIN", // the index still has a deleted Service: the name is the cluster's
			[]string{"udp stale.default.svc.cluster.local. A"}, nil},

		// Queries for outside names go upstream, and none enters the tunnel.
		{"www.google.com", dns.TypeA, "NOERROR www.google.com. A 192.0.2.2", nil, []string{"udp www.google.com. A"}},
		{"WwW.Google.Com", dns.TypeA, "NOERROR WwW.Google.Com. A 192.0.2.2", nil, []string{"udp WwW.Google.Com. A"}},
		{"web.dev", dns.TypeA, "NOERROR web.dev. A 192.0.2.3", nil, []string{"udp web.dev. A"}},
		{"web.dev.svc", dns.TypeA,
			"NOERROR web.dev.svc. CNAME web.dev.svc.cluster.local.; web.dev.svc.cluster.local. A 10.96.0.12",
			[]string{"udp web.dev.svc.cluster.local. A"}, nil},
		{"dev", dns.TypeNS, "NOERROR dev. NS ns.dev.", nil, []string{"udp dev. NS"}},
		{"dev", dns.TypeA,
			"NOERROR dev. CNAME dev.default.svc.cluster.local.; dev.default.svc.cluster.local. A 10.96.0.13",
			[]string{"udp dev.default.svc.cluster.local. A"}, nil},
		{"printer", dns.TypeA, "NOERROR printer. A 192.0.2.4", nil, []string{"udp printer. A"}},
		{"printer.lan", dns.TypeA, "NOERROR printer.lan. A 192.0.2.5", nil, []string{"udp printer.lan. A"}},
		{"wpad", dns.TypeA, "NXDOMAIN", nil, []string{"udp wpad. A"}},
		{"wpad.default", dns.TypeA, "NXDOMAIN", nil, []string{"udp wpad.default. A"}},
		{"wpad.default.svc", dns.TypeA,
			"NOERROR wpad.default.svc. CNAME wpad.default.svc.cluster.local.; wpad.default.svc.cluster.local. A 10.96.0.15",
			[]string{"udp wpad.default.svc.cluster.local. A"}, nil},
		{"localhost", dns.TypeA, "NXDOMAIN", nil, []string{"udp localhost. A"}},
		{"none.default", dns.TypeA, "NXDOMAIN", nil, []string{"udp none.default. A"}},
		{"xcluster.local", dns.TypeA, "NXDOMAIN", nil, []string{"udp xcluster.local. A"}},
		{`x\.cluster.local`, dns.TypeA, "NXDOMAIN", nil, []string{`udp x\.cluster.local. A`}},
		{`a\.b.web`, dns.TypeA, "NXDOMAIN", nil, []string{`udp a\.b.web. A`}},
		{".", dns.TypeNS, "NXDOMAIN", nil, []string{"udp . NS"}},

		// Reverse names.
		{"10.0.96.10.in-addr.arpa", dns.TypePTR,
			"NOERROR 10.0.96.10.in-addr.arpa. PTR web.default.svc.cluster.local.",
			[]string{"udp 10.0.96.10.in-addr.arpa. PTR"}, nil},
		{"99.0.244.10.in-addr.arpa", dns.TypePTR, "NXDOMAIN", []string{"udp 99.0.244.10.in-addr.arpa. PTR"}, nil},
		{"1.2.0.192.in-addr.arpa", dns.TypePTR, "NOERROR 1.2.0.192.in-addr.arpa. PTR cdn.example.net.", nil,
			[]string{"udp 1.2.0.192.in-addr.arpa. PTR"}},
		{"244.10.in-addr.arpa", dns.TypeSOA, "NXDOMAIN", []string{"udp 244.10.in-addr.arpa. SOA"}, nil},
		{"10.in-addr.arpa", dns.TypeSOA, "NXDOMAIN", nil, []string{"udp 10.in-addr.arpa. SOA"}},
		{"lb._dns-sd._udp.0.0.244.10.in-addr.arpa", dns.TypePTR, "NXDOMAIN",
			[]string{"udp lb._dns-sd._udp.0.0.244.10.in-addr.arpa. PTR"}, nil},
		{"6.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.4.4.2.f.ip6.arpa", dns.TypePTR,
			"NOERROR 6.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.4.4.2.f.ip6.arpa. PTR db-1.db.default.svc.cluster.local.",
			[]string{"udp 6.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.0.4.4.2.f.ip6.arpa. PTR"}, nil},

		// ExternalName Services.
		{"docs", dns.TypeA,
			"NOERROR docs. CNAME docs.default.svc.cluster.local.; docs.default.svc.cluster.local. CNAME www.example.com.; www.example.com. CNAME cdn.example.net.; cdn.example.net. A 192.0.2.1",
			[]string{"udp docs.default.svc.cluster.local. A"}, []string{"udp www.example.com. A"}},
		{"docs.default.svc.cluster.local", dns.TypeCNAME,
			"NOERROR docs.default.svc.cluster.local. CNAME www.example.com.",
			[]string{"udp docs.default.svc.cluster.local. CNAME"}, nil},
		{"alias.default", dns.TypeA,
			"NOERROR alias.default. CNAME alias.default.svc.cluster.local.; alias.default.svc.cluster.local. CNAME web.billing.svc.cluster.local.; web.billing.svc.cluster.local. A 10.96.0.11",
			[]string{"udp alias.default.svc.cluster.local. A"}, nil},
		{"loop", dns.TypeA, "SERVFAIL",
			[]string{"udp loop.default.svc.cluster.local. A"}, []string{"udp loop.example.com. A"}},
		{"partial", dns.TypeA, "NXDOMAIN partial. CNAME partial.default.svc.cluster.local.; partial.default.svc.cluster.local. CNAME web.billing.svc.",
			[]string{"udp partial.default.svc.cluster.local. A"}, nil},
		{"nowhere", dns.TypeA, "NXDOMAIN nowhere. CNAME nowhere.default.svc.cluster.local.; nowhere.default.svc.cluster.local. CNAME nothing.example.com.",
			[]string{"udp nowhere.default.svc.cluster.local. A"}, []string{"udp nothing.example.com. A"}},
	} {
		t.Run(strings.ReplaceAll(test.name, " ", "_")+"_"+dns.Type(test.qtype).String(), func(t *testing.T) {
			got := query(t, "udp", w.addr, newQuery(test.name, test.qtype))
			if diff := cmp.Diff(test.want, text(got)); diff != "" {
				t.Errorf("reply (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.cluster, w.cluster.got()); diff != "" {
				t.Errorf("cluster DNS was asked (-want +got):\n%s", diff)
			}
			if diff := cmp.Diff(test.upstream, w.upstream.got()); diff != "" {
				t.Errorf("the upstream was asked (-want +got):\n%s", diff)
			}
			if !got.RecursionAvailable && test.cluster != nil {
				t.Error("recursion is not available")
			}
		})
	}
}
