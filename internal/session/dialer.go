package session

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/api"

	"kubevpn/pkg/netstack"
	"kubevpn/pkg/transport"
)

// current holds the transport session of the moment. Whoever needs one while there is none waits: a flow
// opened while the tunnel is being mended stalls and goes on.
type current struct {
	mu      sync.Mutex
	session *transport.Session
	changed chan struct{} // closed and replaced at every change
}

func newCurrent() *current { return &current{changed: make(chan struct{})} }

func (c *current) set(s *transport.Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.session = s
	close(c.changed)
	c.changed = make(chan struct{})
}

// clear forgets s, unless another session has taken its place.
func (c *current) clear(s *transport.Session) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.session == s {
		c.session = nil
	}
}

// now returns the session, or nil.
func (c *current) now() *transport.Session {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.session
}

// wait returns the session, or ctx's error.
func (c *current) wait(ctx context.Context) (*transport.Session, error) {
	for {
		c.mu.Lock()
		s, changed := c.session, c.changed
		c.mu.Unlock()
		if s != nil {
			return s, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil, ctx.Err()
		}
	}
}

// dialer gives the netstack's flows their streams.
type dialer struct{ current *current }

var _ netstack.Dialer = dialer{}

func (d dialer) DialTCP(ctx context.Context, src, dst netip.AddrPort) (netstack.Stream, error) {
	s, err := d.current.wait(ctx)
	if err != nil {
		return nil, err
	}
	stream, err := s.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Src: src, Dst: dst})
	if err != nil {
		return nil, err // a bare return of (stream, err) would be a typed nil in the interface
	}
	return stream, nil
}

func (d dialer) DialUDP(ctx context.Context, src, dst netip.AddrPort) (netstack.PacketStream, error) {
	return d.packets(ctx, transport.Request{Proto: transport.ProtoUDP, Src: src, Dst: dst})
}

func (d dialer) DialEcho(ctx context.Context, src, dst netip.Addr) (netstack.PacketStream, error) {
	return d.packets(ctx, transport.Request{
		Proto: transport.ProtoEcho, Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(dst, 0),
	})
}

func (d dialer) packets(ctx context.Context, r transport.Request) (netstack.PacketStream, error) {
	s, err := d.current.wait(ctx)
	if err != nil {
		return nil, err
	}
	p, err := s.OpenPackets(ctx, r)
	if err != nil {
		return nil, err
	}
	return p, nil
}

var errTunnelDown = errors.New("the tunnel is down")

// dialDNS reaches cluster DNS through the session, without the device in between. Unlike a flow, a query does not
// wait for a tunnel that is down: its client would give up first, and ask again anyway.
func (s *Session) dialDNS(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	ts := s.current.now()
	if ts == nil || s.reconnecting() {
		return nil, errTunnelDown
	}
	r := transport.Request{Proto: transport.ProtoTCP, Src: netip.AddrPortFrom(s.addressing().Laptop4, 0), Dst: addr}
	if strings.HasPrefix(network, "tcp") {
		stream, err := ts.Open(ctx, r)
		if err != nil {
			return nil, err
		}
		return stream, nil
	}
	r.Proto = transport.ProtoUDP
	packets, err := ts.OpenPackets(ctx, r)
	if err != nil {
		return nil, err
	}
	return packetConn{packets, s.reconnecting}, nil
}

func (s *Session) reconnecting() bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.status.Status == api.StatusReconnecting
}

// packetConn is a stream of datagrams as a connected UDP socket. One that was made before the tunnel went down fails
// at the next write, as a new one would.
type packetConn struct {
	*transport.Packets
	down func() bool
}

func (c packetConn) Read(p []byte) (int, error) { return c.ReadPacket(p) }

func (c packetConn) Write(p []byte) (int, error) {
	if c.down() {
		return 0, errTunnelDown
	}
	if err := c.WritePacket(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

func (c packetConn) SetDeadline(t time.Time) error {
	return errors.Join(c.SetReadDeadline(t), c.SetWriteDeadline(t))
}
