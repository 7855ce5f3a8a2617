package netstack

import (
	"context"
	"io"
	"net"
	"net/netip"
	"strconv"
	"sync"
	"syscall"
	"testing"
	"time"
)

func itoa(port uint16) string { return strconv.Itoa(int(port)) }

// idleStream is a Stream as the transport's should be: it holds no buffer.
type idleStream struct {
	mu      sync.Mutex
	got     int
	changed chan struct{} // capacity 1
	send    chan []byte
	reset   chan struct{}
	once    sync.Once
}

func dialIdle(made chan<- *idleStream) func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
	return func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
		s := &idleStream{changed: make(chan struct{}, 1), send: make(chan []byte), reset: make(chan struct{})}
		made <- s
		return s, nil
	}
}

func (s *idleStream) Read([]byte) (int, error) { panic("WriteTo is there") }

func (s *idleStream) WriteTo(w io.Writer) (int64, error) {
	total := int64(0)
	for {
		select {
		case b := <-s.send:
			if b == nil {
				return total, nil
			}
			n, err := w.Write(b)
			total += int64(n)
			if err != nil {
				return total, err
			}
		case <-s.reset:
			return total, syscall.ECONNRESET
		}
	}
}

func (s *idleStream) Write(p []byte) (int, error) {
	s.mu.Lock()
	s.got += len(p)
	s.mu.Unlock()
	wake(s.changed)
	return len(p), nil
}

func (s *idleStream) CloseWrite() error { return nil }
func (s *idleStream) Close() error      { return nil }
func (s *idleStream) Reset() error {
	s.once.Do(func() { close(s.reset) })
	return nil
}

// wait waits until n bytes have come.
func (s *idleStream) wait(t testing.TB, n int) {
	t.Helper()
	timeout := time.After(10 * time.Second)
	for {
		s.mu.Lock()
		got := s.got
		s.mu.Unlock()
		if got >= n {
			return
		}
		select {
		case <-s.changed:
		case <-timeout:
			t.Fatalf("%d of %d bytes came", got, n)
		}
	}
}

// exchange opens a flow and sends a byte each way.
func exchange(t *testing.T, k *kernel, made <-chan *idleStream) (*net.TCPConn, *idleStream) {
	t.Helper()
	c := k.mustConnect("tcp4", 80)
	s := <-made
	if _, err := c.Write([]byte("a")); err != nil {
		t.Fatal(err)
	}
	s.wait(t, 1)
	s.send <- []byte("b")
	if _, err := io.ReadFull(c, make([]byte, 1)); err != nil {
		t.Fatal(err)
	}
	return c, s
}

// measureOwn is what n application sockets, and what the test keeps of n flows, take by themselves.
func measureOwn(t *testing.T, n int) uint64 {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	var keep []any
	before := memory()
	for range n {
		c, err := net.Dial("tcp4", l.Addr().String())
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { c.Close() })
		keep = append(keep, c, &idleStream{changed: make(chan struct{}, 1), send: make(chan []byte), reset: make(chan struct{})})
		s, err := l.Accept()
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
	}
	after := memory()
	_ = keep[len(keep)-1]
	return after - before
}
