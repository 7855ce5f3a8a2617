package router

import (
	"bytes"
	"context"
	"encoding/binary"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"

	"kubevpn/internal/incluster/access"
	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/wire/transport"
)

// inner is a laptop with a lease and packet streams.
type inner struct {
	t testing.TB
	*transport.Session
	*managertest.Control
	hello  *api.ManagerHello
	addrs  []netip.Addr
	sender *packetlink.Sender
	got    chan []byte // packets, without their virtio-net headers
}

// newInner connects a laptop and opens its packet streams.
func newInner(t testing.TB, r *running, greeting api.ClientHello) *inner {
	t.Helper()
	greeting.Protocol = api.Protocol
	l := &inner{t: t, Session: managertest.Connect(t, r.addr), got: make(chan []byte, 1000)}
	l.Control = managertest.Hello(t, l.Session, greeting)
	if l.hello = l.Next().Hello; l.hello == nil || len(l.hello.Lease.Addrs) != 2 {
		t.Fatalf("hello: %+v", l.hello)
	}
	l.addrs = l.hello.Lease.Addrs
	for number := range packetlink.Streams {
		st := l.openStream(l.addrs[0], number)
		if number == 0 {
			l.sender = packetlink.NewSender(packetlink.SenderConfig{GSO: true, Open: func(context.Context, int) (io.WriteCloser, error) { return st, nil }})
		}
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		l.sender.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return l
}

// openStream opens a packet stream and receives from it.
func (l *inner) openStream(src netip.Addr, number int) *transport.Stream {
	l.t.Helper()
	st, err := l.tryStream(src, number)
	if err != nil {
		l.t.Fatal(err)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		var malformed atomic.Uint64
		packetlink.Receive(st, 0, new(packetlink.Barriers), packetlink.DeliverFunc(func(f *packetlink.Frame) {
			l.got <- bytes.Clone(f.Packet())
			f.Release()
		}), &malformed)
	}()
	l.t.Cleanup(func() {
		st.Reset()
		<-ended
	})
	return st
}

func (l *inner) tryStream(src netip.Addr, number int) (*transport.Stream, error) {
	ctx, cancel := context.WithTimeout(context.Background(), managertest.Timeout)
	defer cancel()
	return l.Open(ctx, transport.Request{Proto: transport.ProtoIP, Src: netip.AddrPortFrom(src, uint16(number))})
}

// send sends a packet over the packet streams.
func (l *inner) send(p []byte) {
	f := packetlink.NewFrame()
	b := f.Buffer()
	clear(b[:packet.VirtioLen])
	f.SetLen(packet.VirtioLen + copy(b[packet.VirtioLen:], p))
	l.sender.Send(f)
}

// receive returns the next packet.
func (l *inner) receive() []byte {
	l.t.Helper()
	select {
	case p := <-l.got:
		return p
	case <-time.After(managertest.Timeout):
		l.t.Fatal("no packet")
		return nil
	}
}

// nothing fails the test if a packet has arrived.
func (l *inner) nothing() {
	l.t.Helper()
	select {
	case p := <-l.got:
		l.t.Errorf("an unexpected packet: %x", p)
	default:
	}
}

// datagram returns a UDP packet.
func datagram(src, dst netip.Addr, port uint16, payload string) []byte {
	out := packet.Outgoing{Src: src, Dst: dst, Proto: packet.ProtoUDP, PayloadLen: 8 + len(payload)}
	header := packet.UDP(netip.AddrPortFrom(src, 4000), netip.AddrPortFrom(dst, port), []byte(payload), false)
	return append(append(out.Append(nil), header[:]...), payload...)
}

// unreachable checks that p is the ICMP error of that type and code about original.
func unreachable(t testing.TB, p, original []byte, typ, code byte) {
	t.Helper()
	h, err := packet.Parse(p)
	if err != nil {
		t.Fatal(err)
	}
	o, err := packet.Parse(original)
	if err != nil {
		t.Fatal(err)
	}
	if body := p[h.HeaderLen:]; h.Dst != o.Src || body[0] != typ || body[1] != code || !bytes.HasPrefix(original, body[8:]) {
		t.Errorf("got %x from %v to %v, want type %d, code %d", body, h.Src, h.Dst, typ, code)
	}
	if last := h.Src.AsSlice(); last[len(last)-1] != gatewayHost || h.Src == o.Src {
		t.Errorf("the ICMP error comes from %v", h.Src)
	}
}

func TestLaptopsReachEachOther(t *testing.T) {
	r := start(t, nil)
	// The netstacks do not matter.
	a := newInner(t, r, api.ClientHello{Client: "a"})
	b := newInner(t, r, api.ClientHello{Client: "b", Netstack: api.NetstackSystem})
	for i := range a.addrs {
		there := datagram(a.addrs[i], b.addrs[i], 7, "ping")
		a.send(there)
		if got := b.receive(); !bytes.Equal(got, there) {
			t.Errorf("b got %x, want %x", got, there)
		}
		back := datagram(b.addrs[i], a.addrs[i], 4000, "pong")
		b.send(back)
		if got := a.receive(); !bytes.Equal(got, back) {
			t.Errorf("a got %x, want %x", got, back)
		}
	}
	if !slices.Equal(a.hello.State.InnerNetworks, a.hello.Lease.Networks) {
		t.Errorf("inner networks %v, leased from %v", a.hello.State.InnerNetworks, a.hello.Lease.Networks)
	}
	if s := r.router.stats(); s != (drops{}) {
		t.Errorf("dropped: %+v", s)
	}
}

// The sender of a packet that cannot be routed receives an ICMP error.
func TestUnroutablePacketsReturnICMP(t *testing.T) {
	r := start(t, nil, managertest.Addrs("10.244.1.9")...)
	a := newInner(t, r, api.ClientHello{Client: "a"})
	b := newInner(t, r, api.ClientHello{Client: "b"})
	system := newInner(t, r, api.ClientHello{Client: "c", Netstack: api.NetstackSystem})
	nobody4, nobody6 := netip.MustParseAddr("198.19.255.254"), netip.MustParseAddr("fd4e:19c6:8b7a::ffff:0:1")
	pod4, pod6 := netip.MustParseAddr("10.244.1.5"), netip.MustParseAddr("fd00:244::5")
	tests := []struct {
		name      string
		from      *inner
		dst       string
		typ, code byte
		count     func(*drops) *uint64
	}{
		{"nobody", a, nobody4.String(), 3, 1, func(s *drops) *uint64 { return &s.noRoute }},
		{"nobody6", a, nobody6.String(), 1, 3, func(s *drops) *uint64 { return &s.noRoute }},
		{"resolver", a, "198.19.0.53", 3, 1, func(s *drops) *uint64 { return &s.noRoute }},
		{"manager", a, "10.244.1.9", 3, 13, func(s *drops) *uint64 { return &s.prohibited }},
		{"metadata", system, "169.254.169.254", 3, 13, func(s *drops) *uint64 { return &s.prohibited }},
		{"loopback", system, "127.0.0.1", 3, 13, func(s *drops) *uint64 { return &s.prohibited }},
		{"loopback6", system, "::1", 1, 1, func(s *drops) *uint64 { return &s.prohibited }},
		{"no-gateway", system, pod4.String(), 3, 0, func(s *drops) *uint64 { return &s.noRoute }},
		{"no-gateway6", system, pod6.String(), 1, 0, func(s *drops) *uint64 { return &s.noRoute }},
		{"not-system", a, pod4.String(), 3, 0, func(s *drops) *uint64 { return &s.noRoute }},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			dst := netip.MustParseAddr(tt.dst)
			src := tt.from.addrs[0]
			if dst.Is6() {
				src = tt.from.addrs[1]
			}
			want := r.router.stats()
			p := datagram(src, dst, 80, tt.name)
			tt.from.send(p)
			unreachable(t, tt.from.receive(), p, tt.typ, tt.code)
			*tt.count(&want)++
			if got := r.router.stats(); got != want {
				t.Errorf("counted %+v, want %+v", got, want)
			}
		})
	}
	t.Run("spoofed", func(t *testing.T) {
		before := r.router.stats().spoofed
		a.send(datagram(b.addrs[0], system.addrs[0], 1, "as b"))
		a.send(datagram(b.addrs[1], system.addrs[1], 1, "as b"))
		a.send(datagram(pod4, system.addrs[0], 1, "as a pod"))
		after := datagram(a.addrs[0], system.addrs[0], 1, "as a")
		a.send(after) // over the same packet stream
		if got := system.receive(); !bytes.Equal(got, after) {
			t.Errorf("got %x", got)
		}
		b.nothing()
		if got := r.router.stats().spoofed - before; got != 3 {
			t.Errorf("%d counted", got)
		}
	})
	t.Run("malformed", func(t *testing.T) {
		before := r.router.stats().malformed
		st := a.openStream(a.addrs[0], 1) // replaces the previous stream
		p := datagram(a.addrs[0], b.addrs[0], 1, "whole")
		frame := func(flags byte, p []byte) []byte {
			f := append(make([]byte, 4+packet.VirtioLen), p...)
			binary.BigEndian.PutUint32(f, uint32(len(f)-4))
			f[4] = flags
			return f
		}
		for _, f := range [][]byte{frame(0, p[:len(p)-1]), frame(0x80, p), frame(0, []byte("?")), frame(0, p)} {
			if _, err := st.Write(f); err != nil {
				t.Fatal(err)
			}
		}
		if got := b.receive(); !bytes.Equal(got, p) {
			t.Errorf("got %x", got)
		}
		if got := r.router.stats().malformed - before; got != 3 {
			t.Errorf("%d counted", got)
		}
		// A broken length ends the packet stream, and no other.
		if _, err := st.Write([]byte{0xff, 0xff, 0xff, 0xff}); err != nil {
			t.Fatal(err)
		}
		select {
		case <-st.Gone():
		case <-time.After(managertest.Timeout):
			t.Fatal("the packet stream has not ended")
		}
		a.send(p)
		b.receive()
	})
	t.Run("streams-refused", func(t *testing.T) {
		for _, tt := range []struct {
			src    netip.Addr
			number int
		}{{b.addrs[0], 0}, {netip.Addr{}, 0}, {a.addrs[0], packetlink.Streams}} {
			if st, err := a.tryStream(tt.src, tt.number); err == nil {
				st.Reset()
				t.Errorf("packet stream %d of %v was accepted", tt.number, tt.src)
			}
		}
	})
}

// Stream 0 is the substitute for packet streams that the laptop has not opened, until it opens them.
func TestStreamZeroIsSubstitute(t *testing.T) {
	p := NewPeer(nil, nil, nil, nil)
	p.sender = packetlink.NewSender(packetlink.SenderConfig{})
	ctx, cancel := context.WithCancel(context.Background())
	opened := make(chan *packetStream)
	go func() {
		w, _ := p.open(ctx, 2)
		l, _ := w.(*packetStream)
		opened <- l
	}()
	zero, two := &packetStream{stream: new(transport.Stream), gone: make(chan struct{})}, &packetStream{stream: new(transport.Stream), gone: make(chan struct{})}
	p.add(1, two)
	p.add(0, zero)
	if got := <-opened; got != zero {
		t.Errorf("open returned %p, want stream 0, %p", got, zero)
	}
	p.add(2, two)
	if got, err := p.open(ctx, 2); got != io.WriteCloser(two) || err != nil {
		t.Errorf("stream 2: %v, %v", got, err)
	}
	cancel()
	if _, err := NewPeer(nil, nil, nil, nil).open(ctx, 0); err != context.Canceled {
		t.Errorf("without packet streams: %v", err)
	}
}

// A packet from the device reaches the laptop that it is addressed to, unless its source is an inner address.
func TestGatewayPacketsReachTheirLaptop(t *testing.T) {
	r := start(t, nil)
	a := newInner(t, r, api.ClientHello{Client: "a", Netstack: api.NetstackSystem})
	b := newInner(t, r, api.ClientHello{Client: "b"})
	device, kernel := tuntest.Pair(1500, true)
	ended := make(chan error, 1)
	go func() { ended <- r.router.readGateway(device) }()
	t.Cleanup(func() {
		kernel.Close()
		<-ended
	})
	r.router.attach(&attachedGateway{device: device, about: api.Gateway{IPv4: true, Addrs: managertest.Addrs("198.19.0.1")}})
	write := func(p []byte) {
		t.Helper()
		if err := kernel.Writev([][]byte{make([]byte, packet.VirtioLen), p}); err != nil {
			t.Fatal(err)
		}
	}
	pod := netip.MustParseAddr("10.244.1.5")
	before := r.router.stats()
	write(datagram(b.addrs[0], a.addrs[0], 1, "not b's"))
	write(datagram(pod, netip.MustParseAddr("198.19.9.9"), 1, "nobody's"))
	write([]byte("no packet"))
	for _, p := range [][]byte{datagram(pod, a.addrs[0], 1, "a's"), datagram(netip.MustParseAddr("198.19.0.1"), a.addrs[0], 1, "from the device")} {
		write(p)
		if got := a.receive(); !bytes.Equal(got, p) {
			t.Errorf("got %x, want %x", got, p)
		}
	}
	write(datagram(pod, b.addrs[0], 1, "b's"))
	b.receive()
	want := before
	want.spoofed, want.noRoute, want.malformed = want.spoofed+1, want.noRoute+1, want.malformed+1
	if got := r.router.stats(); got != want {
		t.Errorf("counted %+v, want %+v", got, want)
	}
	// Packets to the pod enter the device.
	p := datagram(a.addrs[0], pod, 80, "request")
	a.send(p)
	buf := make([]byte, packet.VirtioLen+packet.MaxLen)
	n, err := kernel.Read(buf)
	if err != nil || !bytes.Equal(buf[packet.VirtioLen:n], p) {
		t.Errorf("the kernel got %x, %v", buf[:n], err)
	}
	// The router has no route for a family that the gateway does not forward.
	p = datagram(a.addrs[1], netip.MustParseAddr("fd00:244::5"), 80, "request")
	a.send(p)
	unreachable(t, a.receive(), p, 1, 0)
	// It also has none for a session with the gvisor netstack.
	p = datagram(b.addrs[0], pod, 80, "request")
	b.send(p)
	unreachable(t, b.receive(), p, 3, 0)
}

// A laptop keeps its address after its session, and the other laptops learn of the networks.
func TestLeaseOutlivesSession(t *testing.T) {
	r := start(t, nil)
	watch := managertest.Hello(t, r.laptop, helloV1)
	if h := watch.Next().Hello; h == nil || len(h.Lease.Addrs) != 2 {
		t.Fatalf("hello: %+v", h)
	}
	avoid := managertest.PrefixesOf("198.19.0.0/16")
	first := newInner(t, r, api.ClientHello{Client: "b", Avoid: avoid})
	watch.Until("two networks", func(s *api.ManagerState) bool {
		return slices.Equal(s.InnerNetworks, managertest.PrefixesOf("198.18.0.0/16", "198.19.0.0/16", "fd4e:19c6:8b7a::/48"))
	})
	first.Session.Close()
	watch.Until("one network", func(s *api.ManagerState) bool { return len(s.InnerNetworks) == 2 })
	second := newInner(t, r, api.ClientHello{Client: "b", Avoid: avoid, Lease: first.addrs})
	if !slices.Equal(first.addrs, second.addrs) {
		t.Errorf("%v, and then %v", first.addrs, second.addrs)
	}
	if second.hello.Lease.Resolver != netip.MustParseAddr("198.18.0.53") {
		t.Errorf("resolver %v", second.hello.Lease.Resolver)
	}
}

// A laptop that was cut off and begins a new session has its address at once, and the old session ends.
func TestLeaseTakenOver(t *testing.T) {
	r := start(t, nil)
	var mu sync.Mutex
	var conns []net.Conn
	down := false
	arrived := make(chan *transport.Session, 1)
	client := transport.NewClient(transport.ClientConfig{
		Dial: func(ctx context.Context) (net.Conn, error) {
			mu.Lock()
			defer mu.Unlock()
			if down {
				return nil, net.ErrClosed
			}
			var d net.Dialer
			conn, err := d.DialContext(ctx, "tcp", r.addr)
			conns = append(conns, conn)
			return conn, err
		},
		OnSession: func(_ context.Context, s *transport.Session) { arrived <- s },
	})
	ctx, cancel := context.WithCancel(context.Background())
	var running sync.WaitGroup
	running.Go(func() { client.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	old := managertest.Hello(t, <-arrived, helloV1).Next().Hello.Lease
	mu.Lock()
	down = true
	for _, c := range conns {
		c.Close()
	}
	mu.Unlock()
	holder := r.router.routes.Load().peers[old.Addrs[0]]
	testenv.Until(t, "the cut", func() bool { return !holder.connected() })
	again := newInner(t, r, api.ClientHello{Client: helloV1.Client, Lease: old.Addrs})
	if !slices.Equal(old.Addrs, again.addrs) {
		t.Errorf("%v, and then %v", old.Addrs, again.addrs)
	}
	testenv.Until(t, "the old session's end", func() bool {
		r.router.mu.Lock()
		defer r.router.mu.Unlock()
		return holder.ended
	})
	if now := r.router.routes.Load().peers[old.Addrs[0]]; now == nil || now == holder {
		t.Errorf("%v is held by %p, before by %p", old.Addrs[0], now, holder)
	}
}

// A laptop that accepts super-packets gets them whole.
func TestPacketsAreSegmentedForLaptopWithoutGSO(t *testing.T) {
	r := start(t, nil)
	a := newInner(t, r, api.ClientHello{Client: "a"})
	b := newInner(t, r, api.ClientHello{Client: "b"})
	c := newInner(t, r, api.ClientHello{Client: "c", NoGSO: true})
	const segment, payload = 1000, 3500
	for _, tt := range []struct {
		to   *inner
		want int
	}{{b, 1}, {c, 4}} {
		f := packetlink.NewFrame()
		buf := f.Buffer()
		v := packet.Virtio{Flags: packet.VirtioNeedsChecksum, GSOType: packet.GSOTCPv4, HeaderLen: 40, GSOSize: segment, ChecksumStart: 20, ChecksumOffset: 16}
		v.Put(buf)
		out := packet.Outgoing{Src: a.addrs[0], Dst: tt.to.addrs[0], Proto: packet.ProtoTCP, PayloadLen: 20 + payload}
		p := out.Append(buf[:packet.VirtioLen])
		tcp := make([]byte, 20+payload)
		tcp[12], tcp[13] = 5<<4, 0x10
		binary.BigEndian.PutUint16(tcp[16:], packet.PseudoHeader(packet.ProtoTCP, out.Src, out.Dst, len(tcp)))
		f.SetLen(len(append(p, tcp...)))
		a.sender.Send(f)
		got := 0
		for n := range tt.want {
			h, err := packet.Parse(tt.to.receive())
			if err != nil {
				t.Fatalf("packet %d: %v", n, err)
			}
			got += h.Len - 40
		}
		if got != payload {
			t.Errorf("%d bytes in %d packets", got, tt.want)
		}
	}
}

func BenchmarkFromLaptop(b *testing.B) {
	r := New((&access.Filter{}).AllowsDirect, func() {}, nil)
	p := NewPeer(r, nil, func() bool { return true }, nil)
	lease, _ := p.Admit(&api.ClientHello{Client: "a"}, true, nil)
	r.attach(&attachedGateway{device: discard{}, about: api.Gateway{IPv4: true}})
	packetBytes := datagram(lease.Addrs[0], netip.MustParseAddr("10.244.1.5"), 80, "x")
	w := packetlink.NewWriter(&r.counts.unwritten)
	b.ReportAllocs()
	for b.Loop() {
		f := packetlink.NewFrame()
		buf := f.Buffer()
		clear(buf[:packet.VirtioLen])
		f.SetLen(packet.VirtioLen + copy(buf[packet.VirtioLen:], packetBytes))
		r.fromLaptop(p, f, w)
	}
}

// discard is a device that drops all packets.
type discard struct{}

func (discard) Name() string             { return "discard" }
func (discard) MTU() int                 { return 1500 }
func (discard) GSO() bool                { return true }
func (discard) USO() bool                { return false }
func (discard) Read([]byte) (int, error) { select {} }
func (discard) Writev([][]byte) error    { return nil }
func (discard) Close() error             { return nil }

// The log shows spoofed packets at once, and later ones with the total once per alarmInterval.
func TestSpoofedPacketsAreLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		said := make(managertest.LogLines, 8)
		r := New(func(netip.AddrPort, []netip.Prefix) bool { return true }, func() {}, slog.New(slog.NewTextHandler(said, nil)))
		for _, tt := range []struct {
			more int
			want string
		}{{0, ""}, {3, "spoofed=1\n"}, {0, ""}, {2, "spoofed=4\n"}} {
			for range tt.more {
				r.countSpoofed()
			}
			got := ""
			if len(said) > 0 {
				got = <-said
			}
			if !strings.HasSuffix(got, tt.want) || (got == "") != (tt.want == "") || len(said) > 0 {
				t.Errorf("%d more: got %q and %d other lines, want %q", tt.more, got, len(said), tt.want)
			}
			time.Sleep(alarmInterval)
		}
	})
}
