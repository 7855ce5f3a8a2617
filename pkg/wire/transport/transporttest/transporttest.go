// Package transporttest gives tests of other packages both ends of a session in memory.
package transporttest

import (
	"context"
	"net"
	"sync"
	"testing"
	"time"

	"kubevpn/pkg/wire/transport"
)

// Pair gives the laptop's and the manager's end of one session with one link, until the test ends.
func Pair(tb testing.TB) (laptop, manager *transport.Session) {
	tb.Helper()
	return PairOver(tb, NewListener())
}

// Listener is a net.Listener whose connections are net.Pipe's, made by Dial.
type Listener struct {
	conns chan net.Conn
	done  chan struct{}
	once  sync.Once
}

// NewListener does no I/O.
func NewListener() *Listener {
	return &Listener{conns: make(chan net.Conn), done: make(chan struct{})}
}

// Dial gives one end of a connection; Accept gives the other.
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

func (l *Listener) Accept() (net.Conn, error) {
	select {
	case c := <-l.conns:
		return c, nil
	case <-l.done:
		return nil, net.ErrClosed
	}
}

func (l *Listener) Close() error {
	l.once.Do(func() { close(l.done) })
	return nil
}

// Addr is nobody's.
func (l *Listener) Addr() net.Addr { return &net.UnixAddr{Name: "memory", Net: "unix"} }

// Network is what PairOver needs: a listener and a way to reach it.
type Network interface {
	net.Listener
	Dial(ctx context.Context) (net.Conn, error)
}

// PairOver is Pair over a network of the test's own.
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
	timeout := time.After(10 * time.Second)
	for laptop == nil || manager == nil {
		select {
		case laptop = <-laptops:
		case manager = <-managers:
		case <-timeout:
			tb.Fatal("no session after 10 s")
		}
	}
	return laptop, manager
}
