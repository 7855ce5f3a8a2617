package dns

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/miekg/dns"
)

const (
	// serverTimeout limits one attempt with one server.
	serverTimeout = 2 * time.Second
	// penalty is the time for which a nameserver that did not answer is asked last.
	penalty = 10 * time.Second
	// rounds is the number of passes through the list when servers do not answer, because a datagram may be lost.
	rounds = 2
	// packetBuffer holds any UDP reply to a query without a larger EDNS0 size.
	packetBuffer = 4096
	// ednsSize is the reply size that our own queries ask for. It avoids fragmentation on every path.
	ednsSize = 1232
)

// errNoNameserver reports that a list of nameservers is empty.
var errNoNameserver = errors.New("no nameserver is known")

// NameserversConfig configures [Nameservers].
type NameserversConfig struct {
	Name   string           // for logs and errors: "upstream", a connection's ID
	Addrs  []netip.AddrPort // asked in order
	Dial   DialFunc         // nil: directly
	Logger *slog.Logger     // nil: slog.Default
}

// Nameservers asks a list of nameservers in order, as glibc does. It asks the next one when one does not answer,
// refuses the connection, or answers SERVFAIL, NOTIMP or REFUSED. For the next ten seconds it asks a server that
// did not answer last. Over UDP, each query has a random ID and its own connected socket. Sockets are reused for a
// few seconds, because opening one may cost a round trip to the root helper or through a tunnel.
//
// It is safe for concurrent use. It starts no goroutine that outlives a call; Close closes the idle sockets, which
// otherwise close by themselves within seconds.
type Nameservers struct {
	name    string
	dial    DialFunc
	timeout time.Duration
	log     *slog.Logger
	sent    sentSet

	mu      sync.Mutex
	servers []*nameserver // replaced as a whole
	closed  bool
}

// nameserver is one server of the list.
type nameserver struct {
	addr     netip.AddrPort
	badUntil atomic.Int64 // Unix nanoseconds
	idle     pool
}

// NewNameservers returns a list of nameservers. It opens no sockets.
func NewNameservers(c NameserversConfig) *Nameservers {
	n := &Nameservers{name: c.Name, dial: c.Dial, timeout: serverTimeout, log: cmp.Or(c.Logger, slog.Default())}
	if n.dial == nil {
		n.dial = dialDirectly
	}
	n.SetAddrs(c.Addrs)
	return n
}

// SetAddrs replaces the list. Queries in flight keep the old one. After Close it does nothing.
func (n *Nameservers) SetAddrs(addrs []netip.AddrPort) {
	fresh := make([]*nameserver, 0, len(addrs))
	for _, addr := range addrs {
		fresh = append(fresh, &nameserver{addr: addr})
	}
	n.mu.Lock()
	if n.closed {
		fresh = nil
	}
	old := n.servers
	n.servers = fresh
	n.mu.Unlock()
	for _, s := range old {
		s.idle.close()
	}
}

// Close removes all servers and closes idle sockets. Queries in flight continue; later ones fail.
func (n *Nameservers) Close() {
	n.SetAddrs(nil)
	n.mu.Lock()
	n.closed = true
	n.mu.Unlock()
}

// ServeDNS asks the servers over UDP, and again over TCP if the reply is truncated.
func (n *Nameservers) ServeDNS(ctx context.Context, q *dns.Msg) (*dns.Msg, error) {
	raw, err := q.Pack()
	if err != nil {
		return nil, fmt.Errorf("packing a query for %s: %w", n.name, err)
	}
	parsed, err := parseQuery(raw)
	if err != nil {
		return nil, err
	}
	asked := request{network: "udp", query: raw, end: parsed.end}
	reply, err := n.exchange(ctx, asked)
	if err == nil && reply[2]&bitTC != 0 {
		asked.network = "tcp"
		reply, err = n.exchange(ctx, asked)
	}
	if err != nil {
		return nil, err
	}
	m := new(dns.Msg)
	if err := m.Unpack(reply); err != nil {
		return nil, fmt.Errorf("unpacking the reply of %s: %w", n.name, err)
	}
	return m, nil
}

// request is a query to the servers.
type request struct {
	network  string // "udp" or "tcp"
	query    []byte
	end      int    // offset after the question
	buf      []byte // the reply uses it if it is large enough
	returned bool   // it has the question and ID of one that was sent to a server, so it may be that one
}

// exchange sends the query with another ID and returns the reply with the original one.
func (n *Nameservers) exchange(ctx context.Context, r request) ([]byte, error) {
	servers := n.order()
	if len(servers) == 0 {
		return nil, fmt.Errorf("%s: %w", n.name, errNoNameserver)
	}
	var (
		failure []byte // the first reply for which cannotHelp is true
		errs    []error
	)
	for round := range rounds {
		silent := false
		for i, s := range servers {
			reply, err := n.try(ctx, s, r)
			if err == nil {
				s.badUntil.Store(0)
				originOf(ctx).by(s.addr)
				if i == len(servers)-1 && failure == nil || !cannotHelp(reply) {
					return reply, nil
				}
				if failure == nil {
					failure = append(failure, reply...)
				}
				continue
			}
			if ctx.Err() != nil && !errors.Is(err, errSilent) {
				return nil, fmt.Errorf("asking %s: %w", n.name, context.Cause(ctx))
			}
			s.badUntil.Store(time.Now().Add(penalty).UnixNano())
			silent = silent || errors.Is(err, errSilent)
			if n.log.Enabled(ctx, slog.LevelDebug) {
				n.log.DebugContext(ctx, "nameserver did not answer", "handler", n.name, "server", s.addr, "network",
					r.network, "err", err)
			}
			if round == 0 {
				errs = append(errs, fmt.Errorf("%s: %w", s.addr, err))
			}
			if ctx.Err() != nil {
				break
			}
		}
		if failure != nil || !silent || ctx.Err() != nil {
			break
		}
	}
	if failure != nil {
		return failure, nil
	}
	return nil, fmt.Errorf("asking %s: %w", n.name, errors.Join(errs...))
}

// order returns the servers in the order to ask them: those that recently did not answer come last.
func (n *Nameservers) order() []*nameserver {
	n.mu.Lock()
	servers := n.servers
	n.mu.Unlock()
	if len(servers) < 2 {
		return servers
	}
	now := time.Now().UnixNano()
	good := make([]*nameserver, 0, len(servers))
	var bad []*nameserver
	for _, s := range servers {
		if s.badUntil.Load() > now {
			bad = append(bad, s)
		} else {
			good = append(good, s)
		}
	}
	return append(good, bad...)
}

func cannotHelp(reply []byte) bool {
	switch rcodeOf(reply) {
	case dns.RcodeServerFailure, dns.RcodeNotImplemented, dns.RcodeRefused:
		return true
	}
	return false
}

// errSilent reports that a server did not answer in time.
var errSilent = errors.New("no answer in time")

// try asks one server once.
func (n *Nameservers) try(ctx context.Context, s *nameserver, r request) ([]byte, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, n.timeout, errSilent)
	defer cancel()
	var (
		reply []byte
		err   error
	)
	if r.network == "udp" {
		reply, err = n.tryUDP(ctx, s, r)
	} else {
		reply, err = n.tryTCP(ctx, s, r)
	}
	if err != nil {
		if errors.Is(err, os.ErrDeadlineExceeded) { // the deadline of limitWrites
			err = errSilent
		} else if ctx.Err() != nil {
			err = context.Cause(ctx)
			if errors.Is(err, context.DeadlineExceeded) {
				err = errSilent // the caller's deadline came first
			}
		}
		return nil, err
	}
	reply[0], reply[1] = r.query[0], r.query[1]
	return reply, nil
}

func (n *Nameservers) tryUDP(ctx context.Context, s *nameserver, r request) ([]byte, error) {
	if need := max(packetBuffer, udpSize(r.query, r.end)) + 1; len(r.buf) < need {
		r.buf = make([]byte, need)
	}
	for {
		c, used := s.idle.take()
		if c == nil {
			conn, err := n.dial(ctx, "udp", s.addr)
			if err != nil {
				return nil, fmt.Errorf("dialing: %w", err)
			}
			c = conn
		}
		reply, err := n.askUDP(ctx, c, r)
		if err == nil {
			s.idle.put(c, used+1)
			return reply, nil
		}
		c.Close()
		if used == 0 || ctx.Err() != nil {
			return nil, err
		}
		// An idle socket may have become unusable with its tunnel or network, so try another one.
	}
}

// askUDP sends one datagram and waits for its reply, ignoring other datagrams. When ctx ends, it closes c. After an
// error the caller must not use c.
func (n *Nameservers) askUDP(ctx context.Context, c net.Conn, r request) (reply []byte, err error) {
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer func() {
		if !stop() && err == nil {
			err = context.Cause(ctx)
		}
	}()
	sent, done := n.sent.add(r.query, r.end, r.returned)
	defer done()
	limitWrites(ctx, c)
	if _, err := c.Write(sent); err != nil {
		return nil, fmt.Errorf("sending: %w", err)
	}
	for {
		size, err := c.Read(r.buf)
		if err != nil {
			return nil, fmt.Errorf("receiving: %w", err)
		}
		if !answers(r.buf[:size], sent, r.end) {
			continue
		}
		if size == len(r.buf) { // too large and cut off: make the client retry over TCP
			cut := replyTo(r.query, r.end, rcodeOf(r.buf))
			cut[2] |= bitTC
			return cut, nil
		}
		return r.buf[:size], nil
	}
}

// limitWrites ends c's writes with ctx's deadline.
func limitWrites(ctx context.Context, c net.Conn) {
	deadline, _ := ctx.Deadline()
	_ = c.SetWriteDeadline(deadline) // Close unblocks the Write of a conn without deadlines
}

func (n *Nameservers) tryTCP(ctx context.Context, s *nameserver, r request) ([]byte, error) {
	sent, done := n.sent.add(r.query, r.end, r.returned)
	defer done()
	c, err := n.sendTCP(ctx, s, sent)
	if err != nil {
		return nil, err
	}
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	reply, err := readTCP(c)
	if err != nil {
		return nil, fmt.Errorf("receiving: %w", err)
	}
	if !answers(reply, sent, r.end) {
		return nil, errors.New("the reply answers another question")
	}
	return reply, nil
}

// sendTCP opens a connection and sends the query. The caller closes the connection.
func (n *Nameservers) sendTCP(ctx context.Context, s *nameserver, sent []byte) (net.Conn, error) {
	c, err := n.dial(ctx, "tcp", s.addr)
	if err != nil {
		return nil, fmt.Errorf("dialing: %w", err)
	}
	stop := context.AfterFunc(ctx, func() { c.Close() })
	defer stop()
	limitWrites(ctx, c)
	if err := writeTCP(c, sent); err != nil {
		c.Close()
		return nil, fmt.Errorf("sending: %w", err)
	}
	return c, nil
}

// relay sends a query with a sequence of replies (a zone transfer) to the first server that accepts the connection.
// It passes each reply, with the query's ID, to write, until the server closes the connection or sends nothing for
// the timeout. The client must check that the sequence is complete.
func (n *Nameservers) relay(ctx context.Context, r request, write func([]byte) error) error {
	sent, done := n.sent.add(r.query, r.end, r.returned)
	defer done()
	var errs []error
	for _, s := range n.order() {
		c, err := n.sendTCP(ctx, s, sent)
		if err != nil {
			errs = append(errs, fmt.Errorf("%s: %w", s.addr, err))
			continue
		}
		defer c.Close()
		defer context.AfterFunc(ctx, func() { c.Close() })()
		for count := 0; ; count++ {
			idle := time.AfterFunc(n.timeout, func() { c.Close() })
			reply, err := readTCP(c)
			idle.Stop()
			switch {
			case err != nil && count == 0:
				return fmt.Errorf("asking %s: %s: %w", n.name, s.addr, err)
			case err != nil:
				return nil
			case len(reply) < headerLen:
				return fmt.Errorf("asking %s: %s: %w", n.name, s.addr, errFormat)
			}
			reply[0], reply[1] = r.query[0], r.query[1]
			if err := write(reply); err != nil {
				return err
			}
		}
	}
	if errs == nil {
		errs = append(errs, errNoNameserver)
	}
	return fmt.Errorf("asking %s: %w", n.name, errors.Join(errs...))
}
