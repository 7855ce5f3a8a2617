package session

import (
	"context"
	"io"
	"log/slog"
	"net/netip"

	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/l3"
	"kubevpn/pkg/netstack"
	"kubevpn/pkg/packet"
	"kubevpn/pkg/transport"
	"kubevpn/pkg/transport/transporttest"
	"kubevpn/pkg/tun"
	"kubevpn/pkg/tun/tuntest"
)

// l3Rig is a session's device and lanes, with a traffic manager of the test's own at the other end.
type l3Rig struct {
	t      *testing.T
	s      *Session
	app    *tuntest.Device // the laptop's kernel
	lanes  chan *transport.Stream
	frames chan []byte // what came by the lanes
}

func newL3Rig(t *testing.T) *l3Rig {
	r := &l3Rig{t: t, s: bare(t), lanes: make(chan *transport.Stream, 16), frames: make(chan []byte, 16)}
	r.s.address = addressing{Device: "test0", Laptop4: addrs("198.19.4.9")[0], Resolver: addrs("198.19.0.53")[0], Networks: prefixes("198.19.0.0/16")}
	r.s.inner = prefixes("198.19.0.0/16")

	ctx, cancel := context.WithCancel(context.Background())
	listener := transporttest.NewListener()
	server := transport.NewServer(transport.ServerConfig{OnSession: func(ctx context.Context, ts *transport.Session) {
		for {
			in, err := ts.Accept(ctx)
			if err != nil {
				return
			}
			if in.Proto != transport.ProtoIP || in.Src.Addr() != r.s.address.Laptop4 {
				t.Errorf("opened %+v", in.Request)
			}
			stream, err := in.Accept()
			if err != nil {
				return
			}
			if in.Src.Port() == 0 {
				r.lanes <- stream
			}
			var malformed atomic.Uint64
			go l3.Receive(stream, 0, new(l3.Barriers), func(f *l3.Frame) { r.frames <- append([]byte(nil), f.Bytes()...); f.Release() }, &malformed)
		}
	}})
	client := transport.NewClient(transport.ClientConfig{Dial: listener.Dial, Links: 1, OnSession: func(ctx context.Context, ts *transport.Session) {
		r.s.current.set(ts)
		<-ctx.Done()
		r.s.current.clear(ts)
	}})
	var ours *tuntest.Device
	ours, r.app = tuntest.Pair(mtu, true)
	var device tun.Device = ours
	r.s.lanes.device.Store(&device)
	stack, err := netstack.New(netstack.Config{Device: ours, Dialer: dialer{r.s.current}, Diverter: r.s.lanes})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 4)
	go func() { done <- server.Serve(ctx, listener) }()
	go func() { done <- client.Run(ctx) }()
	go func() { done <- stack.Run(ctx) }()
	go func() { done <- r.s.lanes.run(ctx) }()
	t.Cleanup(func() {
		cancel()
		for range 4 {
			<-done
		}
	})
	return r
}

// packet is a packet of a protocol that the gvisor netstack does not carry.
func (r *l3Rig) packet(src, dst string) []byte {
	ip := packet.Outgoing{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), Proto: 132, PayloadLen: 12}
	return append(ip.Append(make([]byte, packet.VirtioLen)), "twelve bytes"...)
}

func (r *l3Rig) emit(src, dst string) {
	r.t.Helper()
	if err := r.app.Writev([][]byte{r.packet(src, dst)}); err != nil {
		r.t.Fatal(err)
	}
}

// crossed is the destination of the next packet that came by a lane.
func (r *l3Rig) crossed() string {
	r.t.Helper()
	select {
	case b := <-r.frames:
		h, err := packet.Parse(b[packet.VirtioLen:])
		if err != nil {
			r.t.Fatal(err)
		}
		return h.Dst.String()
	case <-time.After(10 * time.Second):
		r.t.Fatal("nothing came by the lanes")
		return ""
	}
}

// arrived is the next packet that the laptop's kernel gets.
func (r *l3Rig) arrived() packet.Header {
	r.t.Helper()
	timer := time.AfterFunc(10*time.Second, func() { r.app.SetReadDeadline(time.Unix(1, 0)) })
	defer timer.Stop()
	buf := make([]byte, tun.MinRead)
	n, err := r.app.Read(buf)
	if err != nil {
		r.t.Fatalf("nothing arrived: %v", err)
	}
	h, err := packet.Parse(buf[packet.VirtioLen:n])
	if err != nil {
		r.t.Fatal(err)
	}
	return h
}

// answer sends packets to the laptop.
func (r *l3Rig) answer(lane io.Writer, addresses ...[2]string) {
	r.t.Helper()
	for _, a := range addresses {
		b := r.packet(a[0], a[1])
		if _, err := lane.Write(append([]byte{0, 0, 0, byte(len(b))}, b...)); err != nil {
			r.t.Fatal(err)
		}
	}
}

// The netstack decides which packets cross whole, and it may change while they go.
func TestSteering(t *testing.T) {
	r := newL3Rig(t)
	lane := <-r.lanes
	r.s.status.Netstack = api.NetstackGVisor
	r.s.resteer()

	r.emit("198.19.4.9", "198.19.7.7")
	if got := r.crossed(); got != "198.19.7.7" {
		t.Errorf("a packet to %s crossed", got)
	}
	for _, dst := range []string{"198.19.0.53", "10.244.0.2"} { // the resolver, and a pod: they are the netstack's
		r.emit("198.19.4.9", dst)
		if got := r.arrived(); got.Proto != packet.ProtoICMP || got.Src.String() != dst {
			t.Errorf("to %s: got %+v", dst, got)
		}
	}
	// Only laptops may send to this one, and to no other.
	r.answer(lane, [2]string{"10.244.0.2", "198.19.4.9"}, [2]string{"198.19.7.7", "10.0.0.1"}, [2]string{"198.19.7.7", "198.19.4.9"})
	if got := r.arrived(); got.Src.String() != "198.19.7.7" || got.Dst.String() != "198.19.4.9" {
		t.Errorf("arrived: %+v", got)
	}
	if n := r.s.lanes.unwelcome.Load(); n != 2 {
		t.Errorf("%d packets were unwelcome, want 2", n)
	}

	// The system netstack, of a gateway that forwards IPv4 only.
	r.s.gateway = &api.Gateway{MTU: 1450, IPv4: true}
	r.s.adopt(decision{Netstack: api.NetstackSystem})
	if got := r.s.mtu(); got != 1450 {
		t.Errorf("MTU %d", got)
	}
	r.emit("198.19.4.9", "10.244.0.2")
	if got := r.crossed(); got != "10.244.0.2" {
		t.Errorf("a packet to %s crossed", got)
	}
	for _, dst := range []string{"198.19.0.53", "fd00:244::2"} {
		src := "198.19.4.9"
		if dst != "198.19.0.53" {
			src = "fd4e:19c6:8b7a::4:9"
		}
		r.emit(src, dst)
		if got := r.arrived(); got.Src.String() != dst {
			t.Errorf("to %s: got %+v", dst, got)
		}
	}
	r.answer(lane, [2]string{"10.244.0.2", "198.19.4.9"})
	if got := r.arrived(); got.Src.String() != "10.244.0.2" {
		t.Errorf("arrived: %+v", got)
	}
}

// A lane that broke is opened again, and so are all of them on another transport session.
func TestLanesComeAgain(t *testing.T) {
	r := newL3Rig(t)
	r.s.resteer()
	for name, end := range map[string]func(lane *transport.Stream){
		"reset":    func(lane *transport.Stream) { lane.Reset() },
		"nonsense": func(lane *transport.Stream) { lane.Write([]byte{0xff, 0xff, 0xff, 0xff}) },
		"closed":   func(lane *transport.Stream) { lane.Close() },
		"session":  func(*transport.Stream) { r.s.current.now().Close() },
	} {
		lane := <-r.lanes
		end(lane)
		select {
		case again := <-r.lanes:
			r.answer(again, [2]string{"198.19.7.7", "198.19.4.9"})
			if got := r.arrived(); got.Src.String() != "198.19.7.7" {
				t.Errorf("%s: arrived: %+v", name, got)
			}
			r.lanes <- again
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: the lane did not come again", name)
		}
	}
}

// What is not diverted, which in the gvisor netstack is nearly everything, costs no memory.
func TestDivertAllocatesNothing(t *testing.T) {
	l := newLanes(newCurrent(), nil, slog.New(slog.DiscardHandler))
	l.steer.Store(&steering{resolver: addrs("198.19.0.53")[0], inner: prefixes("198.19.0.0/16 fd4e:19c6:8b7a::/48")})
	pod := addrs("10.244.0.2")[0]
	l.Buffer()
	if n := testing.AllocsPerRun(1000, func() {
		if len(l.Buffer()) < tun.MinRead || l.Divert(100, pod) {
			t.Fatal("a pod's packet was diverted")
		}
	}); n != 0 {
		t.Errorf("%v allocations a packet", n)
	}
}

// The manager is told whether the laptop's device takes super-packets: before there is a device, as this system's are.
func TestHelloGSO(t *testing.T) {
	s := bare(t)
	says := func(want bool) {
		t.Helper()
		if hello, err := s.hello(); err != nil || hello.NoGSO == want {
			t.Errorf("says no GSO: %v, %v; the device has it: %v", hello.NoGSO, err, want)
		}
	}
	says(tun.GSO)
	for _, gso := range []bool{true, false} {
		ours, app := tuntest.Pair(mtu, gso)
		defer ours.Close()
		defer app.Close()
		var device tun.Device = ours
		s.lanes.device.Store(&device)
		says(gso)
	}
}
