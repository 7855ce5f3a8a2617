package connection

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"net/netip"
	"syscall"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wire/transport/transporttest"
)

var (
	shortSrc = netip.MustParseAddrPort("198.19.0.2:40000")
	shortDst = netip.MustParseAddrPort("10.96.0.80:80")
)

// upper answers each read in upper case, and passes half-closes on.
func upper(_ context.Context, conn net.Conn, _, _ netip.AddrPort, _ func(context.Context) (net.Conn, error)) {
	all, err := io.ReadAll(conn)
	if err == nil {
		_, _ = conn.Write(bytes.ToUpper(all))
	}
	conn.Close()
}

func (c *Connection) dialShort(t *testing.T) interface {
	io.ReadWriteCloser
	CloseWrite() error
	Reset() error
} {
	t.Helper()
	stream, err := c.dialer().DialTCP(t.Context(), shortSrc, shortDst)
	if err != nil {
		t.Fatal(err)
	}
	return stream
}

func TestFlowsWithAShortcutEndHere(t *testing.T) {
	s := newTestConnection(t)
	s.SetShortcuts("web", map[netip.AddrPort]Shortcut{shortDst: upper})
	stream := s.dialShort(t)
	if _, err := stream.Write([]byte("hello")); err != nil {
		t.Fatal(err)
	}
	rows := s.Flows(LocalSockets{})
	if len(rows) != 1 || rows[0].Transport != api.Shortcut || rows[0].Sent != 5 || rows[0].Destination != shortDst {
		t.Errorf("%+v", rows)
	}
	if err := stream.CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if got, err := io.ReadAll(stream); err != nil || string(got) != "HELLO" {
		t.Errorf("%q, %v", got, err)
	}
	stream.Close()
	if rows := s.Flows(LocalSockets{}); len(rows) != 0 {
		t.Errorf("after its end: %+v", rows)
	}
}

func TestResetsCrossAShortcut(t *testing.T) {
	s := newTestConnection(t)
	seen := make(chan error, 1)
	s.SetShortcuts("web", map[netip.AddrPort]Shortcut{shortDst: func(_ context.Context, conn net.Conn, _, _ netip.AddrPort, _ func(context.Context) (net.Conn, error)) {
		_, err := io.ReadAll(conn)
		seen <- err
	}})
	stream := s.dialShort(t)
	if err := stream.Reset(); err != nil {
		t.Fatal(err)
	}
	if err := <-seen; !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the program's reset arrives as %v", err)
	}
	stream.Close()
	s.SetShortcuts("web", map[netip.AddrPort]Shortcut{shortDst: func(_ context.Context, conn net.Conn, _, _ netip.AddrPort, _ func(context.Context) (net.Conn, error)) {
		conn.(interface{ Reset() error }).Reset()
	}})
	stream = s.dialShort(t)
	defer stream.Close()
	if _, err := io.ReadAll(stream); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("the other end's reset arrives as %v", err)
	}
}

// What does not match goes where it would have gone.
func TestShortcutsReachTheCluster(t *testing.T) {
	s := newTestConnection(t)
	laptop, manager := transporttest.Pair(t)
	s.current.set(laptop)
	s.SetShortcuts("web", map[netip.AddrPort]Shortcut{shortDst: func(ctx context.Context, conn net.Conn, _, _ netip.AddrPort, far func(context.Context) (net.Conn, error)) {
		defer conn.Close()
		to, err := far(ctx)
		if err != nil {
			t.Error(err)
			return
		}
		defer to.Close()
		_, _ = io.Copy(conn, to)
	}})
	stream := s.dialShort(t)
	defer stream.Close()
	in, err := manager.Accept(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if in.Src != shortSrc || in.Dst != shortDst {
		t.Errorf("%+v", in.Request)
	}
	accepted, err := in.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if _, err := accepted.Write([]byte("far")); err != nil {
		t.Fatal(err)
	}
	accepted.Close()
	if got, err := io.ReadAll(stream); err != nil || string(got) != "far" {
		t.Errorf("%q, %v", got, err)
	}
}

// tcp returns a packet of a flow from a port.
func tcp(t testing.TB, port uint16, flags byte) (packet.Header, []byte) {
	t.Helper()
	ip := packet.Outgoing{Src: shortSrc.Addr(), Dst: shortDst.Addr(), Proto: packet.ProtoTCP, PayloadLen: 20}
	b := ip.Append(nil)
	segment := make([]byte, 20)
	binary.BigEndian.PutUint16(segment, port)
	binary.BigEndian.PutUint16(segment[2:], shortDst.Port())
	segment[12], segment[13] = 5<<4, flags
	b = append(b, segment...)
	h, err := packet.Parse(b)
	if err != nil {
		t.Fatal(err)
	}
	return h, b
}

// In the system netstack, flows that are open when an intercept begins stay as they are, and those that take the
// shortcut keep it when the intercept ends.
func TestOnlyNewFlowsTakeAShortcut(t *testing.T) {
	const syn, ack = 0x02, 0x10
	s := newTestConnection(t).shortcuts
	takes := func(port uint16, flags byte) bool {
		h, b := tcp(t, port, flags)
		return s.takes(&h, b)
	}
	if takes(1, syn) {
		t.Error("there are no shortcuts")
	}
	s.set("web", map[netip.AddrPort]Shortcut{shortDst: upper})
	if takes(1, ack) || !takes(2, syn) || !takes(2, ack) || takes(3, syn|ack) {
		t.Error("a flow is new with its SYN")
	}
	s.set("other", map[netip.AddrPort]Shortcut{shortDst: upper})
	if takes(4, syn) || s.to(shortDst) != nil || !takes(2, ack) {
		t.Error("agents know which of two intercepts gets a request")
	}
	s.set("other", nil)
	if !takes(4, syn) {
		t.Error("one intercept is left")
	}
	s.set("web", nil)
	if takes(5, syn) || !takes(2, ack) || !takes(4, ack) {
		t.Error("open flows keep the shortcut")
	}
	h, b := tcp(t, 2, ack)
	if n := testing.AllocsPerRun(1000, func() { s.takes(&h, b) }); n != 0 {
		t.Errorf("%v allocations a packet", n)
	}
}
