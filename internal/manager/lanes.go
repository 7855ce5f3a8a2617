package manager

import (
	"context"
	"io"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"

	"kubevpn/internal/api"
	"kubevpn/pkg/l3"
	"kubevpn/pkg/transport"
)

// peer is a session as the router sees it.
type peer struct {
	router    *router
	connected func() bool // whether its laptop is there at this moment
	end       func()      // ends the session: another has its lease
	system    atomic.Bool // its netstack is the pod's kernel

	addrs    atomic.Pointer[[]netip.Addr] // those of lease that it still has
	sender   *l3.Sender                   // set before it has an address
	barriers l3.Barriers                  // of the laptop's sender

	// With router.mu held:
	lease api.Lease
	ended bool

	mu    sync.Mutex
	lanes [l3.Lanes]*lane
	more  chan struct{} // closed when one is added
}

func newPeer(r *router, connected func() bool, end func()) *peer {
	return &peer{router: r, connected: connected, end: end, more: make(chan struct{})}
}

func (p *peer) addresses() []netip.Addr {
	if addrs := p.addrs.Load(); addrs != nil {
		return *addrs
	}
	return nil
}

func (p *peer) owns(addr netip.Addr) bool { return slices.Contains(p.addresses(), addr) }

// have and lose change the addresses. The router's mutex is held.
func (p *peer) have(addrs []netip.Addr) { p.addrs.Store(&addrs) }

func (p *peer) lose(addr netip.Addr) {
	p.have(slices.DeleteFunc(slices.Clone(p.addresses()), func(a netip.Addr) bool { return a == addr }))
}

// lane is a stream of frames. One that the laptop has not opened is stood in for by lane 0, so several writers may
// have it.
type lane struct {
	stream *transport.Stream
	gone   chan struct{} // closed when nothing more is read from it

	mu sync.Mutex // keeps Writes, and with them frames, whole
}

func (l *lane) Write(b []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.stream.Write(b)
}

// Close ends a Write that waits, too.
func (l *lane) Close() error          { return l.stream.Reset() }
func (l *lane) Gone() <-chan struct{} { return l.gone }

// Mark and Arrived are the stream's.
func (l *lane) Mark() uint64             { return l.stream.Mark() }
func (l *lane) Arrived(mark uint64) bool { return l.stream.Arrived(mark) }

var _ l3.Marks = (*lane)(nil)

// open gives the lane that the laptop has opened, or lane 0 in its place. It waits until there is one: the manager
// opens none itself.
func (p *peer) open(ctx context.Context, number int) (io.WriteCloser, error) {
	for {
		p.mu.Lock()
		l, more := p.lanes[number], p.more
		if l == nil {
			l = p.lanes[0]
		}
		p.mu.Unlock()
		if l != nil {
			return l, nil
		}
		select {
		case <-more:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// add makes l the lane of that number.
func (p *peer) add(number int, l *lane) {
	p.mu.Lock()
	before := p.lanes[number]
	p.lanes[number] = l
	close(p.more)
	p.more = make(chan struct{})
	p.mu.Unlock()
	p.sender.Renew(number)
	if before != nil {
		before.Close() // the laptop has given it up
	}
}

// remove undoes add.
func (p *peer) remove(number int, l *lane) {
	p.mu.Lock()
	if p.lanes[number] == l {
		p.lanes[number] = nil
	}
	p.mu.Unlock()
	close(l.gone)
	l.Close()
}

// acceptLane carries the packets of a lane to the router until it ends.
func (s *session) acceptLane(in *transport.Incoming) error {
	number, p := int(in.Src.Port()), s.peer
	if number >= l3.Lanes || !p.owns(in.Src.Addr().Unmap()) {
		return in.Reject(transport.CodeProhibited)
	}
	stream, err := in.Accept()
	if err != nil {
		return err
	}
	l := &lane{stream: stream, gone: make(chan struct{})}
	p.add(number, l)
	defer p.remove(number, l)
	pieces := make([][]byte, 1) // one packet at a time
	return l3.Receive(stream, number, &p.barriers, func(f *l3.Frame) { p.router.fromLane(p, f, pieces) }, &p.router.counts.malformed)
}

// admit gives the session its lease. around are the cluster's networks.
func (s *session) admit(ctx context.Context, hello *api.ClientHello, around []netip.Prefix) api.Lease {
	s.peer.system.Store(hello.Netstack == api.NetstackSystem)
	w := wish{client: hello.Client, keep: hello.Lease, avoid: append(slices.Clone(hello.Avoid), around...)}
	lease, begins := s.m.router.admit(s.peer, w, func() *l3.Sender {
		return l3.NewSender(l3.SenderConfig{Open: s.peer.open, GSO: !hello.NoGSO, Logger: s.log})
	})
	if begins {
		s.flows.Go(func() { s.peer.sender.Run(ctx) }) // its error is nil
	}
	return lease
}
