package connection

import (
	"context"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"go4.org/netipx"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/wire/transport"
)

// mtu is the MTU of the device with the gvisor netstack, and of every device at first. Flows end on the laptop, so it
// says nothing about the path to the cluster. The larger it is, the fewer packets: 65520 fits one IPv4 packet.
const mtu = 65520

// steering decides which packets cross the tunnel whole. It also decides which of the packets that arrive reach the
// laptop's kernel.
// The value in packetPath.steering never changes: steer replaces it.
type steering struct {
	own      []netip.Addr   // the laptop's inner addresses, IPv4 first; written by handshake
	resolver netip.Addr     // answers DNS in the netstack, with an address of an inner network; by handshake
	gateway  *api.Gateway   // the last one that the manager had; by handshake
	inner    []netip.Prefix // networks of laptops; by routes
	routed   *netipx.IPSet  // the cluster's networks if the device is isolated, else nil; by routes
	ended    []netip.Prefix // networks whose flows of whole packets end; by routes
	system   bool           // the system netstack is in use; by chooser
	foreign  bool           // the device may send from other addresses: it is isolated; never changes
	open     inbound        // flows that others may begin; never changes
}

// own4 returns the laptop's IPv4 inner address; invalid before the first lease.
func (s *steering) own4() netip.Addr {
	if len(s.own) == 0 {
		return netip.Addr{}
	}
	return s.own[0]
}

// system4 and system6 report whether the gateway carries the packets of the family. Gvisor carries the others.
func (s *steering) system4() bool { return s.system && s.gateway != nil && s.gateway.IPv4 }
func (s *steering) system6() bool { return s.system && s.gateway != nil && s.gateway.IPv6 }

// mtu returns the device's MTU.
func (s *steering) mtu() int {
	if s.system && s.gateway != nil {
		return min(max(s.gateway.MTU, 1280), 65535) // the manager says it, so it may be anything
	}
	return mtu
}

// whole reports whether a packet to dst crosses the tunnel whole.
func (s *steering) whole(dst netip.Addr) bool {
	if dst == s.resolver || dst == s.resolver.Next() || covers(s.ended, dst) ||
		s.routed != nil && !s.routed.Contains(dst) {
		return false
	}
	if dst.Is4() && s.system4() || dst.Is6() && s.system6() {
		return true
	}
	return s.isInner(dst)
}

// accepts reports whether a packet from a packet stream is for this laptop. Its kernel might forward any other.
func (s *steering) accepts(h *packet.Header) bool {
	if !slices.Contains(s.own, h.Dst) {
		return false
	}
	return h.Version == 4 && s.system4() || h.Version == 6 && s.system6() || s.isInner(h.Src)
}

// isInner reports whether the address belongs to a laptop.
func (s *steering) isInner(a netip.Addr) bool { return covers(s.inner, a) }

// packetPath carries whole packets between the device and the traffic manager.
//
//	device ── netstack's reader ── Forward ── packetlink.Sender ══ packet streams ══▶ manager
//	device ◀─ inbound.admits ◀─ steering.accepts ── packetlink.Receive, one goroutine per stream ◀══
//
// The sender keeps the packet streams open on the session of the moment. packetPath implements
// netstack.PacketForwarder.
type packetPath struct {
	log     *slog.Logger
	current *current
	sender  *packetlink.Sender

	steerMu  sync.Mutex // serialises steer
	steering atomic.Pointer[steering]
	device   atomic.Pointer[tun.Device] // nil before there is one
	reading  *packetlink.Frame          // used by the netstack's reader alone
	sent     *recent                    // flows of this laptop that may be answered
	hosts    *hosts

	shortcuts *shortcuts

	mu       sync.Mutex
	session  *transport.Session   // of the packet streams that were opened last
	barriers *packetlink.Barriers // of that session

	malformed, unwelcome, denied, unwritten, foreign atomic.Uint64
	running                                          sync.WaitGroup // goroutines of run
}

var _ netstack.PacketForwarder = (*packetPath)(nil)

func newPacketPath(current *current, hosts *hosts, shortcuts *shortcuts, log *slog.Logger) *packetPath {
	p := &packetPath{log: log, current: current, sent: newRecent(), hosts: hosts, shortcuts: shortcuts}
	p.steering.Store(&steering{})
	// The traffic manager runs on Linux, whose TUN device takes super-packets.
	p.sender = packetlink.NewSender(packetlink.SenderConfig{Open: p.open, Eager: true, GSO: true, Logger: log})
	return p
}

// steer changes the steering. Packets follow it from then on.
func (p *packetPath) steer(change func(*steering)) {
	p.steerMu.Lock()
	defer p.steerMu.Unlock()
	next := *p.steering.Load()
	change(&next)
	p.steering.Store(&next)
}

// run carries packets until ctx ends.
func (p *packetPath) run(ctx context.Context) {
	p.running.Go(func() { p.sent.run(ctx) })
	p.running.Go(func() { p.shortcuts.open.run(ctx) })
	p.sender.Run(ctx)
	p.running.Wait()
	sent := p.sender.Stats()
	p.log.Debug("packet streams", "packets", sent.Packets, "broken", sent.Broken, "dropped", p.dropped())
}

// dropped counts dropped packets by reason.
func (p *packetPath) dropped() map[string]uint64 {
	sent := p.sender.Stats()
	return map[string]uint64{
		"packet_queue_full": sent.Dropped, "packet_malformed": p.malformed.Load() + sent.Malformed,
		"packet_foreign": p.foreign.Load(), "packet_unwelcome": p.unwelcome.Load(), "packet_denied": p.denied.Load(),
		"packet_device": p.unwritten.Load(),
	}
}

// deviceName returns the name of the device; empty before there is one.
func (p *packetPath) deviceName() string {
	if device := p.device.Load(); device != nil {
		return (*device).Name()
	}
	return ""
}

// gso reports whether the device takes super-packets, and packets without checksums. Before there is a device, it
// reports what devices of this system do.
func (p *packetPath) gso() bool {
	if device := p.device.Load(); device != nil {
		return (*device).GSO()
	}
	return tun.GSO
}

// open opens a packet stream as soon as there is a session.
func (p *packetPath) open(ctx context.Context, number int) (io.WriteCloser, error) {
	ts, err := p.current.wait(ctx)
	if err != nil {
		return nil, err
	}
	stream, err := ts.Open(ctx, transport.Request{
		Proto: transport.ProtoIP, Src: netip.AddrPortFrom(p.steering.Load().own4(), uint16(number)),
	})
	if err != nil {
		return nil, err
	}
	s, barriers := &packetStream{Stream: stream, ended: make(chan struct{})}, p.barriersOf(ts)
	p.running.Go(func() {
		defer close(s.ended)
		to := receiver{p, packetlink.NewWriter(&p.unwritten)}
		if err := packetlink.Receive(stream, number, barriers, to, &p.malformed); err != nil && ctx.Err() == nil {
			p.log.Debug("a packet stream ended", "stream", number, "err", err)
		}
	})
	return s, nil
}

// barriersOf returns the barriers of a session. Those of an earlier session are useless: its streams have ended.
func (p *packetPath) barriersOf(ts *transport.Session) *packetlink.Barriers {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.session != ts {
		p.session, p.barriers = ts, new(packetlink.Barriers)
	}
	return p.barriers
}

// packetStream tells its writer when its reader has ended.
type packetStream struct {
	*transport.Stream
	ended chan struct{}
}

var _ packetlink.Marks = (*packetStream)(nil)

func (s *packetStream) Gone() <-chan struct{} { return s.ended }

// receiver writes the frames of one packet stream to the device.
type receiver struct {
	p *packetPath
	w *packetlink.Writer
}

func (r receiver) Flush() { r.w.Flush() }

func (r receiver) Deliver(f *packetlink.Frame) {
	p := r.p
	h, err := f.Header()
	device, to := p.device.Load(), p.steering.Load()
	if err != nil || device == nil || !to.accepts(&h) {
		p.unwelcome.Add(1)
		f.Release()
		return
	}
	if !to.open.admits(p.sent, &h, f.Packet()) {
		p.denied.Add(1)
		if to.isInner(h.Src) {
			p.reject(&h, f.Packet())
		}
		f.Release()
		return
	}
	p.hosts.see(&h, f.Packet(), h.Src)
	r.w.Write(*device, f)
}

// reject answers another laptop's packet with an ICMP error, so that its program does not wait for an answer.
func (p *packetPath) reject(h *packet.Header, b []byte) {
	answer := packetlink.NewFrame()
	buf := answer.Buffer()
	clear(buf[:packet.VirtioLen])
	out, err := packet.AppendError(buf[:packet.VirtioLen], packet.Prohibited, h.Dst, b)
	if err != nil { // such a packet gets no ICMP error
		answer.Release()
		return
	}
	answer.SetLen(len(out))
	p.sender.Send(answer)
}

// Buffer implements netstack.PacketForwarder. The reader reads a packet into the frame that sends it.
func (p *packetPath) Buffer() []byte {
	if p.reading == nil {
		p.reading = packetlink.NewFrame()
	}
	return p.reading.Buffer()
}

// Forward implements netstack.PacketForwarder. It drops what this laptop's kernel forwards for another machine: the
// tunnel is for programs of this machine, and for containers and virtual machines that it masquerades.
func (p *packetPath) Forward(n int, h packet.Header) bool {
	to := p.steering.Load()
	if !to.foreign && !slices.Contains(to.own, h.Src) {
		p.foreign.Add(1)
		return true
	}
	if !to.whole(h.Dst) {
		return false
	}
	p.reading.SetLen(n)
	if p.shortcuts.takes(&h, p.reading.Packet()) {
		return false
	}
	if h.Proto != packet.ProtoTCP {
		if f, ok := flowOf(&h, p.reading.Packet(), h.Dst); ok {
			p.sent.add(f)
		}
	}
	p.hosts.see(&h, p.reading.Packet(), h.Dst)
	p.sender.Send(p.reading)
	p.reading = nil
	return true
}
