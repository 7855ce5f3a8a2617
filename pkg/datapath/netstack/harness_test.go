package netstack

import (
	"context"
	"crypto/rand"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// dialer is a Dialer of functions. A nil function fails with EHOSTUNREACH.
type dialer struct {
	tcp  func(ctx context.Context, src, dst netip.AddrPort) (Stream, error)
	udp  func(ctx context.Context, src, dst netip.AddrPort) (PacketStream, error)
	echo func(ctx context.Context, src, dst netip.Addr) (PacketStream, error)
}

func (d dialer) DialTCP(ctx context.Context, src, dst netip.AddrPort) (Stream, error) {
	if d.tcp == nil {
		return nil, syscall.EHOSTUNREACH
	}
	return d.tcp(ctx, src, dst)
}

func (d dialer) DialUDP(ctx context.Context, src, dst netip.AddrPort) (PacketStream, error) {
	if d.udp == nil {
		return nil, syscall.EHOSTUNREACH
	}
	return d.udp(ctx, src, dst)
}

func (d dialer) DialEcho(ctx context.Context, src, dst netip.Addr) (PacketStream, error) {
	if d.echo == nil {
		return nil, syscall.EHOSTUNREACH
	}
	return d.echo(ctx, src, dst)
}

// loopback dials the same port at 127.0.0.1 or ::1 of the namespace that the test runs in.
func loopback() dialer {
	local := func(dst netip.AddrPort) netip.AddrPort {
		if dst.Addr().Is4() {
			return netip.AddrPortFrom(netip.MustParseAddr("127.0.0.1"), dst.Port())
		}
		return netip.AddrPortFrom(netip.IPv6Loopback(), dst.Port())
	}
	return dialer{
		tcp: func(ctx context.Context, src, dst netip.AddrPort) (Stream, error) {
			c, err := new(net.Dialer).DialContext(ctx, "tcp", local(dst).String())
			if err != nil {
				return nil, err
			}
			return &connStream{TCPConn: c.(*net.TCPConn)}, nil
		},
		udp: func(ctx context.Context, src, dst netip.AddrPort) (PacketStream, error) {
			c, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(local(dst)))
			if err != nil {
				return nil, err
			}
			c.SetReadBuffer(4 << 20)
			return connPackets{c}, nil
		},
	}
}

// connStream makes a Stream of a TCP connection.
type connStream struct {
	*net.TCPConn
	finSent atomic.Bool
}

var streamBuffers = sync.Pool{New: func() any { return new([256 << 10]byte) }}

func (s *connStream) WriteTo(w io.Writer) (int64, error) {
	buf := streamBuffers.Get().(*[256 << 10]byte)
	defer streamBuffers.Put(buf)
	return io.CopyBuffer(struct{ io.Writer }{w}, struct{ io.Reader }{s}, buf[:])
}

// Read distinguishes a reset from a FIN. The kernel reports a reset once, perhaps to Write. wasReset comes first: a
// connection that ends with a FIN from both sides is closed only after finSent is set.
func (s *connStream) Read(p []byte) (int, error) {
	n, err := s.TCPConn.Read(p)
	if err == io.EOF && wasReset(s.TCPConn) && !s.finSent.Load() {
		err = syscall.ECONNRESET
	}
	return n, err
}

func (s *connStream) CloseWrite() error {
	s.finSent.Store(true)
	return s.TCPConn.CloseWrite()
}

func (s *connStream) Reset() error {
	s.SetLinger(0)
	return s.Close()
}

// connPackets makes a PacketStream of a connected UDP socket.
type connPackets struct{ *net.UDPConn }

func (s connPackets) ReadPacket(p []byte) (int, error) { return s.Read(p) }
func (s connPackets) WritePacket(p []byte) error       { _, err := s.Write(p); return err }

// packets is a PacketStream in memory. WritePacket sends to requests and ReadPacket receives from replies. A nil reply
// makes ReadPacket return err.
type packets struct {
	requests, replies chan []byte
	err               error
	closed            chan struct{}
	once              sync.Once
}

func newPackets() *packets {
	return &packets{requests: make(chan []byte, 100), replies: make(chan []byte, 100), closed: make(chan struct{})}
}

func (s *packets) ReadPacket(p []byte) (int, error) {
	select {
	case reply := <-s.replies:
		if reply == nil {
			return 0, s.err
		}
		return copy(p, reply), nil
	case <-s.closed:
		return 0, net.ErrClosed
	}
}

func (s *packets) WritePacket(p []byte) error {
	select {
	case s.requests <- append([]byte{}, p...):
		return nil
	case <-s.closed:
		return net.ErrClosed
	}
}

func (s *packets) Close() error {
	s.once.Do(func() { close(s.closed) })
	return nil
}

// echoing dials a stream that replies to every ping.
func echoing(ctx context.Context, src, dst netip.Addr) (PacketStream, error) {
	s := newPackets()
	s.replies = s.requests
	return s, nil
}

// start runs a stack until the test ends, and then checks that it ends well.
func start(t testing.TB, cfg Config) *Stack {
	t.Helper()
	s, err := New(cfg)
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		select {
		case err := <-done:
			if err != nil {
				t.Errorf("Run: %v", err)
			}
		case <-time.After(20 * time.Second):
			t.Error("Run did not end")
		}
		if n := s.Stats(); n.TCP.Open != 0 || n.UDP.Open != 0 || n.Echo.Open != 0 {
			t.Errorf("flows left open: %+v", n)
		}
	})
	return s
}

// serve accepts connections on the loopback interface of the family, and calls handle for each.
func serve(t testing.TB, network string, handle func(*net.TCPConn)) (port uint16) {
	t.Helper()
	addr := "127.0.0.1:0"
	if network == "tcp6" {
		addr = "[::1]:0"
	}
	l, err := net.Listen(network, addr)
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer c.Close()
				handle(c.(*net.TCPConn))
			})
		}
	})
	t.Cleanup(func() {
		l.Close()
		wg.Wait()
	})
	return uint16(l.Addr().(*net.TCPAddr).Port)
}

// isReset returns an error unless err is ECONNRESET.
func isReset(err error) error {
	if !errors.Is(err, syscall.ECONNRESET) {
		return fmt.Errorf("got %v, want ECONNRESET", err)
	}
	return nil
}

var randomBlock = sync.OnceValue(func() []byte {
	b := make([]byte, 1<<20+13)
	rand.Read(b)
	return b
})

// sendRandom sends size bytes that do not repeat at a power of two, and returns their checksum.
func sendRandom(w io.Writer, size int) [32]byte {
	block := randomBlock()
	h := sha256.New()
	for size > 0 {
		n, err := w.Write(block[:min(size, len(block))])
		h.Write(block[:n])
		if err != nil {
			break
		}
		size -= n
	}
	return [32]byte(h.Sum(nil))
}

func expected(size int) [32]byte { return sendRandom(io.Discard, size) }
