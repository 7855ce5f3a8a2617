package connection

import (
	"context"
	"net"
	"net/netip"
	"strings"

	mdns "github.com/miekg/dns"

	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/protocol/dns"
)

// mappedNames answers with the addresses by which programs of this machine reach the cluster. It is a dns.Handler, and
// safe for concurrent use.
//
//	web.shop.svc A         ─▶ cluster DNS: 10.0.3.4                           ─▶ 198.18.3.4
//	4.3.18.198.in-addr.arpa PTR ─▶ cluster DNS, asked for 4.3.0.10.in-addr.arpa ─▶ its answer, about 4.3.18.198
type mappedNames struct {
	next     dns.Handler
	mappings *appliedMappings
}

var _ dns.Handler = (*mappedNames)(nil)

func (n *mappedNames) ServeDNS(ctx context.Context, q *mdns.Msg) (*mdns.Msg, error) {
	mappings := n.mappings.now()
	if len(mappings) == 0 {
		return n.next.ServeDNS(ctx, q)
	}
	asked := q.Question[0].Name
	name := asked
	if a, ok := dns.ReverseAddr(asked); ok {
		if of := mappings.ToCluster(a); of != a {
			name, _ = mdns.ReverseAddr(of.String()) // an address has a reverse name
			q = q.Copy()
			q.Question[0].Name = name
		}
	}
	m, err := n.next.ServeDNS(ctx, q)
	if err != nil {
		return m, err
	}
	return mapAnswer(m, mappings, name, asked), nil
}

// mapAnswer returns an answer with mapped addresses, and with asked as the name of what is about name. The message may
// be shared, so it changes a copy.
func mapAnswer(m *mdns.Msg, mappings packet.Mappings, name, asked string) *mdns.Msg {
	out := m
	edit := func(section func(*mdns.Msg) []mdns.RR) {
		for i, rr := range section(m) {
			if name == asked && !hasMapped(rr, mappings) {
				continue
			}
			if out == m {
				out = m.Copy()
			}
			mapRecord(section(out)[i], mappings)
			if h := section(out)[i].Header(); name != asked && strings.EqualFold(h.Name, name) {
				h.Name = asked
			}
		}
	}
	edit(func(m *mdns.Msg) []mdns.RR { return m.Answer })
	edit(func(m *mdns.Msg) []mdns.RR { return m.Extra })
	if name != asked {
		if out == m {
			out = m.Copy()
		}
		out.Question[0].Name = asked
	}
	return out
}

// hasMapped reports whether a record has an address that is mapped.
func hasMapped(rr mdns.RR, mappings packet.Mappings) bool {
	if a, ok := dns.Address(rr); ok {
		return mappings.ToLocal(a) != a
	}
	return len(hints(rr)) > 0
}

// hints returns the addresses in an SVCB or HTTPS record.
func hints(rr mdns.RR) (all [][]net.IP) {
	var values []mdns.SVCBKeyValue
	switch rr := rr.(type) {
	case *mdns.SVCB:
		values = rr.Value
	case *mdns.HTTPS:
		values = rr.Value
	}
	for _, v := range values {
		switch v := v.(type) {
		case *mdns.SVCBIPv4Hint:
			all = append(all, v.Hint)
		case *mdns.SVCBIPv6Hint:
			all = append(all, v.Hint)
		}
	}
	return all
}

// mapRecord maps the addresses of an A, AAAA, SVCB or HTTPS record in place.
func mapRecord(rr mdns.RR, mappings packet.Mappings) {
	a, _ := dns.Address(rr)
	switch rr := rr.(type) {
	case *mdns.A:
		rr.A = mappings.ToLocal(a).AsSlice()
	case *mdns.AAAA:
		rr.AAAA = mappings.ToLocal(a).AsSlice()
	}
	for _, hint := range hints(rr) {
		for i, ip := range hint {
			if a, ok := netip.AddrFromSlice(ip); ok {
				hint[i] = mappings.ToLocal(a.Unmap()).AsSlice()
			}
		}
	}
}
