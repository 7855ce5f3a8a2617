package connection

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	mdns "github.com/miekg/dns"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/protocol/dns"
	"kubevpn/pkg/wakeup"
)

const (
	// A host stays for the TTL of its record, but at least for minHostTime: programs take a moment to connect. The TTL
	// is at most maxHostTime, also in the answer, so that no program uses an address for longer than its route stays.
	minHostTime = 10 * time.Second
	maxHostTime = time.Hour
	// maxHosts limits the hosts of one connection.
	maxHosts = 256
	// hostTick is how often routes look for hosts that nothing uses.
	hostTick = 2 * time.Second
	// establishedTime is the time after which a TCP flow without packets has ended. Netfilter in the traffic gateway
	// forgets a flow after the same time.
	establishedTime = 5 * 24 * time.Hour
)

// hosts are the addresses that cluster DNS gives for names under the extra domains, and those outside of the cluster's
// networks that it gives for names of the cluster: a Service may lead to hosts that pods reach. A host is routed until
// its TTL has passed and the last flow to it has ended, if it may be routed. hosts is a dns.Handler, and safe for
// concurrent use.
//
//	query ─▶ cluster DNS ─▶ new addresses ── asked ─▶ routes: plan, apply ── settle ─▶ answer
//	flows:   streams of the netstack (streams) and whole packets (see)
type hosts struct {
	extra, exclude []string      // domains
	domain         func() string // of the cluster
	streams        *flows        // of the netstack
	next           dns.Handler   // cluster DNS; set before the first query
	asked          wakeup.Signal // there are hosts that no plan has seen
	warn           func(string)
	log            *slog.Logger

	routes atomic.Pointer[[]netip.Prefix]      // as applied; nil: none yet
	addrs  atomic.Pointer[map[netip.Addr]bool] // of known, so that a packet to another address needs no lock

	mu    sync.Mutex
	known map[netip.Addr]*host
	flows map[flow]*hostFlow // of whole packets
}

var _ dns.Handler = (*hosts)(nil)

type host struct {
	name     string
	until    time.Time
	settled  chan struct{} // closed when a plan has seen it
	refused  string        // why it is not routed
	withheld bool          // no answer for a name of the cluster has it
	failed   bool          // because its route could not be set: no plan may have it
}

// hostFlow is a flow to a host, whose packets cross whole.
type hostFlow struct {
	seen     bool      // a packet was seen since last
	last     time.Time // when sweep found seen
	answered bool      // TCP: the far end has accepted it
	fins     byte      // TCP: fromHere, fromThere
}

const fromHere, fromThere = 1, 2

func newHosts(r *api.ConnectRequest, streams *flows, domain func() string, warn func(string),
	log *slog.Logger) *hosts {
	h := &hosts{
		extra: r.ExtraDomains, exclude: r.ExcludeDomains, streams: streams, domain: domain,
		asked: wakeup.NewSignal(), warn: warn, log: log,
		known: map[netip.Addr]*host{}, flows: map[flow]*hostFlow{},
	}
	h.publish()
	return h
}

// ServeDNS asks cluster DNS. It returns an answer with new addresses after a plan has routed or refused them.
func (h *hosts) ServeDNS(ctx context.Context, q *mdns.Msg) (*mdns.Msg, error) {
	m, err := h.next.ServeDNS(ctx, q)
	if err != nil {
		return m, err
	}
	found := h.find(q.Question[0].Name, m)
	if len(found) == 0 {
		return m, nil
	}
	for _, settled := range h.add(found) {
		select {
		case <-settled:
		case <-ctx.Done():
			return nil, fmt.Errorf("waiting for the routes to the addresses of %s: %w", q.Question[0].Name,
				context.Cause(ctx))
		}
	}
	if !h.ofCluster(q.Question[0].Name) {
		return dns.LimitTTL(m, maxHostTime), nil
	}
	return h.withhold(trimName(q.Question[0].Name), dns.LimitTTL(m, maxHostTime), found)
}

// withhold removes the addresses that are withheld from an answer for a name of the cluster: the program would leave
// this machine by another way than a pod, and reach another host. It returns an error if no address is left.
func (h *hosts) withhold(name string, m *mdns.Msg, found []hostRecord) (*mdns.Msg, error) {
	refused := map[netip.Addr]string{}
	h.mu.Lock()
	for _, r := range found {
		if k := h.known[r.addr]; k == nil {
			refused[r.addr] = "too many such addresses are in use"
		} else if k.withheld {
			refused[r.addr] = k.refused
		}
	}
	h.mu.Unlock()
	if len(refused) == 0 {
		return m, nil
	}
	out, text := *m, ""
	left := func(rr mdns.RR) bool {
		a, ok := dns.Address(rr)
		if ok && refused[a] != "" {
			text = fmt.Sprintf("%s leads to %v, which is not routed into the cluster: %s; --exclude-cidr %[2]v "+
				"reaches that address without the tunnel", name, a, refused[a])
			h.warn(text)
		}
		return ok && refused[a] != ""
	}
	out.Answer = slices.DeleteFunc(slices.Clone(m.Answer), left)
	out.Extra = slices.DeleteFunc(slices.Clone(m.Extra), left)
	if len(out.Answer) < len(m.Answer) && !slices.ContainsFunc(out.Answer, func(rr mdns.RR) bool {
		_, ok := dns.Address(rr)
		return ok
	}) {
		return nil, errors.New(text)
	}
	return &out, nil
}

// ofCluster reports whether a name is under the cluster's domain.
func (h *hosts) ofCluster(name string) bool { return dns.IsUnder(trimName(name), h.domain()) }

// isInside reports whether an address is routed for another reason than being a host, or nothing is routed yet.
func (h *hosts) isInside(a netip.Addr) bool {
	routes := h.routes.Load()
	return routes == nil || covers(*routes, a) && !(*h.addrs.Load())[a]
}

// hostRecord is an A or AAAA record.
type hostRecord struct {
	addr netip.Addr
	name string
	ttl  time.Duration
}

// find returns the addresses in an answer that belong to an extra domain, or to a name of the cluster and not to its
// networks: those of a name under it, its aliases included.
func (h *hosts) find(asked string, m *mdns.Msg) (found []hostRecord) {
	inside := h.ofCluster(asked)
	all := inside || h.covers(asked)
	for _, rr := range slices.Concat(m.Answer, m.Extra) {
		name := rr.Header().Name
		a, ok := dns.Address(rr)
		if !ok || !all && !h.covers(name) || inside && !h.covers(name) && h.isInside(a) {
			continue
		}
		if all {
			name = asked
		}
		ttl := time.Duration(rr.Header().Ttl) * time.Second
		found = append(found, hostRecord{a, trimName(name), min(max(ttl, minHostTime), maxHostTime)})
	}
	return found
}

// covers reports whether a name is under an extra domain and neither excluded nor the cluster's own.
func (h *hosts) covers(name string) bool {
	name = trimName(name)
	return dns.IsUnderAny(name, h.extra) && !dns.IsUnderAny(name, h.exclude) && !h.ofCluster(name)
}

func trimName(name string) string { return strings.ToLower(strings.TrimSuffix(name, ".")) }

// add remembers addresses for their TTL. It returns a channel for each, which is closed when a plan has seen it.
func (h *hosts) add(found []hostRecord) (settled []<-chan struct{}) {
	now, added, full := time.Now(), false, false
	h.mu.Lock()
	for _, r := range found {
		k := h.known[r.addr]
		if k == nil && len(h.known) >= maxHosts && !h.dropRefused() {
			full = true
			continue
		}
		if k == nil {
			k = &host{settled: make(chan struct{})}
			h.known[r.addr], added = k, true
		}
		k.name = r.name
		if until := now.Add(r.ttl); until.After(k.until) && !k.failed {
			k.until = until
		}
		settled = append(settled, k.settled)
	}
	if added {
		h.publish()
		h.asked.Raise()
	}
	h.mu.Unlock()
	if full {
		h.warn(fmt.Sprintf("more than %d addresses behind the cluster were in use at once: the others are not routed",
			maxHosts))
	}
	return settled
}

// dropRefused makes room for another host. It reports whether there was a host without a route. The caller holds mu.
func (h *hosts) dropRefused() bool {
	for a, k := range h.known {
		if k.refused != "" {
			delete(h.known, a)
			return true
		}
	}
	return false
}

// publish updates addrs. The caller holds mu.
func (h *hosts) publish() {
	addrs := make(map[netip.Addr]bool, len(h.known))
	for a := range h.known {
		addrs[a] = true
	}
	h.addrs.Store(&addrs)
}

// wanted returns the hosts for a plan, in order.
func (h *hosts) wanted() []netip.Addr {
	h.mu.Lock()
	defer h.mu.Unlock()
	var out []netip.Addr
	for a, k := range h.known {
		if !k.failed {
			out = append(out, a)
		}
	}
	slices.SortFunc(out, netip.Addr.Compare)
	return out
}

// settle stores which hosts an applied plan has refused, and releases the answers that wait for it.
func (h *hosts) settle(p planned) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for a, why := range p.Hosts {
		k := h.known[a]
		if k == nil {
			continue
		}
		if why == "" && !covers(p.Routes, a) {
			why = "its network is not routed"
		}
		k.withheld = p.Withheld[a]
		h.decide(a, k, why)
	}
}

// fail refuses the hosts that no plan has settled, after their plan could not be applied. It reports whether there are
// any: applying a plan without them may succeed.
func (h *hosts) fail(err error) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	found := false
	for a, k := range h.known {
		if !wakeup.IsClosed(k.settled) {
			k.failed, k.withheld, found = true, true, true
			h.decide(a, k, api.OneLine(err.Error()))
		}
	}
	return found
}

// decide settles a host. The caller holds mu.
func (h *hosts) decide(a netip.Addr, k *host, why string) {
	if why != k.refused && why != "" {
		h.log.Warn("an address behind the cluster is not routed", "name", k.name, "address", a, "why", why)
	}
	k.refused = why
	if !wakeup.IsClosed(k.settled) {
		close(k.settled)
	}
}

// sweep forgets flows that have ended, and then hosts whose time has passed and that have no flow. It reports whether
// it has forgotten a host.
func (h *hosts) sweep() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	now, used := time.Now(), map[netip.Addr]bool{}
	for f, s := range h.flows {
		if s.seen {
			s.seen, s.last = false, now
		}
		if now.Sub(s.last) > s.timeout() {
			delete(h.flows, f)
			continue
		}
		used[f.remote.Addr()] = true
	}
	before := len(h.known)
	if before > 0 {
		h.streams.addRemotes(used)
	}
	maps.DeleteFunc(h.known, func(a netip.Addr, k *host) bool { return !used[a] && now.After(k.until) })
	if len(h.known) == before {
		return false
	}
	h.publish()
	return true
}

// timeout returns how long a flow stays open without packets.
func (s *hostFlow) timeout() time.Duration {
	if s.answered && s.fins == 0 {
		return establishedTime
	}
	return flowTime
}

// shown returns the hosts for the status.
func (h *hosts) shown() (out []api.Host) {
	h.mu.Lock()
	defer h.mu.Unlock()
	for a, k := range h.known {
		out = append(out, api.Host{Address: a, Name: k.name, Routed: k.refused == "", Reason: k.refused})
	}
	slices.SortFunc(out, func(a, b api.Host) int { return a.Address.Compare(b.Address) })
	return out
}

// see notes a whole packet to or from remote.
func (h *hosts) see(header *packet.Header, p []byte, remote netip.Addr) {
	if !(*h.addrs.Load())[remote] {
		return
	}
	f, ok := flowOf(header, p, remote)
	if !ok {
		return
	}
	var flags byte
	if tcp := p[header.HeaderLen:]; header.Proto == packet.ProtoTCP && len(tcp) > tcpFlags {
		flags = tcp[tcpFlags]
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	h.note(f, flags, remote == header.Dst)
}

// note notes a packet of a flow. One of this laptop begins a flow, unless it is a later one of TCP. The caller holds
// mu.
func (h *hosts) note(f flow, flags byte, sent bool) {
	s, side := h.flows[f], byte(fromThere)
	if sent {
		side = fromHere
	}
	switch begins := f.proto == packet.ProtoTCP && flags&tcpSYN != 0 || f.proto != packet.ProtoTCP && s == nil; {
	case sent && begins && s == nil && len(h.flows) >= maxFlows:
		k, until := h.known[f.remote.Addr()], time.Now().Add(flowTime)
		if k != nil && until.After(k.until) {
			k.until = until
		}
		return
	case sent && begins:
		s = new(hostFlow)
		h.flows[f] = s
	case s == nil:
		return
	case !sent && flags&(tcpSYN|tcpACK) == tcpSYN|tcpACK:
		s.answered = true
	}
	s.seen = true
	if flags&tcpFIN != 0 {
		s.fins |= side
	}
	if flags&tcpRST != 0 || s.fins == fromHere|fromThere {
		delete(h.flows, f)
	}
}

// endWhole forgets the flows whose packets crossed whole, because no packet will show their end: gvisor resets them.
func (h *hosts) endWhole() {
	h.mu.Lock()
	defer h.mu.Unlock()
	clear(h.flows)
}
