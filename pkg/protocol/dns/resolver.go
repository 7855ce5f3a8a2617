package dns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

const (
	// queryTimeout limits one query. It is shorter than glibc's timeout, which is 5 s.
	queryTimeout = 4500 * time.Millisecond
	// maxInFlight limits the queries that wait for clusters, and separately those that wait for the upstreams. The
	// Resolver answers further queries with SERVFAIL.
	maxInFlight = 4096
	// maxUDPReply limits UDP replies with a cluster's answer, even if a client accepts more.
	maxUDPReply = 4096
)

// errLoop reports that a query came back: the upstream is this Resolver, or the redirect applies to its own queries.
var errLoop = errors.New("the upstream nameserver is this resolver itself")

// Config configures a [Resolver].
type Config struct {
	// Upstreams are the nameservers for all names outside the clusters, in order.
	Upstreams []netip.AddrPort
	// Dial connects to an upstream; nil means directly. If port 53 is redirected to this Resolver, Dial must return
	// sockets that the redirect exempts.
	Dial DialFunc
	// Outside, if not nil, replaces Upstreams for queries of this process (ServeDNS), and for aliases that leave a
	// cluster.
	Outside Handler
	// Routed limits what Lookup accepts from clusters: it drops addresses of their names that are not routed. Nil: all.
	Routed   func(netip.Addr) bool
	Observer Observer     // of queries from the network; nil: none
	Logger   *slog.Logger // nil: slog.Default
}

// Resolver answers the queries of this machine. All methods are safe for concurrent use.
type Resolver struct {
	timeout  time.Duration
	inFlight int64
	log      *slog.Logger
	upstream *Nameservers
	outside  Handler // Config.Outside, else upstream
	routed   func(netip.Addr) bool
	current  atomic.Pointer[zones]
	programs atomic.Pointer[map[string]zones] // see ServePrograms, by Zone.Name
	flights  flights
	observer Observer
	looped   sync.Once // guards the warning about a loop

	clusterInFlight, upstreamInFlight atomic.Int64 // queries
}

var (
	_ Handler = (*Resolver)(nil)
	_ Handler = (*Nameservers)(nil)
)

// New returns a Resolver without zones, which sends all queries upstream. It opens no sockets; see [Resolver.Serve].
func New(c Config) *Resolver {
	r := &Resolver{
		timeout: queryTimeout, inFlight: maxInFlight,
		log: cmp.Or(c.Logger, slog.Default()), observer: c.Observer, routed: c.Routed,
	}
	r.upstream = NewNameservers(NameserversConfig{Name: "upstream", Addrs: c.Upstreams, Dial: c.Dial, Logger: r.log})
	if r.outside = c.Outside; r.outside == nil {
		r.outside = r.upstream
	}
	return r
}

// SetZones atomically replaces the zones of all connections. If several could answer a query, their order decides.
// Queries in flight keep the old zones. After an error nothing has changed.
func (r *Resolver) SetZones(list []Zone) error {
	made := make(zones, 0, len(list))
	for _, z := range list {
		m, err := newZone(z)
		if err != nil {
			return err
		}
		made = append(made, m)
	}
	r.current.Store(&made)
	programs := make(map[string]zones, len(made))
	for _, z := range made {
		programs[z.name] = made.programs(z)
	}
	r.programs.Store(&programs)
	return nil
}

// SetUpstreams replaces the nameservers for names outside the clusters. They must not include addresses of the
// Resolver.
func (r *Resolver) SetUpstreams(addrs []netip.AddrPort) { r.upstream.SetAddrs(addrs) }

func (r *Resolver) zones(ctx context.Context) zones {
	if name, ok := ctx.Value(programsKey{}).(string); ok {
		if all := r.programs.Load(); all != nil {
			return (*all)[name]
		}
		return nil
	}
	if zs := r.current.Load(); zs != nil {
		return *zs
	}
	return nil
}

// InFlight returns how many queries wait for clusters and for the upstreams, and how many may wait for each.
func (r *Resolver) InFlight() (cluster, upstream, limit int64) {
	return r.clusterInFlight.Load(), r.upstreamInFlight.Load(), r.inFlight
}

// ServeDNS answers a query of this process, by the same rules as one from the network.
func (r *Resolver) ServeDNS(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	if q.Opcode != dns.OpcodeQuery || len(q.Question) != 1 {
		return nil, errFormat
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	key, err := keyOf(q.Question[0].Name)
	if err != nil {
		return nil, fmt.Errorf("reading the name %q: %w", q.Question[0].Name, err)
	}
	rt := r.zones(ctx).route(question{key: key, qtype: q.Question[0].Qtype, qclass: q.Question[0].Qclass})
	var first *dns.Msg
	if rt.late {
		first, err = r.outside.ServeDNS(ctx, q)
		if err != nil || first.Rcode != dns.RcodeNameError {
			return first, err
		}
	}
	if len(rt.asks) > 0 {
		reply, upstream, err := r.askCluster(ctx, q, rt)
		if err != nil || !upstream {
			return reply, err
		}
	}
	if first != nil {
		return first, nil
	}
	return r.outside.ServeDNS(ctx, q)
}

// handle returns the reply to one message from a client, or nil to send none. The reply may use buf.
func (r *Resolver) handle(ctx context.Context, network string, m, buf []byte) []byte {
	q, err := parseQuery(m)
	switch {
	case errors.Is(err, errNotQuery):
		return nil
	case errors.Is(err, errOpcode):
		return replyTo(m, 0, dns.RcodeNotImplemented)
	case err != nil:
		return replyTo(m, 0, dns.RcodeFormatError)
	}
	ctx, cancel := context.WithTimeout(ctx, r.timeout)
	defer cancel()
	a := asked{network: network, m: m, buf: buf, q: q, rt: r.zones(ctx).route(q)}
	if r.observer != nil {
		return r.observe(ctx, a)
	}
	return r.answer(ctx, a)
}

// asked is a query of a client, with its route. The reply may use buf.
type asked struct {
	network string
	m, buf  []byte
	q       question
	rt      route
}

// answer returns the reply to a query of a client.
func (r *Resolver) answer(ctx context.Context, a asked) []byte {
	network, m, buf, q, rt := a.network, a.m, a.buf, a.q, a.rt
	var first []byte
	if rt.late {
		first = r.handleUpstream(ctx, network, m, buf, q)
		if rcodeOf(first) != dns.RcodeNameError {
			return first
		}
	}
	if len(rt.asks) > 0 {
		reply, upstream := r.handleCluster(ctx, network, m, q, rt)
		if !upstream {
			return reply
		}
	}
	if first != nil {
		return first
	}
	return r.handleUpstream(ctx, network, m, buf, q)
}

// enter counts one more query in flight, unless there are too many. The caller subtracts it.
func (r *Resolver) enter(inFlight *atomic.Int64) bool {
	if inFlight.Add(1) > r.inFlight {
		inFlight.Add(-1)
		return false
	}
	return true
}

// handleUpstream forwards the message and returns the reply, both unchanged.
func (r *Resolver) handleUpstream(ctx context.Context, network string, m, buf []byte, q question) []byte {
	originOf(ctx).set(origin{from: FromNobody, outside: true})
	if !r.enter(&r.upstreamInFlight) {
		return replyTo(m, q.end, dns.RcodeServerFailure)
	}
	defer r.upstreamInFlight.Add(-1)
	var reply []byte
	returned, err := r.checkLoop(ctx, m, q)
	if err == nil {
		reply, err = r.upstream.exchange(ctx, request{network, m, q.end, buf, returned})
	}
	if err != nil {
		r.failed(ctx, q, err)
		return replyTo(m, q.end, dns.RcodeServerFailure)
	}
	originOf(ctx).came(FromNameserver)
	return reply
}

// checkLoop reports whether this Resolver itself may have sent the query upstream. It returns errLoop if it has.
func (r *Resolver) checkLoop(ctx context.Context, m []byte, q question) (returned bool, err error) {
	returned, loops := r.upstream.sent.has(m, q.end)
	if !loops {
		return returned, nil
	}
	r.looped.Do(func() {
		r.log.WarnContext(ctx,
			"queries to the upstream nameservers return to this resolver; only cluster names resolve",
			"name", q.key)
	})
	return true, errLoop
}

// handleCluster answers by asking clusters. upstream reports that no cluster has the name and the query must go
// upstream.
func (r *Resolver) handleCluster(ctx context.Context, network string, m []byte, q question,
	rt route) (reply []byte, upstream bool) {
	msg := new(dns.Msg)
	if err := msg.Unpack(m); err != nil {
		return replyTo(m, q.end, dns.RcodeFormatError), false
	}
	if !r.enter(&r.clusterInFlight) {
		return replyTo(m, q.end, dns.RcodeServerFailure), false
	}
	defer r.clusterInFlight.Add(-1)
	answer, upstream, err := r.askCluster(ctx, msg, rt)
	if upstream {
		return nil, true
	}
	if err != nil {
		r.failed(ctx, q, err)
		answer = new(dns.Msg).SetRcode(msg, dns.RcodeServerFailure)
		answer.RecursionAvailable = true
	}
	packed, perr := pack(answer, msg, network, err)
	if perr != nil {
		r.failed(ctx, q, perr)
		return replyTo(m, q.end, dns.RcodeServerFailure), false
	}
	return packed, false
}

func (r *Resolver) failed(ctx context.Context, q question, err error) {
	if r.log.Enabled(ctx, slog.LevelDebug) {
		r.log.DebugContext(ctx, "query failed", "name", q.key, "type", dns.Type(q.qtype), "err", err)
	}
}

// pack encodes an answer for the sender of q, truncated to the size that the sender accepts. If q has an OPT
// record, so has the answer, with cause as extended error if it is not nil.
func pack(answer, q *dns.Msg, network string, cause error) ([]byte, error) {
	size := dns.MinMsgSize
	if opt := q.IsEdns0(); opt != nil {
		answer.SetEdns0(maxUDPReply, opt.Do())
		size = min(int(opt.UDPSize()), maxUDPReply)
		if cause != nil {
			own := answer.IsEdns0()
			own.Option = append(own.Option,
				&dns.EDNS0_EDE{InfoCode: dns.ExtendedErrorCodeNoReachableAuthority, ExtraText: clip(cause.Error())})
		}
	}
	if network == "tcp" {
		size = dns.MaxMsgSize
	}
	answer.Compress = true
	answer.Truncate(size)
	return answer.Pack()
}

// clip returns the text of an error as one short line for a DNS message.
func clip(s string) string {
	s = strings.ReplaceAll(s, "\n", "; ")
	if len(s) > 200 {
		s = strings.ToValidUTF8(s[:200], "")
	}
	return s
}

func isTransfer(qtype uint16) bool { return qtype == dns.TypeAXFR || qtype == dns.TypeIXFR }

// transfer forwards a zone transfer, whose reply is many messages.
func (r *Resolver) transfer(ctx context.Context, m []byte, q question, write func([]byte) error) error {
	if !r.enter(&r.upstreamInFlight) {
		return write(replyTo(m, q.end, dns.RcodeServerFailure))
	}
	defer r.upstreamInFlight.Add(-1)
	returned, err := r.checkLoop(ctx, m, q)
	if err != nil {
		r.failed(ctx, q, err)
		return write(replyTo(m, q.end, dns.RcodeServerFailure))
	}
	begun := false
	err = r.upstream.relay(ctx, request{"tcp", m, q.end, nil, returned}, func(reply []byte) error {
		begun = true
		return write(reply)
	})
	if err != nil && !begun {
		r.failed(ctx, q, err)
		return write(replyTo(m, q.end, dns.RcodeServerFailure))
	}
	return err
}
