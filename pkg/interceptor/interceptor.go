package interceptor

import (
	"context"
	"crypto/tls"
	"errors"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"sync"
	"sync/atomic"
	"time"

	"kubevpn/pkg/match"
)

// Flow is one connection or one UDP flow.
type Flow struct {
	Protocol string         // "tcp" or "udp"
	Client   netip.AddrPort // whom it is from
	Dst      netip.AddrPort // address and port of the pod that it was for
}

// Taker is who gets what a claim takes. Its methods may be called at the same time. Takers can be compared with ==; requests
// of one client to equal takers may share a connection.
type Taker interface {
	// Dial opens a way for f. A connection for UDP keeps the borders of datagrams. Connections are reset by their method
	// Reset() error, if they have one, and half-closed by CloseWrite() error.
	Dial(ctx context.Context, f Flow) (net.Conn, error)

	// Away tells that nobody answers at the moment. It is asked for each request.
	Away() bool
}

// Claim says what a taker gets.
type Claim struct {
	ID     string       // for the log
	Match  *match.Match // nil: everything
	Mirror bool         // the taker gets a copy, and nobody gets its answers
	Taker  Taker
	Stats  *Stats // not nil

	// TLS has the certificate of the application; nil: what TLS hides is not looked at. Protocols (ALPN) are negotiated
	// with the application's.
	TLS *tls.Config
}

// all tells whether the claim takes whole connections.
func (c *Claim) all() bool { return c.Match == nil || c.Match.All() }

func (c *Claim) takes(r *http.Request) bool { return c.Match == nil || c.Match.Takes(r) }

// Stats counts what a claim's taker got. The zero Stats is ready; its methods may be called at the same time.
type Stats struct {
	requests, lost atomic.Uint64
	failure        atomic.Pointer[Failure]
}

// Failure is an error of a taker.
type Failure struct {
	Time  time.Time
	Error string
}

// Requests is how many HTTP requests, other connections and UDP flows the taker was given.
func (s *Stats) Requests() uint64 { return s.requests.Load() }

// Lost is how many copies for a mirror were given up: the taker was slower than the original, or failed.
func (s *Stats) Lost() uint64 { return s.lost.Load() }

// LastError is the taker's latest error, or nil.
func (s *Stats) LastError() *Failure { return s.failure.Load() }

func (s *Stats) failed(err error) {
	s.failure.Store(&Failure{Time: time.Now(), Error: err.Error()})
}

// Canary describes connections whose bytes, or datagrams that, prove that what is sent to a port comes here.
type Canary struct {
	Prefix string // that it begins with
	Length int    // of all of its bytes
	// Expected tells whether these bytes were announced. If so they are sent back, and the connection is closed; if not it
	// is a connection like others.
	Expected func(preface []byte) bool
}

// Config is what an Interceptor needs. Claims and Application are not optional.
type Config struct {
	// Claims gives the claims of a port in their order. It is called for each request: it should be cheap. Nobody changes
	// the slice afterwards.
	Claims func(protocol string, port uint16) []Claim

	// Application dials the pod's own. Connections for UDP keep the borders of datagrams.
	Application func(ctx context.Context, f Flow) (net.Conn, error)

	// ForwardedFor has requests to the application say X-Forwarded-For: the client's address cannot be kept.
	ForwardedFor bool

	Canary Canary

	// Note hears what a user should know of a port: that its TLS hides headers. It may hear it more than once.
	Note func(protocol string, port uint16, text string)

	// Drain is how long requests and connections may go on when the context of ServeConn has ended. Those that are idle end at
	// once.
	Drain time.Duration

	Logger *slog.Logger // nil: nobody
}

// Interceptor passes connections on. Its methods may be called at the same time.
type Interceptor struct {
	config Config
	log    *slog.Logger
	server *http.Server
	ports  sync.Map // of portKey to *portMemory
}

type portKey struct {
	protocol string
	port     uint16
}

// portMemory is what was seen of a port.
type portMemory struct {
	// serverFirst: the last connection on which the client was silent at first was one on which the server spoke.
	serverFirst atomic.Bool
}

// New gives an Interceptor. It has no goroutine and nothing to close.
func New(c Config) *Interceptor {
	i := &Interceptor{config: c, log: c.Logger}
	if i.log == nil {
		i.log = slog.New(slog.DiscardHandler)
	}
	if i.config.Note == nil {
		i.config.Note = func(string, uint16, string) {}
	}
	i.server = i.newServer()
	return i
}

func (i *Interceptor) memory(f Flow) *portMemory {
	key := portKey{f.Protocol, f.Dst.Port()}
	if m, ok := i.ports.Load(key); ok {
		return m.(*portMemory)
	}
	m, _ := i.ports.LoadOrStore(key, new(portMemory))
	return m.(*portMemory)
}

// ServeConn passes one accepted TCP connection on until it has ended, and closes it. When ctx ends it ends as well, within
// Config.Drain.
func (i *Interceptor) ServeConn(ctx context.Context, conn net.Conn, f Flow) {
	hard, cut := drained(ctx, i.config.Drain)
	defer cut()
	abort := context.AfterFunc(hard, func() { reset(conn) })
	defer abort()
	defer conn.Close()

	s := &sniffer{i: i, conn: conn, flow: f, dialer: i.dial}
	switch kind, err := s.sniff(ctx, hard); {
	case err != nil:
		i.log.DebugContext(ctx, "the client's connection ended before it was known what it is", "client", f.Client, "error", err)
		reset(conn)
	case kind == kindCanary:
		if _, err := conn.Write(s.read); err != nil {
			i.log.DebugContext(ctx, "answering a canary", "client", f.Client, "error", err)
		}
	case kind == kindHTTP1 || kind == kindHTTP2:
		i.serveHTTP(ctx, hard, &clientConn{Conn: conn, flow: f, prefix: s.read, http2: kind == kindHTTP2})
	case kind == kindTLS:
		i.serveTLS(ctx, hard, s)
	default:
		i.serveRaw(hard, s)
	}
}

// drained gives a context that ends drain after ctx.
func drained(ctx context.Context, drain time.Duration) (context.Context, context.CancelFunc) {
	if drain <= 0 {
		return context.WithCancel(ctx)
	}
	hard, cancel := context.WithCancel(context.WithoutCancel(ctx))
	stop := context.AfterFunc(ctx, func() {
		timer := time.AfterFunc(drain, cancel)
		context.AfterFunc(hard, func() { timer.Stop() })
	})
	return hard, func() { stop(); cancel() }
}

// target is where something goes: a claim's taker, or the application if claim is nil.
type target struct{ claim *Claim }

func (t target) application() bool { return t.claim == nil }

// taker is nil for the application.
func (t target) taker() Taker {
	if t.claim == nil {
		return nil
	}
	return t.claim.Taker
}

// errAway ends a dial to a taker whose owner has gone away meanwhile.
var errAway = errors.New("the owner went away")

// wentAway tells whether t failed, with err, because its owner is away.
func wentAway(t target, err error) bool {
	return !t.application() && (errors.Is(err, errAway) || t.claim.Taker.Away())
}

// awayCheck is how often is looked whether the owner whom something waits for is still there.
const awayCheck = 200 * time.Millisecond

// dialer opens a connection to a target.
type dialer func(context.Context, target, Flow) (net.Conn, error)

// dial is the dialer.
func (i *Interceptor) dial(ctx context.Context, t target, f Flow) (net.Conn, error) {
	if t.application() {
		return i.config.Application(ctx, f)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer whenAway(t.claim.Taker, func() { cancel(errAway) })()
	conn, err := t.claim.Taker.Dial(ctx, f)
	if err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errAway) {
			err = cause
		}
		t.claim.Stats.failed(err)
		i.log.DebugContext(ctx, "dialing a taker", "claim", t.claim.ID, "client", f.Client, "error", err)
		return nil, err
	}
	return conn, nil
}

// whenAway calls f once when the taker's owner is away, unless it is stopped before. f is not running when stop returns.
func whenAway(t Taker, f func()) (stop func()) {
	var mu sync.Mutex
	stopped := false
	var timer *time.Timer
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(awayCheck, func() {
		mu.Lock()
		defer mu.Unlock()
		switch {
		case stopped:
		case t.Away():
			f()
		default:
			timer.Reset(awayCheck)
		}
	})
	return func() {
		timer.Stop()
		mu.Lock()
		defer mu.Unlock()
		stopped = true
	}
}
