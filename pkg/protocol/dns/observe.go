package dns

import (
	"cmp"
	"context"
	"net/netip"
	"strings"
	"time"

	"github.com/miekg/dns"
)

// Observer learns of the queries that a Resolver has answered. Its methods are called concurrently and must not block.
type Observer interface {
	// Wants reports whether Observe should be called for a query that goes to a cluster, or outside. It is called for
	// each query, and nothing about the others is kept.
	Wants(outside bool) bool
	Observe(Query)
}

// The sources of an answer.
const (
	FromCluster    = "cluster"    // cluster DNS
	FromCache      = "cache"      // an earlier answer of cluster DNS
	FromStale      = "stale"      // an earlier answer after its TTL, because cluster DNS does not answer
	FromNameserver = "nameserver" // a nameserver outside of the clusters
	FromNobody     = "nobody"     // no server answered
)

// maxObserved limits Query.Answers.
const maxObserved = 8

// Query is a query that a Resolver has answered. Its texts come from clients and servers, so they may contain anything
// that a presentation format does; their lengths are limited.
type Query struct {
	Time    time.Time // when the query came
	Name    string    // as the client wrote it, but in lower case and without a final dot
	Type    string
	Network string         // "udp" or "tcp"
	From    string         // FromCluster, FromCache, FromStale, FromNameserver or FromNobody
	Server  netip.AddrPort // the server that answered; invalid if unknown, as for a cached answer
	Zone    string         // the Name of the Zone that was asked; empty: none
	Domain  string         // the zone's domain that contains the name, else its cluster domain; empty: none
	Rcode   string
	Answers []string // the first records: "A 10.96.0.80"
	Records int      // in the answer
	Took    time.Duration
}

// origin collects who answered a query. The goroutine of the query writes it. A nil *origin collects nothing.
type origin struct {
	from    string
	server  netip.AddrPort
	zone    *zone // the cluster that was asked; nil: none, or a nameserver outside afterwards
	outside bool  // a nameserver outside was asked last
}

func (o *origin) set(to origin) {
	if o != nil {
		*o = to
	}
}

func (o *origin) came(from string) {
	if o != nil {
		o.from = from
	}
}

func (o *origin) by(server netip.AddrPort) {
	if o != nil {
		o.server = server
	}
}

type originKey struct{}

// originOf returns the origin that the context of an observed query carries, or nil.
func originOf(ctx context.Context) *origin {
	o, _ := ctx.Value(originKey{}).(*origin)
	return o
}

// withoutOrigin returns a context for the target of an alias: the origin is that of the answer for the name itself.
func withoutOrigin(ctx context.Context) context.Context {
	if originOf(ctx) == nil {
		return ctx
	}
	return context.WithValue(ctx, originKey{}, (*origin)(nil))
}

// observe calls answer, and passes the query to the observer if it wants it.
func (r *Resolver) observe(ctx context.Context, a asked) []byte {
	inside, outside := len(a.rt.asks) > 0 && r.observer.Wants(false), r.observer.Wants(true)
	if !inside && !outside {
		return r.answer(ctx, a)
	}
	began, o := time.Now(), &origin{from: FromNobody}
	reply := r.answer(context.WithValue(ctx, originKey{}, o), a)
	if o.outside && !outside || !o.outside && !inside {
		return reply
	}
	q := Query{Time: began, Took: time.Since(began), Name: shownName(a.q.key), Type: dns.Type(a.q.qtype).String(),
		Network: a.network, From: o.from}
	if o.from == FromCluster || o.from == FromNameserver { // a cached answer comes from no server
		q.Server = o.server
	}
	if !o.outside {
		z := cmp.Or(o.zone, a.rt.asks[0].zone) // o.zone is nil if too many queries were in flight
		q.Zone, q.Domain = z.name, cmp.Or(z.domainOf(a.q.key), z.domain)
	}
	q.addReply(reply)
	r.observer.Observe(q)
	return reply
}

// shownName returns the name with a key.
func shownName(key string) string {
	return strings.ToValidUTF8(strings.ReplaceAll(key, "\xff", `\.`), "\uFFFD")
}

// addReply adds the code and the first records of a reply.
func (q *Query) addReply(reply []byte) {
	m := new(dns.Msg)
	if err := m.Unpack(reply); err != nil {
		q.Rcode = "malformed"
		return
	}
	q.Rcode, q.Records = dns.RcodeToString[m.Rcode], len(m.Answer)
	for _, rr := range m.Answer[:min(len(m.Answer), maxObserved)] {
		h := rr.Header()
		text := dns.Type(h.Rrtype).String() + " " + strings.TrimPrefix(rr.String(), h.String())
		q.Answers = append(q.Answers, clip(text))
	}
}
