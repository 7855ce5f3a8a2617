package router

import (
	"cmp"
	"context"
	"io"
	"log/slog"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packetlink"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// Peer is a session from the router's point of view.
type Peer struct {
	router    *Router
	log       *slog.Logger
	connected func() bool
	end       func()
	system    atomic.Bool    // its netstack is system
	extra     []netip.Prefix // of --extra-cidr; set before the peer has an address

	addrs    atomic.Pointer[[]netip.Addr] // the addresses of lease that it still owns
	sender   *packetlink.Sender           // set before the peer has an address
	barriers packetlink.Barriers          // of the laptop's sender

	// With router.mu held:
	lease  api.Lease
	client string
	avoid  []netip.Prefix // the laptop's own networks
	ended  bool

	streams wakeup.Value[[packetlink.Streams]*packetStream]
}

// NewPeer returns a peer without a lease. connected reports whether a conn connects its laptop now. end ends its
// session, because a newer one of the same client took its lease; the router calls it with its mutex held.
func NewPeer(r *Router, log *slog.Logger, connected func() bool, end func()) *Peer {
	return &Peer{router: r, log: log, connected: connected, end: end}
}

func (p *Peer) addresses() []netip.Addr {
	if addrs := p.addrs.Load(); addrs != nil {
		return *addrs
	}
	return nil
}

func (p *Peer) owns(addr netip.Addr) bool { return slices.Contains(p.addresses(), addr) }

// setAddresses and removeAddress change the addresses. Call with router.mu held.
func (p *Peer) setAddresses(addrs []netip.Addr) { p.addrs.Store(&addrs) }

func (p *Peer) removeAddress(addr netip.Addr) {
	p.setAddresses(slices.DeleteFunc(slices.Clone(p.addresses()), func(a netip.Addr) bool { return a == addr }))
}

// packetStream is a transport stream of frames. Stream 0 is the substitute for those that the laptop has not opened, so
// it may have several writers.
type packetStream struct {
	stream *transport.Stream
	gone   chan struct{} // closed when the manager stops reading from it

	mu sync.Mutex // keeps Writes, and so frames, whole
}

func (st *packetStream) Write(b []byte) (int, error) {
	st.mu.Lock()
	defer st.mu.Unlock()
	return st.stream.Write(b)
}

// Close also ends a Write that blocks.
func (st *packetStream) Close() error          { return st.stream.Reset() }
func (st *packetStream) Gone() <-chan struct{} { return st.gone }

// Mark and Arrived implement packetlink.Marks.
func (st *packetStream) Mark() uint64             { return st.stream.Mark() }
func (st *packetStream) Arrived(mark uint64) bool { return st.stream.Arrived(mark) }

var _ packetlink.Marks = (*packetStream)(nil)

// open returns the packet stream that the laptop has opened, or stream 0 as its substitute. It waits until there is
// one: the manager opens none itself.
func (p *Peer) open(ctx context.Context, number int) (io.WriteCloser, error) {
	streams, err := p.streams.Await(ctx, func(all [packetlink.Streams]*packetStream) bool {
		return all[number] != nil || all[0] != nil
	})
	if err != nil {
		return nil, err
	}
	return cmp.Or(streams[number], streams[0]), nil
}

// add makes st the packet stream of that number, and closes the previous one.
func (p *Peer) add(number int, st *packetStream) {
	var before *packetStream
	p.streams.Update(func(all *[packetlink.Streams]*packetStream) { before, all[number] = all[number], st })
	p.sender.Renew(number)
	if before != nil {
		before.Close() // the laptop has abandoned it
	}
}

// remove undoes add.
func (p *Peer) remove(number int, st *packetStream) {
	p.streams.Update(func(all *[packetlink.Streams]*packetStream) {
		if all[number] == st {
			all[number] = nil
		}
	})
	close(st.gone)
	st.Close()
}

// Accept passes the packets of a packet stream to the router until the stream ends.
func (p *Peer) Accept(in *transport.Incoming) error {
	number := int(in.Src.Port())
	if number >= packetlink.Streams || !p.owns(in.Src.Addr().Unmap()) {
		return in.Reject(transport.CodeProhibited)
	}
	stream, err := in.Accept()
	if err != nil {
		return err
	}
	st := &packetStream{stream: stream, gone: make(chan struct{})}
	p.add(number, st)
	defer p.remove(number, st)
	to := fromLaptop{p, packetlink.NewWriter(&p.router.counts.unwritten)}
	return packetlink.Receive(stream, number, &p.barriers, to, &p.router.counts.malformed)
}

// fromLaptop passes the packets of one packet stream to the router.
type fromLaptop struct {
	p *Peer
	w *packetlink.Writer
}

func (l fromLaptop) Deliver(f *packetlink.Frame) { l.p.router.fromLaptop(l.p, f, l.w) }
func (l fromLaptop) Flush()                      { l.w.Flush() }

// Admit assigns a lease to the laptop, or returns the one that it has. system: its packets may leave by the gateway.
// The lease avoids the laptop's own networks and the networks in avoid. If run is not nil, the caller must run it until
// the session ends: it sends packets to the laptop.
func (p *Peer) Admit(hello *api.ClientHello, system bool, avoid []netip.Prefix) (lease api.Lease,
	run func(context.Context)) {
	p.system.Store(system)
	r := p.router
	r.mu.Lock()
	defer r.mu.Unlock()
	if p.ended || hello.Client == "" {
		return api.Lease{}, nil
	}
	if p.sender != nil {
		return p.lease, nil
	}
	p.sender = packetlink.NewSender(packetlink.SenderConfig{Open: p.open, GSO: !hello.NoGSO, Logger: p.log})
	p.extra = hello.ExtraCIDRs
	p.client, p.avoid = hello.Client, hello.Avoid
	p.lease = r.leases.take(p, leaseRequest{client: hello.Client, keep: hello.Lease,
		avoid: slices.Concat(hello.Avoid, avoid)})
	r.replace(r.routes.Load().gateway)
	return p.lease, p.sender.Run
}
