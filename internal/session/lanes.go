package session

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
	"kubevpn/pkg/l3"
	"kubevpn/pkg/netstack"
	"kubevpn/pkg/packet"
	"kubevpn/pkg/transport"
	"kubevpn/pkg/tun"
)

// steering says which packets cross whole, and which that cross are ours. It never changes; lanes has the latest.
type steering struct {
	own      []netip.Addr   // the laptop's inner addresses
	resolver netip.Addr     // in an inner network, and yet the netstack's: names are answered there
	inner    []netip.Prefix // where laptops are
	// system4 and system6 say that all else of the family crosses whole too.
	system4, system6 bool
	// routed is what is the cluster's, where the device is sent everything; else nil.
	routed *netipx.IPSet
}

// whole reports whether a packet to dst crosses as it is.
func (s *steering) whole(dst netip.Addr) bool {
	if dst == s.resolver || s.routed != nil && !s.routed.Contains(dst) {
		return false
	}
	if dst.Is4() && s.system4 || dst.Is6() && s.system6 {
		return true
	}
	for _, p := range s.inner {
		if p.Contains(dst) {
			return true
		}
	}
	return false
}

// welcome reports whether a packet from a lane is for this laptop. Its kernel might forward any other.
func (s *steering) welcome(h *packet.Header) bool {
	if !slices.Contains(s.own, h.Dst) {
		return false
	}
	if h.Version == 4 && s.system4 || h.Version == 6 && s.system6 {
		return true
	}
	return slices.ContainsFunc(s.inner, func(p netip.Prefix) bool { return p.Contains(h.Src) })
}

// lanes is the session's L3 path: whole packets between the device and the traffic manager.
//
//	device ── netstack's reader ── Divert ── l3.Sender ══ streams of ProtoIP ══▶ manager
//	device ◀──────────── welcome? ── l3.Receive, one goroutine per lane ◀═══════
//
// The sender keeps the lanes open, on whichever transport session there is. It implements netstack.Diverter.
type lanes struct {
	log     *slog.Logger
	current *current
	address func() netip.Addr // the session's, for the lanes' requests
	sender  *l3.Sender

	steer   atomic.Pointer[steering]
	device  atomic.Pointer[tun.Device] // nil before there is one
	reading *l3.Frame                  // of the netstack's reader

	mu       sync.Mutex
	over     *transport.Session // the one that lanes were opened on last
	barriers *l3.Barriers       // of its manager's sender

	malformed, unwelcome, unwritten atomic.Uint64
	receivers                       sync.WaitGroup
}

var _ netstack.Diverter = (*lanes)(nil)

func newLanes(current *current, address func() netip.Addr, log *slog.Logger) *lanes {
	l := &lanes{log: log, current: current, address: address}
	l.steer.Store(&steering{})
	// The traffic manager runs on Linux, whose TUN device takes super-packets.
	l.sender = l3.NewSender(l3.SenderConfig{Open: l.open, Eager: true, GSO: true, Logger: log})
	return l
}

// run carries packets until ctx ends.
func (l *lanes) run(ctx context.Context) error {
	err := l.sender.Run(ctx)
	l.receivers.Wait()
	sent := l.sender.Stats()
	l.log.Debug("lanes", "packets", sent.Packets, "dropped", sent.Dropped, "broken", sent.Broken,
		"malformed", l.malformed.Load()+sent.Malformed, "unwelcome", l.unwelcome.Load(), "unwritten", l.unwritten.Load())
	return err
}

// gso says whether the device takes super-packets, and packets whose checksum is left to do: what the manager is told of
// it. The first greeting comes before the device.
func (l *lanes) gso() bool {
	if device := l.device.Load(); device != nil {
		return (*device).GSO()
	}
	return tun.GSO
}

// open opens a lane on the transport session of the moment, which may have to come first.
func (l *lanes) open(ctx context.Context, number int) (io.WriteCloser, error) {
	ts, err := l.current.wait(ctx)
	if err != nil {
		return nil, err
	}
	stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoIP, Src: netip.AddrPortFrom(l.address(), uint16(number))})
	if err != nil {
		return nil, err
	}
	lane, barriers := &laneStream{Stream: stream, ended: make(chan struct{})}, l.barriersOf(ts)
	l.receivers.Go(func() {
		defer close(lane.ended)
		if err := l3.Receive(stream, number, barriers, l.receiver(), &l.malformed); err != nil && ctx.Err() == nil {
			l.log.Debug("a lane ended", "lane", number, "err", err)
		}
	})
	return lane, nil
}

// barriersOf are those of the lanes on a session: what lanes of another wait for does not come any more.
func (l *lanes) barriersOf(ts *transport.Session) *l3.Barriers {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.over != ts {
		l.over, l.barriers = ts, new(l3.Barriers)
	}
	return l.barriers
}

// laneStream is broken for its writer as soon as nothing is read from it any more.
type laneStream struct {
	*transport.Stream
	ended chan struct{}
}

var _ l3.Marks = (*laneStream)(nil)

func (s *laneStream) Gone() <-chan struct{} { return s.ended }

// receiver is what a lane's frames are given to: it writes them to the device.
func (l *lanes) receiver() func(*l3.Frame) {
	pieces := make([][]byte, 1) // one packet at a time
	return func(f *l3.Frame) {
		defer f.Release()
		h, err := f.Header()
		device := l.device.Load()
		if err != nil || device == nil || !l.steer.Load().welcome(&h) {
			l.unwelcome.Add(1)
			return
		}
		pieces[0] = f.Bytes()
		if (*device).Writev(pieces) != nil {
			l.unwritten.Add(1)
		}
		pieces[0] = nil
	}
}

// Buffer implements netstack.Diverter: packets are read to where they are sent from.
func (l *lanes) Buffer() []byte {
	if l.reading == nil {
		l.reading = l3.NewFrame()
	}
	return l.reading.Buffer()
}

// Divert implements netstack.Diverter.
func (l *lanes) Divert(n int, dst netip.Addr) bool {
	if !l.steer.Load().whole(dst) {
		return false
	}
	l.reading.SetLen(n)
	l.sender.Send(l.reading)
	l.reading = nil
	return true
}

// resteer makes the lanes follow what the session has become.
func (s *Session) resteer() {
	s.mu.Lock()
	defer s.mu.Unlock()
	next := &steering{resolver: s.address.Resolver, inner: s.inner, routed: s.routed}
	for _, a := range []netip.Addr{s.address.Laptop4, s.address.Laptop6} {
		if a.IsValid() {
			next.own = append(next.own, a)
		}
	}
	if g := s.gateway; s.status.Netstack == api.NetstackSystem && g != nil {
		// A family that the gateway does not forward goes by the other netstack.
		next.system4, next.system6 = g.IPv4, g.IPv6
	}
	s.lanes.steer.Store(next)
}
