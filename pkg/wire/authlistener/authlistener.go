// Package authlistener is a net.Listener that returns authenticated connections only. It sends nothing to clients that
// do not authenticate: no banner and no status. It closes their connections and counts them in the log.
//
//	Accept of the TCP listener ─▶ Config.Authenticate ─┬─▶ Listener.Accept: authenticated connections
//	                                                   └─▶ rejected: closed, counted by reason (tally)
//
// The number of pending connections, those that have not authenticated yet, is bounded: a Bound evicts the oldest of
// the busiest address. Servers without such a phase use a Bound of their own.
//
// Handshake is the part of Config.Authenticate that all users share: TLS, whose errors become Reasons.
package authlistener

import (
	"context"
	"log/slog"
	"net"
	"sync"
)

// Bounds on pending connections: in total, and from one address, which is usually an API server or the traffic manager.
const (
	MaxPending     = 256
	MaxPendingFrom = 64
)

// Config configures a Listener. All fields are required.
type Config struct {
	Name     string       // for the log: "proxy port"
	Listener net.Listener // of TCP; the Listener owns it
	// Authenticate returns the connection that Accept returns, or the Reason to reject it; the error adds details for
	// the log and may be nil. It bounds its own time, and returns soon after the connection is closed. The Listener
	// closes a rejected connection.
	Authenticate func(net.Conn) (net.Conn, Reason, error)
	Logger       *slog.Logger
}

// Listener accepts the connections that Authenticate accepts. It implements net.Listener. Its methods may be called
// concurrently.
type Listener struct {
	cfg   Config
	tally *tally

	accepted chan net.Conn
	closed   chan struct{}
	close    func() error

	pending Bound // the connections that have not authenticated yet, until Config.Authenticate has returned
}

// New creates a Listener. It accepts nothing before Run.
func New(cfg Config) *Listener {
	l := &Listener{
		cfg: cfg, tally: newTally(cfg.Name+": rejected", cfg.Logger),
		accepted: make(chan net.Conn), closed: make(chan struct{}),
		pending: Bound{Max: MaxPending, MaxFrom: MaxPendingFrom},
	}
	l.close = sync.OnceValue(func() error {
		close(l.closed)
		return cfg.Listener.Close()
	})
	return l
}

// Accept returns the next authenticated connection. After Close it returns net.ErrClosed.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.accepted:
		return c, nil
	case <-l.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept and Run.
func (l *Listener) Close() error { return l.close() }

// Addr returns the address of the TCP listener.
func (l *Listener) Addr() net.Addr { return l.cfg.Listener.Addr() }

// CountRejected counts a connection that the caller rejected after Accept had returned it.
func (l *Listener) CountRejected(why Reason, remote net.Addr) { l.tally.add(why, remote.String()) }

// Rejected returns how many connections were rejected for a reason.
func (l *Listener) Rejected(why Reason) int { return l.tally.total(why) }

// Pending returns the number of connections that have not authenticated yet.
func (l *Listener) Pending() int { return l.pending.Len() }

// Run authenticates connections until ctx ends or Close is called, and then returns nil. It waits for pending
// connections to end.
func (l *Listener) Run(ctx context.Context) error {
	var work sync.WaitGroup
	defer work.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	defer l.Close()
	_ = Serve(ctx, l.cfg.Listener, l.cfg.Logger, func(conn net.Conn) { // its error is that of Close
		pending := l.pending.Enter(conn)
		work.Go(func() { l.serve(ctx, conn, pending) })
	})
	return nil
}

// serve authenticates a connection, and passes it to Accept or closes it.
func (l *Listener) serve(ctx context.Context, conn net.Conn, pending *Held) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	c, why, err := l.cfg.Authenticate(conn)
	if pending.Leave() {
		why = TooMany
	}
	if !stop() {
		return // conn is closed
	}
	if why != "" {
		l.CountRejected(why, conn.RemoteAddr())
		l.cfg.Logger.Debug(l.cfg.Name+": rejected", "reason", why, "remote", conn.RemoteAddr(), "err", err)
		conn.Close()
		return
	}
	select {
	case l.accepted <- c:
	case <-l.closed:
		c.Close()
	}
}
