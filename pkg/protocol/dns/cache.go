package dns

import (
	"context"
	"math"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	lru "github.com/hashicorp/golang-lru/v2"
	"github.com/miekg/dns"
)

const (
	maxCached     = 1024    // answers
	maxCachedSize = 4 << 10 // bytes of an answer as a message
	maxForgotten  = 64      // Services; if more have changed at once, all answers are forgotten
	// maxStale is the time after its TTL for which the cache serves an answer, with staleTTL, while the cluster's DNS
	// gives none.
	maxStale = 30 * time.Second
	staleTTL = 1
)

// Cache keeps the answers of one cluster's DNS for their TTL (RFC 1035, RFC 2308), so that a repeated query costs no
// round trip. While the cluster's DNS gives no answer, it also serves answers that have expired, as RFC 8767 allows.
//
//	query ──▶ fresh answer ────────────────────────────────▶ the answer, with the rest of its TTL
//	     └──▶ interrupted, and expired for at most maxStale ─▶ the answer, with staleTTL
//	     └──▶ ask ── answer ──▶ keep it ────────────────────▶ the answer
//	              └─ error ───▶ expired for at most maxStale ▶ the answer, with staleTTL
//
// It is safe for concurrent use and starts no goroutine.
type Cache struct {
	next        Handler
	interrupted func() bool
	answers     *lru.Cache[queryKey, cachedAnswer]
	stale       atomic.Int64

	mu      sync.Mutex // held by Forget, and while an answer is added
	forgets int        // calls of Forget; an answer to an earlier query is not kept
}

// queryKey is equal for queries of one cluster with the same answer.
type queryKey struct {
	name          string // in lower case
	qtype, qclass uint16
	do, cd, rd    bool
}

type cachedAnswer struct {
	msg   *dns.Msg
	since time.Time
	ttl   time.Duration
}

// NewCache returns a cache for next. interrupted reports whether next cannot answer at the moment.
func NewCache(next Handler, interrupted func() bool) *Cache {
	answers, err := lru.New[queryKey, cachedAnswer](maxCached)
	if err != nil {
		panic(err) // the size is positive
	}
	return &Cache{next: next, interrupted: interrupted, answers: answers}
}

// Forget forgets the answers about the Services of the given namespaces, and about their pods, also those to queries
// that are in flight. Nil forgets everything.
func (c *Cache) Forget(changed map[string][]string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.forgets++
	var parts []string
	for namespace, services := range changed {
		for _, service := range services {
			parts = append(parts, "."+service+"."+namespace+".svc.")
		}
	}
	all := changed == nil || len(parts) > maxForgotten
	for _, key := range c.answers.Keys() {
		name := "." + key.name
		if all || slices.ContainsFunc(parts, func(part string) bool { return strings.Contains(name, part) }) {
			c.answers.Remove(key)
		}
	}
}

// Stale returns how many answers were served after their TTL.
func (c *Cache) Stale() int64 { return c.stale.Load() }

// Len returns the number of answers that the cache keeps, and how many it may keep.
func (c *Cache) Len() (n, limit int) { return c.answers.Len(), maxCached }

// ServeDNS answers from the cache, or asks next.
func (c *Cache) ServeDNS(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	key, now := queryKeyOf(q), time.Now()
	kept, ok := c.answers.Get(key)
	age := now.Sub(kept.since)
	ok = ok && age < kept.ttl+maxStale
	switch {
	case ok && age < kept.ttl:
		originOf(ctx).came(FromCache)
		return kept.answer(q, kept.ttl-age), nil
	case ok && c.interrupted():
		return c.serveStale(ctx, q, kept), nil
	}
	c.mu.Lock()
	forgets := c.forgets
	c.mu.Unlock()
	msg, err := c.next.ServeDNS(ctx, q)
	if err != nil {
		// The answer may have become too old while the servers were silent.
		if ok && time.Since(kept.since) < kept.ttl+maxStale {
			return c.serveStale(ctx, q, kept), nil
		}
		return nil, err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if ttl := cacheable(msg); ttl > 0 && c.forgets == forgets {
		c.answers.Add(key, cachedAnswer{msg, now, ttl})
	}
	return msg, nil
}

func (c *Cache) serveStale(ctx context.Context, q *dns.Msg, kept cachedAnswer) *dns.Msg {
	c.stale.Add(1)
	originOf(ctx).came(FromStale)
	return kept.answer(q, staleTTL*time.Second)
}

func queryKeyOf(q *dns.Msg) queryKey {
	asked := q.Question[0]
	opt := q.IsEdns0()
	return queryKey{
		name: strings.ToLower(asked.Name), qtype: asked.Qtype, qclass: asked.Qclass,
		do: opt != nil && opt.Do(), cd: q.CheckingDisabled, rd: q.RecursionDesired,
	}
}

// cacheable returns how long an answer may be kept: 0 for failures, for answers without a TTL, and for large ones.
func cacheable(m *dns.Msg) time.Duration {
	if m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError || m.Truncated || m.Len() > maxCachedSize {
		return 0
	}
	ttl, known := leastTTL(m)
	if !known {
		return 0
	}
	return time.Duration(ttl) * time.Second
}

// answer returns a copy for q whose TTLs are at most left, and at least a second.
func (a cachedAnswer) answer(q *dns.Msg, left time.Duration) *dns.Msg {
	msg := LimitTTL(a.msg, left)
	msg.Id = q.Id
	return msg
}

// LimitTTL returns a copy of m whose TTLs are at most limit, rounded up to a second.
func LimitTTL(m *dns.Msg, limit time.Duration) *dns.Msg {
	msg := m.Copy()
	ttl := uint32(min(math.Ceil(limit.Seconds()), math.MaxUint32))
	for _, section := range [][]dns.RR{msg.Answer, msg.Ns, msg.Extra} {
		for _, rr := range section {
			if h := rr.Header(); h.Rrtype != dns.TypeOPT {
				h.Ttl = min(h.Ttl, ttl)
			}
		}
	}
	return msg
}
