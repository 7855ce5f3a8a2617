package interceptor

import (
	"cmp"
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

	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wire/authlistener"
)

// Flow is one connection or one UDP flow.
type Flow struct {
	Protocol string         // "tcp" or "udp"
	Client   netip.AddrPort // its source
	Dst      netip.AddrPort // its destination, an address and port of the pod
}

// Target receives the requests of a claim. Its methods may be called concurrently. Targets can be compared with ==;
// requests of one client to equal targets may share a connection.
type Target interface {
	// Dial opens a connection for f. One for UDP keeps the boundaries of datagrams. If the connection has the methods
	// Reset() error and CloseWrite() error, the Interceptor resets and half-closes it with them.
	Dial(ctx context.Context, f Flow) (net.Conn, error)

	// Away reports whether the target does not answer at the moment. The Interceptor calls it for each request.
	Away() bool
}

// Claim says which requests go to a target.
type Claim struct {
	ID     string           // for the log
	Match  *httpmatch.Match // nil: everything
	Mirror bool             // the target gets a copy, and the Interceptor drops its answers
	// Observe, with Mirror, means that the target gets nothing: the claim only records.
	Observe bool
	// NoStore means that clients and caches must not keep the target's answers, whatever these say: another owner's
	// request, or one after the claim's end, could get such an answer.
	NoStore bool
	Target  Target
	Stats   *Stats // not nil

	// The Interceptor calls Record when a request begins of which the claim gets the original or a copy. Record
	// returns a function that receives the Exchange when the request has ended, and the number of bytes of each body
	// to record. A nil function, or a nil Record, records nothing. Both functions may be called concurrently, and must
	// not block.
	Record func() (end func(*Exchange), body int)

	// TLS has the certificate of the application; nil: the Interceptor does not terminate TLS. Clients negotiate the
	// protocols (ALPN) of the application.
	TLS *tls.Config
}

// all reports whether the claim matches whole connections.
func (c *Claim) all() bool { return c.Match == nil || c.Match.All() }

func (c *Claim) matches(r *http.Request) bool { return c.Match == nil || c.Match.Matches(r) }

// Stats counts the requests and copies of a claim's target. The zero Stats is ready to use; its methods may be called
// concurrently.
type Stats struct {
	requests atomic.Uint64
	failure  atomic.Pointer[Failure]
}

// Failure is an error of a target.
type Failure struct{ Error string }

// Requests returns the number of HTTP requests, other connections and UDP flows that went to the target.
func (s *Stats) Requests() uint64 { return s.requests.Load() }

// LastError returns the target's latest error, or nil.
func (s *Stats) LastError() *Failure { return s.failure.Load() }

func (s *Stats) failed(err error) {
	s.failure.Store(&Failure{err.Error()})
}

// Probe describes connections and datagrams that prove that traffic to a port comes here.
type Probe struct {
	Prefix string // of the bytes
	Length int    // of all bytes
	// Expected reports whether these bytes were announced. If so, the Interceptor sends them back and closes the
	// connection; if not, it forwards the connection like others.
	Expected func(preface []byte) bool
	// Due reports whether a probe may come at any moment. Then the Interceptor waits longer for silent clients,
	// because a probe sends its bytes only a round trip of the laptop after it has connected. May be nil.
	Due func() bool
}

// Config configures an Interceptor. Claims and Application are required.
type Config struct {
	// Claims returns the claims of a port in their order. The Interceptor calls it for each request, so it should be
	// cheap. The caller and the function must not change the slice afterwards.
	Claims func(protocol string, port uint16) []Claim

	// Application dials the pod's application. Connections for UDP keep the boundaries of datagrams.
	Application func(ctx context.Context, f Flow) (net.Conn, error)

	// ForwardedFor adds X-Forwarded-For to requests to the application, because the client's address cannot be kept.
	ForwardedFor bool

	Probe Probe

	// Checks are the kubelet's, from these networks: their requests and connections go to the application. So do
	// requests from the pod itself, in which a proxy may pass one on.
	Checks      []httpmatch.Check
	CheckedFrom []netip.Prefix

	// The Interceptor calls Trace for each HTTP request with the claims of its port and the one that gets it, nil for
	// the application. May be nil.
	Trace func(f Flow, r *http.Request, claims []Claim, to *Claim)

	// Note receives facts about a port that a user should know, such as that its TLS hides headers. It may receive the
	// same one repeatedly.
	Note func(protocol string, port uint16, text string)

	// Drain is how long requests and connections may go on after the context of ServeConn ends. Idle ones end at once.
	Drain time.Duration

	Logger *slog.Logger // may be nil
}

// Interceptor forwards connections. Its methods may be called concurrently.
type Interceptor struct {
	config Config
	log    *slog.Logger
	heads  authlistener.Bound // of the memory of what the application does not see yet

	// serverFirst has an *atomic.Bool for each TCP port: whether the server spoke on the last connection on which the
	// client was silent at first.
	serverFirst sync.Map
}

// New returns an Interceptor. It starts no goroutine and needs no Close.
func New(c Config) *Interceptor {
	i := &Interceptor{config: c, log: cmp.Or(c.Logger, slog.New(slog.DiscardHandler))}
	if i.config.Note == nil {
		i.config.Note = func(string, uint16, string) {}
	}
	i.heads.Max = maxHeads
	return i
}

// serverSpeaksFirst returns the flag of a TCP port in i.serverFirst.
func (i *Interceptor) serverSpeaksFirst(port uint16) *atomic.Bool {
	m, _ := i.serverFirst.LoadOrStore(port, new(atomic.Bool))
	return m.(*atomic.Bool)
}

// ServeConn forwards one accepted TCP connection until it ends, and closes it. After ctx ends it returns within
// Config.Drain.
func (i *Interceptor) ServeConn(ctx context.Context, conn net.Conn, f Flow) {
	hard, cut := drained(ctx, i.config.Drain)
	defer cut()
	abort := context.AfterFunc(hard, func() { reset(conn) })
	defer abort()
	defer conn.Close()

	h := i.heads.Enter(conn)
	defer h.Leave()
	h.SetCost(connCost)
	s := &sniffer{i: i, conn: conn, head: h, flow: f, dialer: i.dial}
	switch kind, err := s.sniff(ctx, hard); {
	case err != nil:
		i.log.DebugContext(ctx, "the client's connection ended before its protocol was known", "client", f.Client,
			"error", err)
		reset(conn)
	case kind == kindProbe:
		if _, err := conn.Write(s.read); err != nil {
			i.log.DebugContext(ctx, "cannot answer a probe", "client", f.Client, "error", err)
		}
	case kind == kindHTTP1 || kind == kindHTTP2:
		i.serveHTTP(ctx, hard, &clientConn{Conn: conn, flow: f, prefix: s.read, head: h, http2: kind == kindHTTP2})
	case kind == kindTLS:
		i.serveTLS(ctx, hard, s)
	default:
		i.serveRaw(hard, s)
	}
}

// drained returns a context that ends drain after ctx.
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

// destination is where a request or connection goes: a claim's target, or the application if claim is nil.
type destination struct{ claim *Claim }

func (t destination) application() bool { return t.claim == nil }

// target returns nil for the application.
func (t destination) target() Target {
	if t.claim == nil {
		return nil
	}
	return t.claim.Target
}

// errAway ends a dial to a target whose owner went away meanwhile.
var errAway = errors.New("the owner went away")

// wentAway reports whether t failed with err because its owner is away.
func wentAway(t destination, err error) bool {
	return !t.application() && (errors.Is(err, errAway) || t.claim.Target.Away())
}

// awayCheck is the interval of checks whether the owner of a target went away during a wait.
const awayCheck = 200 * time.Millisecond

// dialer opens a connection to a destination.
type dialer func(context.Context, destination, Flow) (net.Conn, error)

// dial is the dialer of plain connections.
func (i *Interceptor) dial(ctx context.Context, t destination, f Flow) (net.Conn, error) {
	if t.application() {
		return i.config.Application(ctx, f)
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	defer whenAway(t.claim.Target, func() { cancel(errAway) })()
	conn, err := t.claim.Target.Dial(ctx, f)
	if err != nil {
		if cause := context.Cause(ctx); errors.Is(cause, errAway) {
			err = cause
		}
		t.claim.Stats.failed(err)
		i.log.DebugContext(ctx, "cannot dial a target", "claim", t.claim.ID, "client", f.Client, "error", err)
		return nil, err
	}
	return conn, nil
}

// whenAway calls f once, when the target's owner is away, unless the caller calls stop before. f does not run after
// stop returns.
func whenAway(t Target, f func()) (stop func()) {
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
