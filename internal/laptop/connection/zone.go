package connection

import (
	"cmp"
	"context"
	"fmt"
	"net"
	"net/netip"
	"reflect"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/osdns"
	"kubevpn/pkg/protocol/dns"
)

// zone has the machine's resolver answer for the cluster's names. The goroutine of routes uses it.
type zone struct {
	*shared
	nameservers *dns.Nameservers // cluster DNS, through the tunnel
	cache       *dns.Cache       // of their answers
	servers     []netip.AddrPort // as nameservers has them
	answers     *mappedNames     // what programs are told of them
	applied     dns.Zone         // as the machine's resolver has it

	// serve answers DNS at an address inside the tunnel until stop is called; nil before there is a netstack.
	serve func(at netip.Addr) (stop func(), err error)
	at    netip.Addr // where it does so now
	stop  func()
}

func newZone(s *shared, dial func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)) *zone {
	nameservers := dns.NewNameservers(dns.NameserversConfig{Name: s.cluster.ID(), Dial: dial, Logger: s.log})
	z := &zone{shared: s, nameservers: nameservers, cache: dns.NewCache(nameservers, s.status.reconnecting)}
	s.names.forget, s.hosts.next = z.cache.Forget, z.cache
	z.answers = &mappedNames{next: s.hosts, mappings: s.mappings}
	return z
}

// serveAt moves the answers to the resolver's address, which a new lease may have changed.
func (z *zone) serveAt(resolver netip.Addr) error {
	if z.serve == nil || z.at == resolver {
		return nil
	}
	stop, err := z.serve(resolver)
	if err != nil {
		return err
	}
	if z.stop != nil {
		z.stop()
	}
	z.at, z.stop = resolver, stop
	return nil
}

// domains returns the match and search domains for a resolver with a server per link, and the number of namespaces that
// it leaves out.
func (z *zone) domains(domain string, reverse []netip.Prefix) (match, search []string, left int) {
	if domain == "" {
		return nil, nil, 0
	}
	extra := z.cfg.Request.ExtraDomains
	domains := append([]string{domain}, extra...)
	if alias := alias(&z.cfg.Request); alias != "" {
		domains = append(domains, alias)
	}
	match, left = matchDomains(domains, reverseDomains(reverse), z.names.matchable())
	search = []string{z.namespace.Load() + ".svc." + domain, "svc." + domain, domain}
	// The helper rejects some domains, for example public suffixes. One of them must not keep it from the others.
	// The cluster does not answer for excluded ones.
	rejected := func(d string) bool {
		return osdns.CheckDomain(d) != nil || dns.IsUnderAny(d, z.cfg.Request.ExcludeDomains)
	}
	return slices.DeleteFunc(match, rejected), slices.DeleteFunc(search, rejected), left
}

// alias returns the label under which names always mean the cluster, made of the context's name unless the user has
// chosen one. It returns "" if nothing of that can be a label, or if it is a top-level domain outside of the cluster.
func alias(r *api.ConnectRequest) string {
	label := strings.Trim(strings.Map(func(c rune) rune {
		if c >= 'a' && c <= 'z' || c >= '0' && c <= '9' {
			return c
		}
		return '-'
	}, strings.ToLower(cmp.Or(r.Name, r.Context))), "-")
	if !isLabel(label) || dns.ClaimsTLD(label) {
		return ""
	}
	return label
}

// set tells the machine's resolver which names are this cluster's, if that has changed.
func (z *zone) set(state api.ManagerState, reverse []netip.Prefix) error {
	if state.DNSDomain == "" || len(state.DNSServers) == 0 {
		z.status.warn("the traffic manager's pod has no cluster DNS: names of the cluster do not resolve")
		z.applied = dns.Zone{}
		return z.cfg.Network.SetZone(nil)
	}
	servers := make([]netip.AddrPort, len(state.DNSServers))
	for i, a := range state.DNSServers {
		servers[i] = netip.AddrPortFrom(a, 53)
	}
	if !slices.Equal(servers, z.servers) { // SetAddrs forgets the sockets, and which server was silent
		z.servers = servers
		z.nameservers.SetAddrs(servers)
		z.cache.Forget(nil)
	}
	next := dns.Zone{Name: z.cluster.ConnectionID(), Alias: alias(&z.cfg.Request), Domain: state.DNSDomain,
		Extra: z.cfg.Request.ExtraDomains, Exclude: z.cfg.Request.ExcludeDomains, Namespace: z.namespace.Load(),
		Reverse: reverse, Cluster: z.answers}
	if z.names.known() != nobody {
		next.Services = z.names.index
	}
	if state.ResolvesVIPs && len(state.Namespaces) > 0 && !slices.Contains(state.Namespaces, next.Namespace) {
		text := "short names of Services in %[1]s may not resolve, because the traffic manager does not watch that " +
			"namespace: use NAME.%[1]s.svc"
		if state.Limited {
			text = "the traffic manager does not let laptops reach the namespace %s: ask an admin to allow it"
		}
		z.status.warn(fmt.Sprintf(text, next.Namespace))
	}
	if reflect.DeepEqual(next, z.applied) {
		return nil
	}
	z.applied = next
	return z.cfg.Network.SetZone(&next)
}
