// Package door is a TCP port that says nothing to those who may not come in: no banner, no status, a closed connection and
// a number in the log.
//
//	Accept from the kernel ─▶ room? ─▶ Config.Admit ─▶ Door.Accept: those who have shown what they must
//	                            │          │
//	                            └──────────┴─▶ closed, counted by reason (tally)
//
// Shake is the part of an Admit that is the same everywhere: TLS, whose error becomes a Reason.
package door

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"
)

// Connections that have not shown yet what they may: of one address, which is usually an API server or the traffic manager,
// and in all.
const (
	MaxArriving     = 256
	MaxArrivingFrom = 64
)

// acceptPause follows a failed accept.
const acceptPause = time.Second

// Config is what a Door is made of. All fields are needed.
type Config struct {
	Name     string       // in the log: "proxy port"
	Listener net.Listener // the Door's from now on
	// Admit makes of a connection the one that Accept gives, or says why it may not come in; its error says more, where there
	// is more. It bounds its own time, and ends soon when the connection is closed. The connection is the Door's if it is
	// turned away.
	Admit  func(net.Conn) (net.Conn, Reason, error)
	Logger *slog.Logger
}

// Door lets in those whom Admit does. It is a net.Listener. Its methods may be called concurrently.
type Door struct {
	cfg   Config
	tally *tally

	arrived chan net.Conn
	closed  chan struct{}
	close   func() error

	mu       sync.Mutex
	arriving int
	from     map[netip.Addr]int
}

// New starts nothing: Run does.
func New(cfg Config) *Door {
	d := &Door{
		cfg: cfg, tally: newTally(cfg.Name+": turned away", cfg.Logger),
		arrived: make(chan net.Conn), closed: make(chan struct{}), from: make(map[netip.Addr]int),
	}
	d.close = sync.OnceValue(func() error {
		close(d.closed)
		return cfg.Listener.Close()
	})
	return d
}

// Accept gives the next connection that was let in. It ends with net.ErrClosed.
func (d *Door) Accept() (net.Conn, error) {
	select {
	case c := <-d.arrived:
		return c, nil
	case <-d.closed:
		return nil, net.ErrClosed
	}
}

// Close ends Accept and Run.
func (d *Door) Close() error { return d.close() }

func (d *Door) isClosed() bool {
	select {
	case <-d.closed:
		return true
	default:
		return false
	}
}

// Addr is the port's.
func (d *Door) Addr() net.Addr { return d.cfg.Listener.Addr() }

// Count counts somebody who was turned away after Accept had given the connection.
func (d *Door) Count(why Reason, remote net.Addr) { d.tally.add(why, remote.String()) }

// Turned is how many were turned away for a reason.
func (d *Door) Turned(why Reason) int { return d.tally.total(why) }

// Run lets connections in until ctx ends or the Door is closed, and then gives nil. It waits for those who arrive.
func (d *Door) Run(ctx context.Context) error {
	var work sync.WaitGroup
	defer work.Wait()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	stop := context.AfterFunc(ctx, func() { d.Close() })
	defer stop()
	defer d.Close()
	work.Go(func() { d.tally.run(ctx) })
	for {
		conn, err := d.cfg.Listener.Accept()
		switch {
		case err != nil && d.isClosed():
			return nil
		case errors.Is(err, net.ErrClosed):
			return fmt.Errorf("accepting at the %s: %w", d.cfg.Name, err)
		case err != nil: // out of file descriptors, or the peer went away already: it passes
			d.cfg.Logger.Warn("accepting at the "+d.cfg.Name, "err", err)
			select {
			case <-time.After(acceptPause):
			case <-ctx.Done():
			}
			continue
		}
		from := remote(conn)
		if !d.enter(from) {
			d.Count(TooMany, conn.RemoteAddr())
			conn.Close()
			continue
		}
		work.Go(func() {
			defer d.leave(from)
			d.serve(ctx, conn)
		})
	}
}

func remote(conn net.Conn) netip.Addr {
	if addr, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		return addr.AddrPort().Addr().Unmap()
	}
	return netip.Addr{}
}

// enter takes a place among those that arrive, if there is one.
func (d *Door) enter(from netip.Addr) bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	if d.arriving >= MaxArriving || d.from[from] >= MaxArrivingFrom {
		return false
	}
	d.arriving++
	d.from[from]++
	return true
}

func (d *Door) leave(from netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.arriving--
	if d.from[from]--; d.from[from] == 0 {
		delete(d.from, from)
	}
}

// serve hands conn to Accept, or closes it.
func (d *Door) serve(ctx context.Context, conn net.Conn) {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	c, why, err := d.cfg.Admit(conn)
	if !stop() {
		return // the Door is closed, and so is conn
	}
	if why != "" {
		d.Count(why, conn.RemoteAddr())
		d.cfg.Logger.Debug(d.cfg.Name+": turned away", "reason", why, "remote", conn.RemoteAddr(), "err", err)
		conn.Close()
		return
	}
	select {
	case d.arrived <- c:
	case <-d.closed:
		c.Close()
	}
}
