package connection

import (
	"context"
	"io"
	"maps"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"

	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wire/transport"
)

// A flow of a program of this machine to a workload that this machine intercepts takes a shortcut: it ends here, and
// what matches does not leave the machine.
//
//	program ─▶ device ─▶ netstack ─▶ pair ─▶ Shortcut ─┬─ matches ─▶ the program that receives the requests
//	                                                   └─ else ════▶ traffic manager, as without a shortcut
//
// In the system netstack, the packets of these flows, and of no others, go to the netstack as well.

// Shortcut serves a TCP connection of a program until it ends, and closes it. far connects to where the connection
// would have gone.
type Shortcut = func(ctx context.Context, conn net.Conn, src, dst netip.AddrPort,
	far func(context.Context) (net.Conn, error))

// shortcuts are the destinations of all intercepts of a connection.
type shortcuts struct {
	all  atomic.Pointer[map[netip.AddrPort]Shortcut] // nil: there were none yet; nil in it: only known flows take it
	open *recent                                     // flows that take one

	mu sync.Mutex
	by map[string]map[netip.AddrPort]Shortcut // intercept
}

// SetShortcuts replaces the shortcuts of an intercept; nil removes them. Open flows stay. A destination of two
// intercepts has none: agents know which of them gets a request.
func (c *Connection) SetShortcuts(intercept string, to map[netip.AddrPort]Shortcut) {
	c.shortcuts.set(intercept, to)
}

func (s *shortcuts) set(intercept string, to map[netip.AddrPort]Shortcut) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.by == nil {
		s.by = map[string]map[netip.AddrPort]Shortcut{}
	}
	if s.by[intercept] = maps.Clone(to); to == nil {
		delete(s.by, intercept)
	}
	now, users := map[netip.AddrPort]Shortcut{}, map[netip.AddrPort]int{}
	for _, some := range s.by {
		for at, shortcut := range some {
			now[at] = shortcut
			users[at]++
		}
	}
	maps.DeleteFunc(now, func(at netip.AddrPort, _ Shortcut) bool { return users[at] > 1 })
	for _, f := range s.open.list() { // the netstack knows them
		if _, found := now[f.remote]; !found {
			now[f.remote] = nil
		}
	}
	s.all.Store(&now)
}

// to returns the shortcut to a destination, or nil.
func (s *shortcuts) to(dst netip.AddrPort) Shortcut {
	if all := s.all.Load(); all != nil {
		return (*all)[dst]
	}
	return nil
}

// takes reports whether a packet that would cross the tunnel whole belongs to a flow with a shortcut. A flow that began
// before the shortcut goes on as it is.
func (s *shortcuts) takes(h *packet.Header, b []byte) bool {
	all := s.all.Load()
	if all == nil || len(*all) == 0 || h.Proto != packet.ProtoTCP {
		return false
	}
	f, ok := flowOf(h, b, h.Dst)
	if !ok {
		return false
	}
	shortcut, known := (*all)[f.remote]
	if !known {
		return false
	}
	const flags, syn, ack = 13, 0x02, 0x10 // RFC 9293, 3.1
	if at := h.HeaderLen + flags; shortcut != nil && len(b) > at && b[at]&(syn|ack) == syn {
		s.open.add(f)
		return true
	}
	return s.open.has(f)
}

// shorten opens a flow that takes a shortcut.
func (d dialer) shorten(ctx context.Context, shortcut Shortcut, src, dst netip.AddrPort) (netstack.Stream, error) {
	near, inner, err := pair()
	if err != nil {
		return nil, err
	}
	ctx, end := context.WithCancel(context.WithoutCancel(ctx))
	s := &shortStream{end: near, over: end}
	f := d.flows.begin(packet.ProtoTCP, src, dst)
	f.opened(s)
	s.flow = f
	go func() {
		defer end()
		shortcut(ctx, inner, src, dst, func(ctx context.Context) (net.Conn, error) {
			ts, err := d.session(ctx)
			if err != nil {
				return nil, err
			}
			stream, err := ts.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Src: src, Dst: dst})
			if err != nil {
				return nil, err // not a stream that is nil
			}
			return stream, nil
		})
		_ = inner.Close() // it may be closed already
	}()
	return s, nil
}

// shortPath is the Path of flows that take a shortcut in their statistics: no conn of the session carries them.
const shortPath = -1

// shortStream is the netstack's end of a flow that takes a shortcut. Its Close ends the flow.
type shortStream struct {
	*end
	flow           *openFlow
	over           context.CancelFunc
	sent, received atomic.Uint64 // bytes
}

func (s *shortStream) Read(p []byte) (int, error) {
	n, err := s.end.Read(p)
	s.received.Add(uint64(n))
	return n, err
}

func (s *shortStream) Write(p []byte) (int, error) {
	n, err := s.end.Write(p)
	s.sent.Add(uint64(n))
	return n, err
}

func (s *shortStream) Stats() transport.StreamStats {
	return transport.StreamStats{Sent: s.sent.Load(), Received: s.received.Load(), Attached: true, Path: shortPath}
}

func (s *shortStream) Close() error {
	defer s.flow.end()
	defer s.over()
	return s.end.Close()
}

// end is one end of a pair of sockets that tells the other of a reset, as TCP does.
type end struct {
	*net.UnixConn
	own, other *atomic.Bool // it was reset
}

func (e *end) Read(p []byte) (int, error) {
	n, err := e.UnixConn.Read(p)
	if err == io.EOF && e.other.Load() {
		err = syscall.ECONNRESET
	}
	return n, err
}

// Reset ends the connection with an error at the other end.
func (e *end) Reset() error {
	e.own.Store(true)
	return e.Close()
}
