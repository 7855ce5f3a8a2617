package connection

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	mdns "github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/host/route"
)

// mappingsOf parses CLUSTER=LOCAL, separated by spaces.
func mappingsOf(s string) (out packet.Mappings) {
	for m := range strings.FieldsSeq(s) {
		cluster, local, _ := strings.Cut(m, "=")
		out = append(out, packet.Mapping{Cluster: netip.MustParsePrefix(cluster), Local: netip.MustParsePrefix(local)})
	}
	return out
}

// What overlaps a local network gets other addresses on this machine, and nothing else does.
func TestOverlapsAreMapped(t *testing.T) {
	for _, tt := range []struct {
		name     string
		in       networks
		mappings string
		link     string // routes of the link
		overlaps int
	}{
		{
			name:     "the office equals the pod network",
			in:       networks{Cluster: stated("10.244.0.0/16 10.96.0.0/16"), Overlaps: lan("10.244.0.0/16")},
			mappings: "10.244.0.0/16=198.18.0.0/16", link: "10.96.0.0/16 198.18.0.0/16",
		},
		{
			name:     "the office is wider",
			in:       networks{Cluster: stated("10.244.0.0/16"), Overlaps: lan("10.0.0.0/8")},
			mappings: "10.244.0.0/16=198.18.0.0/16", link: "198.18.0.0/16",
		},
		{
			name:     "only the part that overlaps",
			in:       networks{Cluster: stated("10.0.0.0/8"), Overlaps: lan("10.0.3.0/24 10.0.3.7/32")},
			mappings: "10.0.3.0/24=198.18.0.0/24",
			link: "10.0.0.0/23 10.0.2.0/24 10.0.4.0/22 10.0.8.0/21 10.0.16.0/20 10.0.32.0/19 10.0.64.0/18 10.0.128.0/17 10.1.0.0/16 " +
				"10.2.0.0/15 10.4.0.0/14 10.8.0.0/13 10.16.0.0/12 10.32.0.0/11 10.64.0.0/10 10.128.0.0/9 198.18.0.0/24",
		},
		{
			name:     "two families",
			in:       networks{Cluster: stated("10.244.0.0/16 fd00:244::/56"), Overlaps: lan("10.244.1.0/24 fd00:244:0:1::/64")},
			mappings: "10.244.1.0/24=198.18.0.0/24 fd00:244:0:1::/64=fd6b:7670::/64",
			link: "10.244.0.0/24 10.244.2.0/23 10.244.4.0/22 10.244.8.0/21 10.244.16.0/20 10.244.32.0/19 10.244.64.0/18 10.244.128.0/17 198.18.0.0/24 " +
				"fd00:244::/64 fd00:244:0:2::/63 fd00:244:0:4::/62 fd00:244:0:8::/61 fd00:244:0:10::/60 fd00:244:0:20::/59 fd00:244:0:40::/58 fd00:244:0:80::/57 fd6b:7670::/64",
		},
		{
			name: "no place that something else has",
			in: networks{Cluster: stated("10.244.0.0/16 198.18.0.0/24"), Taken: prefixes("198.19.0.0/16"),
				Overlaps: lan("10.244.0.0/16 100.64.0.0/11"), Exclude: prefixes("100.96.0.0/12")},
			mappings: "10.244.0.0/16=100.112.0.0/16", link: "100.112.0.0/16 198.18.0.0/24",
		},
		{
			name:     "a guess",
			in:       networks{Cluster: guessed("192.168.1.0/24"), Overlaps: lan("192.168.1.0/24")},
			mappings: "192.168.1.0/24=198.18.0.0/24", link: "198.18.0.0/24",
		},
		{
			name:     "--map, also without an overlap",
			in:       networks{Cluster: stated("10.244.0.0/16"), Map: mappingsOf("10.244.0.0/16=172.20.0.0/16 10.1.0.0/16=172.21.0.0/16")},
			mappings: "10.244.0.0/16=172.20.0.0/16", link: "172.20.0.0/16",
		},
		{
			name: "--map to a local network",
			in: networks{Cluster: stated("10.244.0.0/16"), Map: mappingsOf("10.244.0.0/16=172.20.0.0/16"),
				Overlaps: lan("172.20.1.0/24")},
			mappings: "10.244.0.0/16=172.20.0.0/16", link: "172.20.0.0/16", overlaps: 1,
		},
		{
			name: "mappings in use stay, also when nothing overlaps any more",
			in: networks{Cluster: stated("10.244.0.0/16"), Mapped: mappingsOf("10.244.1.0/24=198.18.7.0/24"),
				Overlaps: lan("10.244.2.0/24")},
			mappings: "10.244.1.0/24=198.18.7.0/24 10.244.2.0/24=198.18.6.0/24",
			link:     "10.244.0.0/24 10.244.3.0/24 10.244.4.0/22 10.244.8.0/21 10.244.16.0/20 10.244.32.0/19 10.244.64.0/18 10.244.128.0/17 198.18.6.0/23",
		},
		{
			name:     "no place is wide enough",
			in:       networks{Cluster: stated("10.0.0.0/8"), Overlaps: lan("10.0.0.0/8")},
			mappings: "", link: "10.0.0.0/8", overlaps: 1,
		},
		{
			name: "another user's kubevpn",
			in: networks{Cluster: stated("10.244.0.0/16 10.96.0.0/16"), Overlaps: lan("10.244.0.0/16"),
				Foreign: func(link string) bool { return link == "wlan0" }},
			link: "10.96.0.0/16 10.244.0.0/16", overlaps: 1,
		},
		{
			name: "in a pod of the cluster",
			in:   networks{Cluster: stated("10.244.0.0/23"), Overlaps: lan("10.244.0.0/24"), InPod: true},
			link: "10.244.1.0/24",
		},
		{
			name: "many parts of one network",
			in: networks{Cluster: stated("10.244.0.0/16"), Overlaps: lan(func() (s string) {
				for i := range 2 * maxMapped {
					s += fmt.Sprintf("10.244.%d.0/25 ", i)
				}
				return s
			}())},
			mappings: "10.244.0.0/16=198.18.0.0/16", link: "198.18.0.0/16",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			p, err := plan(tt.in)
			if err != nil {
				t.Fatal(err)
			}
			if got := mappingTexts(p.Mappings); got != tt.mappings {
				t.Errorf("mappings %q, want %q", got, tt.mappings)
			}
			if got := text(p.local(p.Routes)); got != tt.link {
				t.Errorf("routes of the link %q, want %q", got, tt.link)
			}
			if len(p.Overlaps) != tt.overlaps {
				t.Errorf("overlaps %v, want %d", p.Overlaps, tt.overlaps)
			}
		})
	}
}

func mappingTexts(ms packet.Mappings) string {
	var out []string
	for _, m := range ms {
		out = append(out, m.String())
	}
	return strings.Join(out, " ")
}

// A host that a name of the cluster leads to is reached through the cluster, although this machine has a neighbour with
// its address.
func TestHostsAreMapped(t *testing.T) {
	in := networks{Cluster: stated("10.96.0.0/16"), Hosts: addrs("192.168.1.7 192.168.1.8"), Overlaps: lan("192.168.1.0/24")}
	p, err := plan(in)
	if err != nil {
		t.Fatal(err)
	}
	if got, want := mappingTexts(p.Mappings), "192.168.1.7/32=198.18.0.0/32 192.168.1.8/32=198.18.0.1/32"; got != want {
		t.Errorf("mappings %q, want %q", got, want)
	}
	if got, want := text(p.local(p.Routes)), "10.96.0.0/16 198.18.0.0/31"; got != want {
		t.Errorf("routes of the link %q, want %q", got, want)
	}
	in.Hosts = nil
	for i := range maxMapped + 1 {
		in.Hosts = append(in.Hosts, netip.AddrFrom4([4]byte{192, 168, 1, byte(2 * i)}))
	}
	if p, err = plan(in); err != nil {
		t.Fatal(err)
	}
	if left := len(p.Withheld); left != 1 || len(p.Overlaps) > 0 || len(p.Routes) != maxMapped+1 {
		t.Errorf("%d hosts are withheld, overlaps %v, %d routes", left, p.Overlaps, len(p.Routes))
	}
}

// handlerFunc answers queries.
type handlerFunc func(q *mdns.Msg) *mdns.Msg

func (f handlerFunc) ServeDNS(_ context.Context, q *mdns.Msg) (*mdns.Msg, error) { return f(q), nil }

// checkMapped fails the test if the routes of the link are not those of the plan with other addresses, or hide a local
// network without saying so.
func checkMapped(t *testing.T, in networks, got planned) {
	t.Helper()
	link := got.local(got.Routes)
	if err := routable.Check(link, got.Named); err != nil {
		t.Fatalf("the helper refuses %v", err)
	}
	for _, m := range got.Mappings {
		if m.Cluster.Bits() != m.Local.Bits() || m.Cluster.Addr().Is4() != m.Local.Addr().Is4() ||
			slices.ContainsFunc(got.Routes, m.Local.Overlaps) || slices.ContainsFunc(in.Exclude, m.Local.Overlaps) {
			t.Errorf("mapping %v of %v", m, got.Routes)
		}
	}
	found, err := in.Overlaps(link)
	if err != nil {
		t.Fatal(err)
	}
	for _, o := range found {
		if !slices.ContainsFunc(got.Overlaps, func(told route.Overlap) bool { return told.Other == o.Other }) {
			t.Errorf("a local network is hidden: %v", o)
		}
	}
}

// Names resolve to mapped addresses, and mapped addresses to names.
func TestAnswersHaveMappedAddresses(t *testing.T) {
	mappings := mappingsOf("10.0.3.0/24=198.18.0.0/24 fd00:244::/64=fd6b:7670::/64")
	rr := func(s string) mdns.RR {
		r, err := mdns.NewRR(s)
		if err != nil {
			t.Fatal(err)
		}
		return r
	}
	for _, tt := range []struct{ name, question, answers, extra, asked, want, wantExtra string }{
		{
			name: "address", question: "web.shop.svc.cluster.local. A", asked: "web.shop.svc.cluster.local.",
			answers: "web.shop.svc.cluster.local. 30 IN A 10.0.3.4|web.shop.svc.cluster.local. 30 IN A 10.0.4.4",
			want:    "web.shop.svc.cluster.local. 30 IN A 198.18.0.4|web.shop.svc.cluster.local. 30 IN A 10.0.4.4",
		},
		{
			name: "address of IPv6", question: "web. AAAA", asked: "web.",
			answers: "web. 5 IN AAAA fd00:244::1:2", want: "web. 5 IN AAAA fd6b:7670::1:2",
		},
		{
			name: "service with glue", question: "_http._tcp.web. SRV", asked: "_http._tcp.web.",
			answers: "_http._tcp.web. 30 IN SRV 0 100 80 a.web.", extra: "a.web. 30 IN A 10.0.3.9",
			want: "_http._tcp.web. 30 IN SRV 0 100 80 a.web.", wantExtra: "a.web. 30 IN A 198.18.0.9",
		},
		{
			name: "hint", question: "web. HTTPS", asked: "web.",
			answers: `web. 30 IN HTTPS 1 . alpn="h2" ipv4hint="10.0.3.4,10.0.4.4"`, want: `web. 30 IN HTTPS 1 . alpn="h2" ipv4hint="198.18.0.4,10.0.4.4"`,
		},
		{
			name: "name of a mapped address", question: "4.0.18.198.in-addr.arpa. PTR", asked: "4.3.0.10.in-addr.arpa.",
			answers: "4.3.0.10.in-addr.arpa. 30 IN PTR web.shop.svc.cluster.local.", want: "4.0.18.198.in-addr.arpa. 30 IN PTR web.shop.svc.cluster.local.",
		},
		{
			name: "name of a true address", question: "4.3.0.10.in-addr.arpa. PTR", asked: "4.3.0.10.in-addr.arpa.",
			answers: "4.3.0.10.in-addr.arpa. 30 IN PTR web.shop.svc.cluster.local.", want: "4.3.0.10.in-addr.arpa. 30 IN PTR web.shop.svc.cluster.local.",
		},
	} {
		t.Run(tt.name, func(t *testing.T) {
			name, kind, _ := strings.Cut(tt.question, " ")
			q := new(mdns.Msg)
			q.SetQuestion(name, mdns.StringToType[kind])
			answer := new(mdns.Msg).SetReply(q)
			answer.Question[0].Name = tt.asked
			for _, s := range strings.Split(tt.answers, "|") {
				answer.Answer = append(answer.Answer, rr(s))
			}
			if tt.extra != "" {
				answer.Extra = append(answer.Extra, rr(tt.extra))
			}
			before := answer.String()
			in := new(appliedMappings)
			in.applied.Store(&mappings)
			n := &mappedNames{mappings: in, next: handlerFunc(func(q *mdns.Msg) *mdns.Msg {
				if q.Question[0].Name != tt.asked {
					t.Errorf("cluster DNS is asked for %s, want %s", q.Question[0].Name, tt.asked)
				}
				return answer
			})}
			got, err := n.ServeDNS(t.Context(), q)
			if err != nil {
				t.Fatal(err)
			}
			texts := func(list []mdns.RR) string {
				var out []string
				for _, r := range list {
					out = append(out, strings.ReplaceAll(r.String(), "\t", " "))
				}
				return strings.Join(out, "|")
			}
			if d := cmp.Diff([]string{tt.want, tt.wantExtra, name}, []string{texts(got.Answer), texts(got.Extra), got.Question[0].Name}); d != "" {
				t.Errorf("(-want +got):\n%s", d)
			}
			if answer.String() != before {
				t.Error("the answer of cluster DNS, which the cache holds, has changed")
			}
		})
	}
}

func TestNameMustBeALabel(t *testing.T) {
	for name, valid := range map[string]bool{"": true, "staging": true, "Team A": true, "com": false, "???": false} {
		cfg := *newTestConnection(t).cfg
		cfg.Request.Name = name
		if _, err := New(cfg); (err == nil) != valid || err != nil && api.AsError(err).Code != api.ExitUsage {
			t.Errorf("%q: %v", name, err)
		}
	}
}
