package managertest

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/netip"
	"reflect"
	"sync"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/transport"
)

// ServeAt accepts TCP connections and datagrams at an address of loopback, and answers with the address. It returns the
// port.
func ServeAt(t *testing.T, addr string) int32 {
	t.Helper()
	l, err := net.Listen("tcp", addr+":0")
	if err != nil {
		t.Fatal(err)
	}
	datagrams, err := net.ListenPacket("udp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { l.Close(); datagrams.Close() })
	wg.Go(func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			io.WriteString(c, addr)
			c.Close()
		}
	})
	wg.Go(func() {
		for b := make([]byte, 100); ; {
			_, from, err := datagrams.ReadFrom(b)
			if err != nil {
				return
			}
			_, _ = datagrams.WriteTo([]byte(addr), from)
		}
	})
	return int32(l.Addr().(*net.TCPAddr).Port)
}

// Timeout bounds the wait for something that must happen. No test waits for it unless it fails.
const Timeout = time.Minute

// Connect returns a laptop's session with the manager at addr. The session ends with the test.
func Connect(t testing.TB, addr string) *transport.Session {
	t.Helper()
	arrived := make(chan *transport.Session, 1)
	client := transport.NewClient(transport.ClientConfig{
		Dial: func(ctx context.Context) (net.Conn, error) {
			var d net.Dialer
			return d.DialContext(ctx, "tcp", addr)
		},
		OnSession: func(_ context.Context, s *transport.Session) { arrived <- s },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := client.Run(ctx); err != nil && !errors.Is(err, context.Canceled) {
			t.Logf("client: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	select {
	case s := <-arrived:
		return s
	case <-time.After(Timeout):
		t.Fatal("no session")
		return nil
	}
}

func Listen(t testing.TB) net.Listener {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	return l
}

// Control is the laptop's end of a control stream.
type Control struct {
	t      testing.TB
	Stream *transport.Stream // nil: made by NewControl
	next   func() api.ControlMessage
}

// NewControl returns a Control whose messages come from next.
func NewControl(t testing.TB, next func() api.ControlMessage) *Control {
	return &Control{t: t, next: next}
}

// Next returns the manager's next message.
func (c *Control) Next() api.ControlMessage {
	c.t.Helper()
	return c.next()
}

// Until reads messages until wanted accepts a State.
func (c *Control) Until(what string, wanted func(*api.ManagerState) bool) api.ManagerState {
	c.t.Helper()
	for {
		m := c.Next()
		if m.State != nil && wanted(m.State) {
			return *m.State
		}
		if m.State != nil {
			c.t.Logf("waiting for %s: %+v", what, *m.State)
		}
	}
}

// UntilNames reads messages until there are names.
func (c *Control) UntilNames() *api.NameDelta {
	c.t.Helper()
	for {
		if m := c.Next(); m.Names != nil {
			return m.Names
		}
	}
}

// AddsNames checks the names that the manager adds next.
func (c *Control) AddsNames(want map[string][]string) {
	c.t.Helper()
	if d := c.UntilNames(); !reflect.DeepEqual(d.Add, want) {
		c.t.Errorf("names %+v, want %v", d, want)
	}
}

// Hello opens a control stream.
func Hello(t testing.TB, laptop *transport.Session, greeting any) *Control {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	st, err := laptop.Open(ctx, transport.Request{Proto: transport.ProtoControl})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { st.Close() })
	if err := json.NewEncoder(st).Encode(greeting); err != nil {
		t.Fatal(err)
	}
	lines := bufio.NewReader(st)
	return &Control{t, st, func() (m api.ControlMessage) {
		t.Helper()
		st.SetReadDeadline(time.Now().Add(Timeout))
		line, err := lines.ReadBytes('\n')
		if err != nil {
			t.Fatalf("reading a control message: %v", err)
		}
		if err := json.Unmarshal(line, &m); err != nil {
			t.Fatal(err)
		}
		return m
	}}
}

// TCPPod serves every connection to a new loopback address with handle until the test ends.
func TCPPod(t testing.TB, handle func(*net.TCPConn)) string {
	t.Helper()
	l := Listen(t)
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { l.Close() })
	wg.Go(func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			wg.Go(func() {
				defer conn.Close()
				conn.SetDeadline(time.Now().Add(Timeout))
				handle(conn.(*net.TCPConn))
			})
		}
	})
	return l.Addr().String()
}

func ReadAll(t testing.TB, r io.Reader) string {
	t.Helper()
	b, err := io.ReadAll(r)
	if err != nil {
		t.Errorf("reading: %v", err)
	}
	return string(b)
}

// LogLines receives the lines of a log.
type LogLines chan string

func (l LogLines) Write(p []byte) (int, error) {
	l <- string(p)
	return len(p), nil
}

// UDPPod answers every datagram with its name, a colon and the datagram.
func UDPPod(t testing.TB, name string) string {
	t.Helper()
	c, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	var wg sync.WaitGroup
	t.Cleanup(wg.Wait)
	t.Cleanup(func() { c.Close() })
	wg.Go(func() {
		b := make([]byte, 65536)
		for {
			n, from, err := c.ReadFromUDPAddrPort(b)
			if err != nil {
				return
			}
			_, _ = c.WriteToUDPAddrPort(append([]byte(name+":"), b[:min(n, 60000)]...), from)
		}
	})
	return c.LocalAddr().String()
}

// Ask sends a datagram and returns the answer.
func Ask(t testing.TB, p *transport.Packets, question string) (string, error) {
	t.Helper()
	if err := p.WritePacket([]byte(question)); err != nil {
		return "", err
	}
	b := make([]byte, 65536)
	n, err := p.ReadPacket(b)
	return string(b[:n]), err
}

func Expect(t testing.TB, p *transport.Packets, question, want string) {
	t.Helper()
	if got, err := Ask(t, p, question); err != nil || got != want {
		t.Errorf("asked %q, got %q (%v), want %q", question, got, err, want)
	}
}

// Serve accepts sessions on loopback until the test ends, and serves each with onSession. It returns the address.
func Serve(t testing.TB, onSession func(context.Context, *transport.Session)) string {
	t.Helper()
	l := Listen(t)
	server := transport.NewServer(transport.ServerConfig{OnSession: onSession})
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	wg.Go(func() {
		if err := server.Serve(ctx, l); err != nil && ctx.Err() == nil {
			t.Errorf("serving sessions: %v", err)
		}
	})
	t.Cleanup(func() {
		cancel()
		wg.Wait()
	})
	return l.Addr().String()
}

// Open opens a TCP flow to addr, which the test resets at its end.
func Open(t testing.TB, laptop *transport.Session, addr string) (*transport.Stream, error) {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	st, err := laptop.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Dst: netip.MustParseAddrPort(addr)})
	if err == nil {
		st.SetDeadline(time.Now().Add(Timeout))
		t.Cleanup(func() { st.Reset() })
	}
	return st, err
}

// OpenPackets opens a flow of datagrams, which the test closes at its end.
func OpenPackets(t testing.TB, laptop *transport.Session, proto transport.Proto, dst string) *transport.Packets {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), Timeout)
	defer cancel()
	p, err := laptop.OpenPackets(ctx, transport.Request{Proto: proto, Dst: netip.MustParseAddrPort(dst)})
	if err != nil {
		t.Fatal(err)
	}
	p.SetReadDeadline(time.Now().Add(Timeout))
	t.Cleanup(func() { p.Close() })
	return p
}

// FullListener returns an address that does not answer: the queue of its listener is full.
func FullListener(t *testing.T) string {
	t.Helper()
	fd, err := syscall.Socket(syscall.AF_INET, syscall.SOCK_STREAM, 0)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { syscall.Close(fd) })
	if err := syscall.Bind(fd, &syscall.SockaddrInet4{Addr: [4]byte{127, 0, 0, 1}}); err != nil {
		t.Fatal(err)
	}
	if err := syscall.Listen(fd, 0); err != nil {
		t.Fatal(err)
	}
	name, err := syscall.Getsockname(fd)
	if err != nil {
		t.Fatal(err)
	}
	bound := name.(*syscall.SockaddrInet4)
	addr := netip.AddrPortFrom(netip.AddrFrom4(bound.Addr), uint16(bound.Port)).String()
	for range 16 { // until one is not answered
		c, err := net.DialTimeout("tcp", addr, time.Second)
		if err != nil {
			return addr
		}
		t.Cleanup(func() { c.Close() })
	}
	t.Fatal("the queue does not fill")
	return ""
}
