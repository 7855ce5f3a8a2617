package dns

import (
	"context"
	"fmt"
	"testing"

	"github.com/miekg/dns"
)

func benchZones(b *testing.B) zones {
	index := clusterServices()
	many := map[string][]string{}
	for i := range 10000 {
		ns := fmt.Sprintf("ns-%d", i%100)
		many[ns] = append(many[ns], fmt.Sprintf("service-%d", i))
	}
	index.Apply(false, many, nil)
	answer := new(dns.Msg).SetReply(newQuery("web.default.svc.cluster.local", dns.TypeA))
	answer.Answer = []dns.RR{rr(b, "web.default.svc.cluster.local. 30 IN A 10.96.0.10")}
	cluster := handlerFunc(func(_ context.Context, q *dns.Msg) (*dns.Msg, error) {
		m := *answer
		m.Id = q.Id
		return &m, nil
	})
	z, err := newZone(Zone{Domain: "cluster.local", Services: index, Reverse: clusterPrefixes, Cluster: cluster})
	if err != nil {
		b.Fatal(err)
	}
	return zones{z}
}

func BenchmarkRoute(b *testing.B) {
	zs := benchZones(b)
	for _, name := range []string{"www.google.com", "web", "service-17.ns-17", "web.default.svc.cluster.local", "4.3.2.1.in-addr.arpa"} {
		b.Run(name, func(b *testing.B) {
			q, err := newQuery(name, dns.TypeA).Pack()
			if err != nil {
				b.Fatal(err)
			}
			b.ReportAllocs()
			for b.Loop() {
				parsed, err := parseQuery(q)
				if err != nil {
					b.Fatal(err)
				}
				zs.route(parsed)
			}
		})
	}
}

// BenchmarkHandle answers a cluster's name from a cluster that takes no time.
func BenchmarkHandle(b *testing.B) {
	r := New(Config{Logger: quiet()})
	zs := benchZones(b)
	r.current.Store(&zs)
	q, err := newQuery("web", dns.TypeA).Pack()
	if err != nil {
		b.Fatal(err)
	}
	ctx := context.Background()
	b.ReportAllocs()
	for b.Loop() {
		if len(r.handle(ctx, "udp", q, nil)) < 50 {
			b.Fatal("no answer")
		}
	}
}

// BenchmarkServe measures queries over loopback: "cluster" is answered by a cluster that takes no time, "upstream" is
// forwarded to a server on loopback, "direct" asks that server itself.
func BenchmarkServe(b *testing.B) {
	upstream := newFakeServer(b, ".", outsideZone)
	upstream.setAnswer(func(w dns.ResponseWriter, q *dns.Msg) bool {
		return w.WriteMsg(new(dns.Msg).SetReply(q)) == nil
	})
	r, addr := newResolver(b, upstream.addr)
	zs := benchZones(b)
	r.current.Store(&zs)
	for _, bench := range []struct {
		name string
		addr string
		q    *dns.Msg
	}{
		{"cluster", addr.String(), newQuery("web", dns.TypeA)},
		{"upstream", addr.String(), newQuery("printer", dns.TypeA)},
		{"direct", upstream.addr.String(), newQuery("printer", dns.TypeA)},
	} {
		b.Run(bench.name, func(b *testing.B) {
			b.ReportAllocs()
			b.SetParallelism(16)
			b.RunParallel(func(pb *testing.PB) {
				c, err := dns.Dial("udp", bench.addr)
				if err != nil {
					b.Error(err)
					return
				}
				defer c.Close()
				for pb.Next() {
					if err := c.WriteMsg(bench.q); err != nil {
						b.Error(err)
					}
					if _, err := c.ReadMsg(); err != nil {
						b.Error(err)
					}
				}
			})
			b.ReportMetric(float64(b.N)/b.Elapsed().Seconds(), "queries/s")
		})
	}
}
