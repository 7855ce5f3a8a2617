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

	"kubevpn/pkg/wakeup"
)

func itoa(port uint16) string { return strconv.Itoa(int(port)) }

// idleStream is a Stream that holds no buffer, like the transport's.
type idleStream struct {
	mu      sync.Mutex
	got     int
	changed wakeup.Signal
	send    chan []byte
	reset   chan struct{}
	once    sync.Once
}

func dialIdle(made chan<- *idleStream) func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
	return func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
		s := &idleStream{changed: wakeup.NewSignal(), send: make(chan []byte), reset: make(chan struct{})}
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
	s.changed.Raise()
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

// measureOwn returns the memory of n application sockets and of the test's records of n flows.
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
		keep = append(keep, c, &idleStream{changed: wakeup.NewSignal(), send: make(chan []byte), reset: make(chan struct{})})
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

// idlePackets is a PacketStream with a method Wait, like the transport's.
type idlePackets struct {
	got    chan<- struct{}
	closed chan struct{}
	once   sync.Once
}

func (s *idlePackets) Wait() error                    { <-s.closed; return net.ErrClosed }
func (s *idlePackets) ReadPacket([]byte) (int, error) { panic("Wait has not returned") }
func (s *idlePackets) WritePacket([]byte) error       { s.got <- struct{}{}; return nil }
func (s *idlePackets) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// An idle UDP flow takes less than 8 KiB.
func TestIdleUDPFlowTakesLittleMemory(t *testing.T) {
	const n, limit = 2000, 8 << 10
	got := make(chan struct{}, n)
	k := newKernel(t, Config{Dialer: dialer{udp: func(context.Context, netip.AddrPort, netip.AddrPort) (PacketStream, error) {
		return &idlePackets{got: got, closed: make(chan struct{})}, nil
	}}})
	// One socket of the application makes all flows, to different ports.
	var c *net.UDPConn
	if err := k.ns.Do(func() (err error) { c, err = net.ListenUDP("udp4", nil); return err }); err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	send := func(port int) {
		c.WriteToUDPAddrPort([]byte("a datagram"), netip.AddrPortFrom(pod("udp4"), uint16(port)))
		select {
		case <-got:
		case <-time.After(10 * time.Second):
			t.Fatal("a datagram got lost")
		}
	}
	send(1)
	before := memory()
	for i := range n {
		send(1000 + i)
	}
	each := (int64(memory()) - int64(before)) / n
	t.Logf("%d idle UDP flows: %d bytes each", n, each)
	if each > limit {
		t.Errorf("%d bytes for an idle UDP flow", each)
	}
}
