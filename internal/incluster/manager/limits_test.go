package manager

import (
	"context"
	"crypto/rand"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

// A laptop that reads nothing occupies no more than its part of the manager's budget. Its flows continue when it reads
// again, and those of another laptop work meanwhile.
func TestLaptopThatReadsNothingStaysWithinBudget(t *testing.T) {
	const size, flows, budget = 1 << 20, 400, 160 << 20 // a large buffer for each flow would be more than Hold allows
	pod := netip.MustParseAddrPort(managertest.TCPPod(t, func(c *net.TCPConn) {
		c.SetDeadline(time.Time{})
		c.Write(make([]byte, size))
		c.CloseWrite()
		// A closed socket would answer the manager's keep-alive with a reset after a minute, which the test may take.
		io.Copy(io.Discard, c)
	}))
	r := start(t, Config{}, func(m *Manager) { m.budget = transport.NewBudget(maxStreams, budget) })
	managertest.Hello(t, r.laptop, helloV1).Next()
	another := managertest.Connect(t, r.addr)
	managertest.Hello(t, another, helloV1).Next()
	open := func(laptop *transport.Session) *transport.Stream {
		t.Helper()
		st, err := laptop.Open(t.Context(), transport.Request{Proto: transport.ProtoTCP, Dst: pod})
		if err != nil {
			t.Fatal(err)
		}
		return st
	}
	read := func(st *transport.Stream) {
		t.Helper()
		if n, err := io.Copy(io.Discard, st); err != nil || n != size {
			t.Errorf("read %d of %d bytes, %v", n, size, err)
		}
		st.Close()
	}
	var all []*transport.Stream
	for range flows {
		all = append(all, open(r.laptop))
	}
	if _, held := r.budget.Used(); held > budget/4 {
		t.Errorf("one laptop that reads nothing makes the manager hold %d bytes of a budget of %d", held, budget)
	}
	read(open(another))
	for _, st := range all {
		read(st)
	}
}

// Ended flows free their streams and buffers, however they end. A leak would starve all laptops in the end.
func TestEndedFlowsLeaveTheBudgetEmpty(t *testing.T) {
	r := start(t, Config{})
	managertest.Hello(t, r.laptop, helloV1).Next()
	echo := netip.MustParseAddrPort(managertest.TCPPod(t, func(c *net.TCPConn) { io.Copy(c, c) }))
	datagrams := netip.MustParseAddrPort(managertest.UDPPod(t, "a"))
	nobody := netip.MustParseAddrPort("127.0.0.1:1")
	for i := range 30 {
		ctx, cancel := context.WithCancel(t.Context())
		if st, err := r.laptop.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Dst: echo}); err != nil {
			t.Fatal(err)
		} else if i%2 == 0 {
			st.Write(make([]byte, 100<<10))
			st.Reset()
		} else {
			st.Write([]byte("x"))
			st.CloseWrite()
			io.Copy(io.Discard, st)
			st.Close()
		}
		if _, err := r.laptop.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Dst: nobody}); err == nil {
			t.Fatal("a port without a listener accepts a connection")
		}
		for _, dst := range []netip.AddrPort{datagrams, nobody} {
			p, err := r.laptop.OpenPackets(ctx, transport.Request{Proto: transport.ProtoUDP, Dst: dst})
			if err != nil {
				t.Fatal(err)
			}
			p.WritePacket([]byte("x"))
			if dst == datagrams {
				p.ReadPacket(make([]byte, 10))
			}
			p.Close()
		}
		for _, proto := range []transport.Proto{transport.ProtoIP, transport.ProtoTicket, 99} { // refused, or answered and ended
			if st, err := r.laptop.Open(ctx, transport.Request{Proto: proto}); err == nil {
				st.Close()
			}
		}
		cancel()
	}
	testenv.Until(t, "only the control stream remains", func() bool {
		streams, _ := r.budget.Used()
		return streams == 1
	})
	if err := r.laptop.Close(); err != nil {
		t.Fatal(err)
	}
	testenv.Until(t, "nothing remains of the session", func() bool {
		streams, held := r.budget.Used()
		return streams <= 1 && held < 256<<10 // a new session may be there already
	})
}

// Sessions that are begun and left alone, more than there is room for, end neither other sessions nor keep them out.
func TestSessionsWithoutHelloDoNotLockOutOthers(t *testing.T) {
	r := start(t, Config{PodName: "tm-1"})
	c := managertest.Hello(t, r.laptop, helloV1)
	c.Next()
	for range maxSessions + 76 { // begun and left alone
		conn, err := net.Dial("tcp", r.addr)
		if err != nil {
			t.Fatal(err)
		}
		var greeting [72]byte // pkg/wire/transport/spec.md, "Handshake"
		copy(greeting[:], "kubevpn")
		greeting[7], greeting[57], greeting[63] = transport.Version, 1, 1
		rand.Read(greeting[8:56])
		conn.Write(greeting[:])
		answer := make([]byte, 24)
		if _, err := io.ReadFull(conn, answer); err != nil || answer[8] != 0 {
			t.Fatalf("the manager answered %v, %v", answer, err)
		}
		conn.Close()
	}
	if m := managertest.Hello(t, managertest.Connect(t, r.addr), api.ClientHello{Protocol: api.Protocol, Client: "another"}).Next(); m.Hello == nil {
		t.Errorf("another laptop got %+v", m)
	}
	if err := r.laptop.Err(); err != nil {
		t.Errorf("the session of the first laptop has ended: %v", err)
	}
}
