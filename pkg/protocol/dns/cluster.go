package dns

import (
	"context"
	"errors"
	"fmt"
	"math"
	"strings"

	"github.com/miekg/dns"
)

// maxChain is the number of aliases that are followed for one query.
const maxChain = 8

// aliasTTL is the TTL of a short name's alias when the answer has no record to take it from.
const aliasTTL = 5

// errChain reports a loop of aliases, or too many of them.
var errChain = errors.New("the aliases form a loop or are too many")

func isGivenUp(err error) bool {
	return errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded)
}

// askCluster answers a query by asking the clusters of its route. upstream reports that no cluster has the name and
// the route allows to ask upstream.
func (r *Resolver) askCluster(ctx context.Context, q *dns.Msg, rt route) (reply *dns.Msg, upstream bool, err error) {
	asked := q.Question[0]
	if opt := q.IsEdns0(); opt != nil && opt.Version() != 0 {
		reply = new(dns.Msg).SetReply(q)
		reply.Rcode = dns.RcodeBadVers
		return reply, false, nil
	}
	resp, name, err := r.askInOrder(ctx, rt.asks, q, asked.Name)
	if err != nil {
		return nil, false, err
	}
	if rt.guess && isNoName(resp) {
		return nil, true, nil
	}
	reply = replyWith(q, resp, name, rt.short)
	if !followsAliases(asked.Qtype) {
		return reply, false, nil
	}
	if !rt.short {
		name = asked.Name // of the records, also of a name with an alias
	}
	if err := r.chase(withoutOrigin(ctx), q, reply, name); err != nil {
		return nil, false, err
	}
	return reply, false, nil
}

// askInOrder asks until an answer is not NXDOMAIN. It returns the last answer, and the full name that it is for.
func (r *Resolver) askInOrder(ctx context.Context, asks []ask, q *dns.Msg,
	name string) (resp *dns.Msg, full string, err error) {
	for _, a := range asks {
		full = name
		if a.suffix != "" {
			full = strings.ToLower(dns.Fqdn(name))
			if a.cut {
				full = strings.TrimSuffix(full, a.zone.alias+".")
			}
			full += a.suffix
		}
		resp, err = r.exchange(ctx, a.zone, q, full)
		if err != nil || !isNoName(resp) {
			break
		}
	}
	return resp, full, err
}

// isNoName reports whether the name does not exist. NXDOMAIN after an alias concerns the alias's target.
func isNoName(m *dns.Msg) bool { return m.Rcode == dns.RcodeNameError && len(m.Answer) == 0 }

func followsAliases(qtype uint16) bool { return qtype != dns.TypeCNAME && qtype != dns.TypeANY }

// exchange asks one cluster for name with q's type, class and flags.
func (r *Resolver) exchange(ctx context.Context, z *zone, q *dns.Msg, name string) (*dns.Msg, error) {
	m := &dns.Msg{
		MsgHdr: dns.MsgHdr{
			Id:               dns.Id(),
			RecursionDesired: q.RecursionDesired,
			CheckingDisabled: q.CheckingDisabled,
		},
		Question: []dns.Question{{Name: name, Qtype: q.Question[0].Qtype, Qclass: q.Question[0].Qclass}},
	}
	opt := q.IsEdns0()
	m.SetEdns0(ednsSize, opt != nil && opt.Do())
	o := originOf(ctx)
	o.set(origin{from: FromCluster, zone: z})
	resp, err := r.flights.do(ctx, flightKey{z, queryKeyOf(m)}, func() (*dns.Msg, error) {
		return z.cluster.ServeDNS(ctx, m)
	})
	if err != nil {
		o.set(origin{from: FromNobody, zone: z})
	}
	return resp, err
}

// replyWith makes the reply to q out of a cluster's answer for name. Records of the answer are shared with it.
//
// A name under the alias of a zone has the records of the full name: a resolver that followed an alias by itself would
// ask the first cluster.
//
// A short name becomes an alias of the full name, and the other records belong to the full name, also the SOA record
// of a negative answer (RFC 2308 section 2). The reply for a short name that does not exist has neither, so that no
// client caches it: the Service may be created in a moment.
func replyWith(q, resp *dns.Msg, name string, short bool) *dns.Msg {
	reply := new(dns.Msg).SetReply(q)
	reply.RecursionAvailable = true
	reply.Rcode = resp.Rcode
	asked := q.Question[0]
	renamed := !strings.EqualFold(asked.Name, name)
	if renamed && isNoName(resp) {
		return reply
	}
	if short {
		alias := &dns.CNAME{
			Hdr:    dns.RR_Header{Name: asked.Name, Rrtype: dns.TypeCNAME, Class: dns.ClassINET, Ttl: ttlOf(resp)},
			Target: name,
		}
		reply.Answer = append(make([]dns.RR, 0, 1+len(resp.Answer)), alias)
		if asked.Qtype == dns.TypeCNAME && resp.Rcode == dns.RcodeSuccess {
			return reply // the alias is the answer
		}
		reply.Answer = append(reply.Answer, resp.Answer...)
	} else {
		reply.Authoritative = resp.Authoritative
		reply.Answer = make([]dns.RR, 0, len(resp.Answer))
		for _, rr := range resp.Answer {
			// Clients that vary the case of letters want the name back as they wrote it.
			if h := rr.Header(); h.Name != asked.Name && strings.EqualFold(h.Name, name) {
				rr = dns.Copy(rr)
				rr.Header().Name = asked.Name
			}
			reply.Answer = append(reply.Answer, rr)
		}
	}
	if short || !renamed {
		reply.Ns = append([]dns.RR(nil), resp.Ns...)
	}
	for _, rr := range resp.Extra {
		if rr.Header().Rrtype != dns.TypeOPT {
			reply.Extra = append(reply.Extra, rr)
		}
	}
	return reply
}

// ttlOf returns the TTL of a short name's alias.
func ttlOf(m *dns.Msg) uint32 {
	if ttl, known := leastTTL(m); known {
		return ttl
	}
	return aliasTTL
}

// leastTTL returns the lowest TTL of an answer's records, and that of a negative answer (RFC 2308 section 5).
func leastTTL(m *dns.Msg) (ttl uint32, known bool) {
	ttl = math.MaxUint32
	for _, rr := range m.Answer {
		ttl = min(ttl, rr.Header().Ttl)
	}
	for _, rr := range m.Ns {
		if soa, ok := rr.(*dns.SOA); ok {
			ttl = min(ttl, soa.Hdr.Ttl, soa.Minttl)
		}
	}
	return ttl, ttl != math.MaxUint32
}

// chase follows the aliases in reply from name on. If the reply lacks the target of the last alias (an ExternalName
// Service whose target the cluster did not look up), chase asks the cluster that has the target, else upstream, and
// appends their records.
func (r *Resolver) chase(ctx context.Context, q, reply *dns.Msg, name string) error {
	seen := map[string]bool{strings.ToLower(name): true}
	for {
		target, known, err := follow(reply, name, q.Question[0].Qtype, seen)
		if err != nil || known {
			return err
		}
		more, err := r.askTarget(ctx, q, target)
		if err != nil {
			return fmt.Errorf("following the alias to %s: %w", target, err)
		}
		name = target
		reply.Rcode = more.Rcode
		reply.Answer = append(reply.Answer, more.Answer...)
		reply.Ns = append([]dns.RR(nil), more.Ns...)
	}
}

// follow walks the aliases in reply from name on. known reports whether the reply answers for the last of them, also
// with no records; if not, the caller must ask for target. seen collects the names on the way.
func follow(reply *dns.Msg, name string, qtype uint16, seen map[string]bool) (target string, known bool, err error) {
	target = name
	for {
		alias, found := find(reply.Answer, target, qtype)
		if found {
			return "", true, nil
		}
		if alias == "" {
			break
		}
		key := strings.ToLower(alias)
		if seen[key] || len(seen) > maxChain {
			return "", false, errChain
		}
		seen[key] = true
		target = alias
	}
	if target == name {
		return "", true, nil // not an alias: the reply is complete
	}
	for _, rr := range reply.Ns {
		if rr.Header().Rrtype == dns.TypeSOA && dns.IsSubDomain(rr.Header().Name, target) {
			return "", true, nil // the target's zone says that there are no records
		}
	}
	return target, false, nil
}

// find reports whether there is a record of the name and type; else it returns the name's alias, if there is one.
func find(rrs []dns.RR, name string, qtype uint16) (alias string, found bool) {
	for _, rr := range rrs {
		if !strings.EqualFold(rr.Header().Name, name) {
			continue
		}
		if rr.Header().Rrtype == qtype {
			return "", true
		}
		if c, ok := rr.(*dns.CNAME); ok {
			alias = c.Target
		}
	}
	return alias, false
}

// askTarget asks for an alias's target. It is a full name, and never a short one.
func (r *Resolver) askTarget(ctx context.Context, q *dns.Msg, target string) (*dns.Msg, error) {
	key, err := keyOf(target)
	if err != nil {
		return nil, err
	}
	if rt, ok := r.zones(ctx).claiming(key).full(key); ok {
		resp, _, err := r.askInOrder(ctx, rt.asks, q, target)
		return resp, err
	}
	if strings.HasSuffix(key, ".svc") {
		// Not a full name, and not allowed upstream: a pod would not find it either.
		return &dns.Msg{MsgHdr: dns.MsgHdr{Rcode: dns.RcodeNameError}}, nil
	}
	m := new(dns.Msg).SetQuestion(target, q.Question[0].Qtype)
	m.CheckingDisabled = q.CheckingDisabled
	opt := q.IsEdns0()
	m.SetEdns0(ednsSize, opt != nil && opt.Do())
	return r.outside.ServeDNS(ctx, m)
}
