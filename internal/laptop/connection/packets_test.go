package connection

import (
	"context"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/datapath/tun/tuntest"
	"kubevpn/pkg/wire/transport"
	"kubevpn/pkg/wire/transport/transporttest"
)

// packetRig is the device and the packet streams of a session. The test is the traffic manager at the other end.
type packetRig struct {
	t       *testing.T
	s       *Connection
	app     *tuntest.Device // the laptop's kernel
	streams chan *transport.Stream
	frames  chan []byte // received over the streams
}

func newPacketRig(t *testing.T) *packetRig {
	r := &packetRig{t: t, s: newTestConnection(t), streams: make(chan *transport.Stream, 16), frames: make(chan []byte, 16)}
	lease := api.Lease{Addrs: addrs("198.19.4.9 fd4e:19c6:8b7a::4:9"), Resolver: addrs("198.19.0.53")[0], Networks: prefixes("198.19.0.0/16")}
	r.s.view.Update(func(v *view) { v.lease = lease })
	r.s.packets.steer(func(s *steering) {
		s.own, s.resolver, s.inner = lease.Addrs, lease.Resolver, prefixes("198.19.0.0/16")
	})

	ctx, cancel := context.WithCancel(context.Background())
	listener := transporttest.NewListener()
	server := transport.NewServer(transport.ServerConfig{OnSession: func(ctx context.Context, ts *transport.Session) {
		for {
			in, err := ts.Accept(ctx)
			if err != nil {
				return
			}
			if in.Proto != transport.ProtoIP || in.Src.Addr() != r.s.view.Load().lease.Addrs[0] {
				t.Errorf("opened %+v", in.Request)
			}
			stream, err := in.Accept()
			if err != nil {
				return
			}
			if in.Src.Port() == 0 {
				r.streams <- stream
			}
			var malformed atomic.Uint64
			go packetlink.Receive(stream, 0, new(packetlink.Barriers), packetlink.DeliverFunc(func(f *packetlink.Frame) { r.frames <- append([]byte(nil), f.Bytes()...); f.Release() }), &malformed)
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
	r.s.packets.device.Store(&device)
	stack, err := netstack.New(netstack.Config{Device: ours, Dialer: dialer{r.s.current, nil, r.s.flows, r.s.shortcuts}, Forwarder: r.s.packets})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan error, 4)
	go func() { done <- server.Serve(ctx, listener) }()
	go func() { done <- client.Run(ctx) }()
	go func() { done <- stack.Run(ctx) }()
	go func() { r.s.packets.run(ctx); done <- nil }()
	t.Cleanup(func() {
		cancel()
		for range 4 {
			<-done
		}
	})
	return r
}

// packet is a packet of a protocol that the gvisor netstack does not carry.
func (r *packetRig) packet(src, dst string) []byte {
	ip := packet.Outgoing{Src: netip.MustParseAddr(src), Dst: netip.MustParseAddr(dst), Proto: 132, PayloadLen: 12}
	return append(ip.Append(make([]byte, packet.VirtioLen)), "twelve bytes"...)
}

func (r *packetRig) emit(src, dst string) {
	r.t.Helper()
	if err := r.app.Writev([][]byte{r.packet(src, dst)}); err != nil {
		r.t.Fatal(err)
	}
}

// crossed returns the destination of the next packet from a stream.
func (r *packetRig) crossed() string {
	r.t.Helper()
	return r.next().Dst.String()
}

// crossedTo returns the next packet from a stream, which must be to dst.
func (r *packetRig) crossedTo(dst string) packet.Header {
	r.t.Helper()
	h := r.next()
	if h.Dst.String() != dst {
		r.t.Errorf("a packet to %v crossed, not to %s", h.Dst, dst)
	}
	return h
}

// next returns the next packet from a stream.
func (r *packetRig) next() packet.Header {
	r.t.Helper()
	select {
	case b := <-r.frames:
		h, err := packet.Parse(b[packet.VirtioLen:])
		if err != nil {
			r.t.Fatal(err)
		}
		return h
	case <-time.After(10 * time.Second):
		r.t.Fatal("nothing came by the streams")
		return packet.Header{}
	}
}

// arrived is the next packet that the laptop's kernel gets.
func (r *packetRig) arrived() packet.Header {
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
func (r *packetRig) answer(stream io.Writer, addresses ...[2]string) {
	r.t.Helper()
	for _, a := range addresses {
		r.deliver(stream, r.packet(a[0], a[1]))
	}
}

// deliver sends packets to the laptop.
func (r *packetRig) deliver(stream io.Writer, packets ...[]byte) {
	r.t.Helper()
	for _, b := range packets {
		if _, err := stream.Write(append([]byte{0, 0, 0, byte(len(b))}, b...)); err != nil {
			r.t.Fatal(err)
		}
	}
}

// The netstack decides which packets cross whole, and may change while packets flow.
func TestOnlyPacketsToLaptopsCrossWhole(t *testing.T) {
	r := newPacketRig(t)
	stream := <-r.streams

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
	r.answer(stream, [2]string{"10.244.0.2", "198.19.4.9"}, [2]string{"198.19.7.7", "10.0.0.1"}, [2]string{"198.19.7.7", "198.19.4.9"})
	if got := r.arrived(); got.Src.String() != "198.19.7.7" || got.Dst.String() != "198.19.4.9" {
		t.Errorf("arrived: %+v", got)
	}
	if n := r.s.packets.unwelcome.Load(); n != 2 {
		t.Errorf("%d packets were unwelcome, want 2", n)
	}

	// The system netstack, of a gateway that forwards IPv4 only.
	r.s.hasGateway(api.Gateway{MTU: 1450, IPv4: true}, api.NetstackSystem)
	if got := r.s.packets.steering.Load().mtu(); got != 1450 {
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
	r.answer(stream, [2]string{"10.244.0.2", "198.19.4.9"})
	if got := r.arrived(); got.Src.String() != "10.244.0.2" {
		t.Errorf("arrived: %+v", got)
	}
}

// The kernel of a laptop with ip_forward=1 forwards what its neighbours send. Neither netstack carries that.
func TestPacketsFromOtherSourcesAreDropped(t *testing.T) {
	for _, netstack := range []string{api.NetstackGVisor, api.NetstackSystem} {
		t.Run(netstack, func(t *testing.T) {
			r := newPacketRig(t)
			r.s.hasGateway(api.Gateway{MTU: 1450, IPv4: true}, netstack)
			own, pod := "198.19.4.9", "10.244.0.2"
			if netstack == api.NetstackSystem {
				pod = "198.19.7.7"
			}
			for _, src := range []string{"192.168.1.7", "172.17.0.2", "198.19.4.8", "2001:db8::7", own} {
				for _, dst := range []string{"10.244.0.9", "198.19.7.9", "198.19.0.53"} {
					if netip.MustParseAddr(src).Is6() {
						dst = "fd00:244::9"
					}
					if src != own {
						r.emit(src, dst)
					}
				}
			}
			r.emit(own, pod)
			if netstack == api.NetstackSystem {
				if got := r.crossed(); got != pod {
					t.Errorf("a neighbour's packet to %s crossed", got)
				}
			} else if got := r.arrived(); got.Src.String() != pod {
				t.Errorf("a neighbour's packet was answered: %+v", got)
			}
			if n := r.s.packets.foreign.Load(); n != 12 {
				t.Errorf("%d packets were counted as others', want 12", n)
			}
		})
	}
	t.Run("a device in a namespace of its own has no neighbours", func(t *testing.T) {
		r := newPacketRig(t)
		r.s.packets.steer(func(s *steering) { s.foreign = true })
		r.s.routes.steerIsolated(prefixes("10.244.0.0/16 198.19.0.0/16"))
		r.emit("172.18.0.2", "10.244.0.2")
		if got := r.arrived(); got.Src.String() != "10.244.0.2" {
			t.Errorf("arrived: %+v", got)
		}
	})
}

// A broken stream is opened again; a new transport session opens all of them again.
func TestPacketStreamsAreReopened(t *testing.T) {
	r := newPacketRig(t)
	r.s.packets.steer(func(s *steering) { s.open = inbound{{All: true}} })
	for name, end := range map[string]func(stream *transport.Stream){
		"reset":    func(stream *transport.Stream) { stream.Reset() },
		"nonsense": func(stream *transport.Stream) { stream.Write([]byte{0xff, 0xff, 0xff, 0xff}) },
		"closed":   func(stream *transport.Stream) { stream.Close() },
		"session":  func(*transport.Stream) { r.s.current.now().Close() },
	} {
		stream := <-r.streams
		end(stream)
		select {
		case again := <-r.streams:
			r.answer(again, [2]string{"198.19.7.7", "198.19.4.9"})
			if got := r.arrived(); got.Src.String() != "198.19.7.7" {
				t.Errorf("%s: arrived: %+v", name, got)
			}
			r.streams <- again
		case <-time.After(10 * time.Second):
			t.Fatalf("%s: the stream did not come again", name)
		}
	}
}

// In the gvisor netstack, Forward leaves nearly every packet alone and must not allocate for it.
func TestForwardAllocatesNothing(t *testing.T) {
	l := newPacketPath(new(current), noHosts(), &shortcuts{open: newRecent()}, slog.New(slog.DiscardHandler))
	own := addrs("198.19.4.9 fd4e:19c6:8b7a::4:9")
	l.steering.Store(&steering{own: own, resolver: addrs("198.19.0.53")[0], inner: prefixes("198.19.0.0/16 fd4e:19c6:8b7a::/48")})
	h := packet.Header{Src: own[0], Dst: addrs("10.244.0.2")[0]}
	l.Buffer()
	if n := testing.AllocsPerRun(1000, func() {
		if len(l.Buffer()) < tun.MinRead || l.Forward(100, h) {
			t.Fatal("a pod's packet was forwarded")
		}
	}); n != 0 {
		t.Errorf("%v allocations a packet", n)
	}
}

// The manager dials nodes only in networks that the hello names because of --extra-cidr.
func TestHelloNamesExtraNetworks(t *testing.T) {
	s := newTestConnection(t)
	s.cfg.Request.ExtraCIDRs = prefixes("192.168.0.0/24")
	if hello, err := s.handshake.hello(); err != nil || !slices.Equal(hello.ExtraCIDRs, s.cfg.Request.ExtraCIDRs) {
		t.Errorf("says %v, %v", hello.ExtraCIDRs, err)
	}
}

// The hello states whether the laptop's device accepts super-packets; without a device, whether this system's do.
func TestHelloStatesGSO(t *testing.T) {
	s := newTestConnection(t)
	says := func(want bool) {
		t.Helper()
		if hello, err := s.handshake.hello(); err != nil || hello.NoGSO == want {
			t.Errorf("says no GSO: %v, %v; the device has it: %v", hello.NoGSO, err, want)
		}
	}
	says(tun.GSO)
	for _, gso := range []bool{true, false} {
		ours, app := tuntest.Pair(mtu, gso)
		defer ours.Close()
		defer app.Close()
		var device tun.Device = ours
		s.packets.device.Store(&device)
		says(gso)
	}
}
