package router

import (
	"encoding/binary"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/wakeup"
)

// Router carries whole packets between sessions, and between sessions and the gateway's TUN device.
//
//	laptop ─▶ src leased to this session? ─┬─ dst leased to another ─────────────────▶ its packet streams
//	            no: dropped, counted       ├─ dst in an inner network ───────────────▶ ICMP host unreachable
//	                                       ├─ dst not for laptops (access.Filter) ───▶ ICMP prohibited
//	                                       ├─ system netstack, gateway there ────────▶ TUN
//	                                       └─ else ──────────────────────────────────▶ ICMP net unreachable
//	TUN ────▶ src no laptop's? ─▶ dst leased ─▶ that session's packet streams
//
// A packet costs one atomic load and one look-up, and takes no lock before its queue's: routes change rarely, and are
// replaced as a whole.
type Router struct {
	log    *slog.Logger
	allows func(dst netip.AddrPort, extra []netip.Prefix) bool // filter.allowsDirect
	// changed is called when networks or the gateway have changed.
	changed func()

	routes atomic.Pointer[routes]
	counts counts
	alarm  rate.Sometimes // about spoofed packets

	mu     sync.Mutex
	leases *leases
	next   wakeup.Broadcast // sent when routes.networks change
	lost   uint64           // packets that the queues of ended sessions dropped
}

// routes is an immutable snapshot.
type routes struct {
	peers    map[netip.Addr]*Peer
	networks []netip.Prefix
	gateway  *attachedGateway // nil if there is none
}

// distinct returns each peer once. The map peers has an entry for each address.
func (t *routes) distinct() map[*Peer]struct{} {
	all := make(map[*Peer]struct{})
	for _, p := range t.peers {
		all[p] = struct{}{}
	}
	return all
}

func (t *routes) isInner(addr netip.Addr) bool {
	return slices.ContainsFunc(t.networks, func(p netip.Prefix) bool { return p.Contains(addr) })
}

// attachedGateway is the TUN device and its description. It is immutable.
type attachedGateway struct {
	device tun.Device
	about  api.Gateway
}

func (g *attachedGateway) forwards(version uint8) bool {
	return version == 4 && g.about.IPv4 || version == 6 && g.about.IPv6
}

// counts counts packets that did not arrive.
type counts struct {
	spoofed    atomic.Uint64 // the source is not the session's
	malformed  atomic.Uint64
	noRoute    atomic.Uint64
	prohibited atomic.Uint64
	unwritten  atomic.Uint64 // the TUN device rejected it
}

// drops is a snapshot of counts.
type drops struct{ spoofed, malformed, noRoute, prohibited, unwritten, queueDrops uint64 }

// New returns a Router without leases. allows reports whether a packet to dst may leave by the gateway, given the
// networks of --extra-cidr. The Router calls changed, with its mutex held, when Describe has a new result.
func New(allows func(netip.AddrPort, []netip.Prefix) bool, changed func(), log *slog.Logger) *Router {
	r := &Router{log: log, allows: allows, changed: changed, leases: newLeases()}
	r.alarm.Interval = alarmInterval
	r.routes.Store(&routes{})
	return r
}

// alarmInterval is how often the log shows spoofed packets at most. Our laptops send none, unless the user intends to.
const alarmInterval = 5 * time.Second

// countSpoofed counts a packet whose session does not own its source address.
func (r *Router) countSpoofed() {
	n := r.counts.spoofed.Add(1)
	r.alarm.Do(func() {
		r.log.Warn("dropped packets with a source address that their session does not own", "spoofed", n)
	})
}

func (r *Router) stats() drops {
	r.mu.Lock()
	defer r.mu.Unlock()
	s := drops{
		spoofed: r.counts.spoofed.Load(), malformed: r.counts.malformed.Load(), noRoute: r.counts.noRoute.Load(),
		prohibited: r.counts.prohibited.Load(), unwritten: r.counts.unwritten.Load(), queueDrops: r.lost,
	}
	for p := range r.routes.Load().distinct() {
		s.queueDrops += p.sender.Stats().Dropped
	}
	return s
}

// Dismiss releases the lease. The peer cannot be admitted again.
func (p *Peer) Dismiss() {
	r := p.router
	r.mu.Lock()
	defer r.mu.Unlock()
	p.ended = true
	if p.sender == nil {
		return
	}
	r.leases.release(p)
	r.lost += p.sender.Stats().Dropped
	r.replace(r.routes.Load().gateway)
}

// attach sets the gateway; nil removes it.
func (r *Router) attach(g *attachedGateway) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.replace(g)
}

// replace computes new routes from the leases and the gateway. Call with mu held.
func (r *Router) replace(g *attachedGateway) {
	before := r.routes.Load()
	now := &routes{peers: make(map[netip.Addr]*Peer, len(before.peers)+1), networks: r.leases.networks(), gateway: g}
	for addr, h := range r.leases.taken {
		if h.holder != nil {
			now.peers[addr] = h.holder
		}
	}
	r.routes.Store(now)
	if !slices.Equal(before.networks, now.networks) {
		r.next.Send()
	}
	r.changed()
}

// networks returns the inner networks, and a channel that is closed when they change.
func (r *Router) networks() ([]netip.Prefix, <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	return r.routes.Load().networks, r.next.Next()
}

// Describe sets the router's part of the state that laptops receive.
func (r *Router) Describe(state *api.ManagerState) {
	t := r.routes.Load()
	state.InnerNetworks, state.Gateway = t.networks, nil
	if t.gateway != nil {
		about := t.gateway.about
		state.Gateway = &about
	}
}

// Others returns networks without those in which p's laptop avoids an address and that only its own older sessions
// still use: it needs no route to itself.
func (r *Router) Others(p *Peer, networks []netip.Prefix) []netip.Prefix {
	r.mu.Lock()
	defer r.mu.Unlock()
	return slices.DeleteFunc(slices.Clone(networks), func(network netip.Prefix) bool {
		return overlaps(network, p.avoid) && !r.leases.usedBeside(p.client, network)
	})
}

// fromLaptop routes a packet that p sent. It owns f. Packets to the gateway's device go through w.
func (r *Router) fromLaptop(p *Peer, f *packetlink.Frame, w *packetlink.Writer) {
	h, err := f.Header()
	switch {
	case err != nil: // does not happen: packetlink.Receive has checked it
		r.counts.malformed.Add(1)
		f.Release()
		return
	case !p.owns(h.Src):
		r.countSpoofed()
		f.Release()
		return
	}
	t := r.routes.Load()
	if to := t.peers[h.Dst]; to != nil {
		to.sender.Send(f)
		return
	}
	g := t.gateway
	switch {
	case t.isInner(h.Dst):
		r.counts.noRoute.Add(1)
		r.report(t, p, packet.HostUnreachable, &h, f)
	case !r.allows(netip.AddrPortFrom(h.Dst, port(&h, f.Packet())), p.extra):
		r.counts.prohibited.Add(1)
		r.report(t, p, packet.Prohibited, &h, f)
	case g == nil || !p.system.Load() || !g.forwards(h.Version):
		r.counts.noRoute.Add(1)
		r.report(t, p, packet.NetUnreachable, &h, f)
	default:
		w.Write(g.device, f)
		return
	}
	f.Release()
}

// report sends p an ICMP error about its packet. Its source is the gateway's address in p's network, even if there is
// no gateway.
func (r *Router) report(t *routes, p *Peer, why packet.Reason, h *packet.Header, f *packetlink.Frame) {
	var from netip.Addr
	for _, network := range t.networks {
		if network.Contains(h.Src) {
			from = host(network, gatewayHost)
		}
	}
	answer := packetlink.NewFrame()
	b := answer.Buffer()
	clear(b[:packet.VirtioLen])
	out, err := packet.AppendError(b[:packet.VirtioLen], why, from, f.Packet())
	if err != nil { // ICMP forbids an error about this packet
		answer.Release()
		return
	}
	answer.SetLen(len(out))
	p.sender.Send(answer)
}

// fromGateway routes a packet from the pod's kernel to a laptop. It owns f. A source in an inner network is spoofed,
// because packets between laptops never pass the kernel; the exception is the device's own address.
func (r *Router) fromGateway(f *packetlink.Frame) {
	h, err := f.Header()
	if err != nil {
		r.counts.malformed.Add(1)
		f.Release()
		return
	}
	t := r.routes.Load()
	to := t.peers[h.Dst]
	switch {
	case to == nil: // link-local noise, or a late packet for a laptop that has gone
		r.counts.noRoute.Add(1)
	case t.isInner(h.Src) && (t.gateway == nil || !slices.Contains(t.gateway.about.Addrs, h.Src)):
		r.countSpoofed()
	default:
		to.sender.Send(f)
		return
	}
	f.Release()
}

// readGateway routes packets from the device until it is closed or fails.
func (r *Router) readGateway(device tun.Device) error {
	for {
		f := packetlink.NewFrame()
		n, err := device.Read(f.Buffer())
		if err != nil {
			f.Release()
			return err
		}
		f.SetLen(n)
		r.fromGateway(f)
	}
}

// port returns the destination port, or 0 if the packet does not show one.
func port(h *packet.Header, p []byte) uint16 {
	if h.Proto != packet.ProtoTCP && h.Proto != packet.ProtoUDP || h.FragmentOffset != 0 || len(p) < h.HeaderLen+4 {
		return 0
	}
	return binary.BigEndian.Uint16(p[h.HeaderLen+2:])
}
