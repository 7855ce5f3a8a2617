package dns

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"

	"github.com/miekg/dns"
	"golang.org/x/sync/errgroup"
)

// Lookup returns the addresses of a name for this process, those of IPv4 first. It applies no search list. Errors are
// *net.DNSError. It drops addresses that a name of a cluster must not have (Config.Routed): a user of the cluster could
// give a name the address of a host in this machine's network (DNS rebinding).
func (r *Resolver) Lookup(ctx context.Context, name string) ([]netip.Addr, error) {
	types := []uint16{dns.TypeA, dns.TypeAAAA}
	replies := make([]*dns.Msg, len(types))
	var g errgroup.Group
	for i, qtype := range types {
		g.Go(func() (err error) {
			replies[i], err = r.ServeDNS(ctx, new(dns.Msg).SetQuestion(dns.Fqdn(name), qtype))
			return err
		})
	}
	failed := g.Wait()
	var addrs, left []netip.Addr
	for _, reply := range replies {
		if reply == nil {
			continue
		}
		for _, rr := range reply.Answer {
			a, ok := Address(rr)
			switch {
			case !ok:
			case r.routed != nil && !r.routed(a) && r.ofCluster(ctx, rr.Header().Name):
				left = append(left, a)
			default:
				addrs = append(addrs, a)
			}
		}
	}
	if len(addrs) > 0 {
		return addrs, nil
	}
	if len(left) > 0 {
		return nil, &net.DNSError{Err: fmt.Sprintf("the cluster answers with %v, which is not routed to it; see "+
			"--extra-cidr", left[0]), Name: name}
	}
	if failed != nil {
		return nil, &net.DNSError{Err: failed.Error(), Name: name, IsTimeout: isGivenUp(failed)}
	}
	if i := slices.IndexFunc(replies, failure); i >= 0 {
		return nil, &net.DNSError{Err: "the nameserver answered " + dns.RcodeToString[replies[i].Rcode], Name: name,
			IsTemporary: true}
	}
	return nil, &net.DNSError{Err: "no such host", Name: name, IsNotFound: true}
}

// failure reports whether the nameserver could not tell.
func failure(m *dns.Msg) bool { return m.Rcode != dns.RcodeSuccess && m.Rcode != dns.RcodeNameError }

// ofCluster reports whether a cluster answers for a name.
func (r *Resolver) ofCluster(ctx context.Context, name string) bool {
	key, err := keyOf(name)
	return err == nil && !r.zones(ctx).route(question{key: key, qtype: dns.TypeA, qclass: dns.ClassINET}).isOutside()
}

// Address returns the address in a record, if it is an A or AAAA record.
func Address(rr dns.RR) (netip.Addr, bool) {
	var ip net.IP
	switch rr := rr.(type) {
	case *dns.A:
		ip = rr.A
	case *dns.AAAA:
		ip = rr.AAAA
	}
	a, ok := netip.AddrFromSlice(ip)
	return a.Unmap(), ok
}

// System answers with the addresses of names that the operating system's resolver knows. It has no other records.
type System struct{}

var _ Handler = System{}

// ServeDNS answers a query for addresses.
func (System) ServeDNS(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	if len(q.Question) != 1 {
		return nil, errFormat
	}
	asked := q.Question[0]
	name := asked.Name[:max(0, len(asked.Name)-1)] // without the dot, the system applies its search list
	reply := new(dns.Msg).SetReply(q)
	addrs, err := net.DefaultResolver.LookupNetIP(ctx, "ip", name)
	if missing := (*net.DNSError)(nil); errors.As(err, &missing) && missing.IsNotFound {
		reply.Rcode = dns.RcodeNameError
		return reply, nil
	}
	if err != nil {
		return nil, err
	}
	header := dns.RR_Header{Name: asked.Name, Rrtype: asked.Qtype, Class: dns.ClassINET}
	for _, a := range addrs {
		switch a = a.Unmap(); {
		case asked.Qtype == dns.TypeA && a.Is4():
			reply.Answer = append(reply.Answer, &dns.A{Hdr: header, A: a.AsSlice()})
		case asked.Qtype == dns.TypeAAAA && a.Is6():
			reply.Answer = append(reply.Answer, &dns.AAAA{Hdr: header, AAAA: a.AsSlice()})
		}
	}
	return reply, nil
}
