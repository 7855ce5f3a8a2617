// Package transporttest provides both ends of a session in memory for tests of other packages.
package transporttest

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"kubevpn/pkg/wire/transport"
)

// Pair returns the laptop's and the manager's end of one session with one link. The session ends with the test.
func Pair(tb testing.TB) (laptop, manager *transport.Session) {
	tb.Helper()
	return PairOver(tb, NewListener())
}

// Listener is a net.Listener in memory. Dial creates its connections with net.Pipe.
type Listener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// NewListener returns an open Listener.
func NewListener() *Listener {
	return &Listener{conns: make(chan net.Conn), done: make(chan struct{})}
}

// Dial returns one end of a connection; Accept returns the other.
func (l *Listener) Dial(ctx context.Context) (net.Conn, error) {
	a, b := net.Pipe()
	select {
	case l.conns <- b:
		return a, nil
	case <-l.done:
		return nil, net.ErrClosed
	case <-ctx.Done():
		return nil, ctx.Err()
	}
}

// Accept implements net.Listener.
func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

// Close ends Accept and Dial. Open connections stay open.
func (l *Listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr returns a placeholder.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "unix"} }

// Network is a listener and the function that dials it.
type Network interface {
	net.Listener
	Dial(ctx context.Context) (net.Conn, error)
}

// PairOver is Pair over n, which it closes when the test ends.
func PairOver(tb testing.TB, n Network) (laptop, manager *transport.Session) {
	tb.Helper()
	laptops, managers := make(chan *transport.Session, 1), make(chan *transport.Session, 1)
	server := transport.NewServer(transport.ServerConfig{
		OnSession: func(_ context.Context, s *transport.Session) { managers <- s },
	})
	client := transport.NewClient(transport.ClientConfig{
		Dial: n.Dial, Links: 1, Budget: transport.NewBudget(1<<10, 64<<20),
		OnSession: func(_ context.Context, s *transport.Session) { laptops <- s },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := server.Serve(ctx, n); err != nil {
			tb.Errorf("serving: %v", err)
		}
	})
	wg.Go(func() {
		if err := client.Run(ctx); err != nil {
			tb.Errorf("running the client: %v", err)
		}
	})
	tb.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	timeout := time.After(time.Minute)
	for laptop == nil || manager == nil {
		select {
		case laptop = <-laptops:
		case manager = <-managers:
		case <-timeout:
			tb.Fatal("no session after a minute")
		}
	}
	return laptop, manager
}
