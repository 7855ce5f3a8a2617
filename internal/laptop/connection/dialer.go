package connection

import (
	"context"
	"errors"
	"net"
	"net/netip"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/netstack"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wire/transport"
)

// dialer opens a stream of the session for each flow of the netstack.
type dialer struct {
	current   *current
	via       Via // nil: flows leave from the traffic manager
	flows     *flows
	shortcuts *shortcuts
}

var _ netstack.Dialer = dialer{}

// Via lets flows leave from inside a pod of a workload: an intercept.Via. Run is called once. The other methods are
// safe for concurrent use.
type Via interface {
	// Run keeps a session with an agent in a pod until ctx ends, or fails if it cannot begin.
	Run(ctx context.Context) error
	// Begun is closed once flows can leave from a pod.
	Begun() <-chan struct{}
	// Session returns the session that carries flows, as soon as there is one.
	Session(ctx context.Context) (*transport.Session, error)
	// Names returns the name resolution of the pod, which must not be changed, or nil, and a channel that is closed
	// when it may have changed.
	Names() (*api.PodNames, <-chan struct{})
	// Status returns a snapshot; it does not block.
	Status() api.Via
}

// session returns the session for a flow, as soon as there is one.
func (d dialer) session(ctx context.Context) (*transport.Session, error) {
	if d.via != nil {
		return d.via.Session(ctx)
	}
	return d.current.wait(ctx)
}

// DialTCP opens the stream in the next session if this one ends meanwhile.
func (d dialer) DialTCP(ctx context.Context, src, dst netip.AddrPort) (netstack.Stream, error) {
	if shortcut := d.shortcuts.to(dst); shortcut != nil && d.via == nil { // else the pod's own view counts
		if stream, err := d.shorten(ctx, shortcut, src, dst); !errors.Is(err, errors.ErrUnsupported) {
			return stream, err
		}
	}
	for {
		s, err := d.session(ctx)
		if err != nil {
			return nil, err
		}
		f := d.flows.begin(packet.ProtoTCP, src, dst)
		stream, err := s.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Src: src, Dst: dst})
		if err == nil {
			f.opened(stream)
			return flowStream{stream, f}, nil
		}
		f.end()
		if s.Err() == nil || ctx.Err() != nil {
			return nil, err // a bare return of (stream, err) would be a typed nil in the interface
		}
		d.current.clear(s)
	}
}

// flowStream is the stream of a flow. Its Close ends the flow.
type flowStream struct {
	*transport.Stream
	flow *openFlow
}

func (s flowStream) Close() error {
	defer s.flow.end()
	return s.Stream.Close()
}

func (d dialer) DialUDP(ctx context.Context, src, dst netip.AddrPort) (netstack.PacketStream, error) {
	return d.packets(ctx, packet.ProtoUDP, transport.Request{Proto: transport.ProtoUDP, Src: src, Dst: dst})
}

func (d dialer) DialEcho(ctx context.Context, src, dst netip.Addr) (netstack.PacketStream, error) {
	return d.packets(ctx, packet.ProtoICMP, transport.Request{
		Proto: transport.ProtoEcho, Src: netip.AddrPortFrom(src, 0), Dst: netip.AddrPortFrom(dst, 0),
	})
}

func (d dialer) packets(ctx context.Context, proto uint8, r transport.Request) (netstack.PacketStream, error) {
	s, err := d.session(ctx)
	if err != nil {
		return nil, err
	}
	f := d.flows.begin(proto, r.Src, r.Dst)
	p, err := s.OpenPackets(ctx, r)
	if err != nil {
		f.end()
		return nil, err
	}
	f.opened(p)
	return flowPackets{p, f}, nil
}

// flowPackets is flowStream for datagrams.
type flowPackets struct {
	*transport.Packets
	flow *openFlow
}

func (p flowPackets) Close() error {
	defer p.flow.end()
	return p.Packets.Close()
}

var errTunnelDown = errors.New("the tunnel is down")

// Dial connects to an address of the cluster without the device: the traffic manager dials, and resolves ClusterIPs. A
// conn of "udp" has one datagram per Read and Write. Unlike a flow, Dial fails at once while the tunnel is down: the
// client of a DNS query would give up first, and retries anyway.
func (c *Connection) Dial(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	ts := c.current.now()
	if ts == nil || c.status.reconnecting() {
		return nil, errTunnelDown
	}
	return c.dialOver(ctx, ts, network, addr)
}

// DialFlow is Dial from where the flows of programs leave.
func (c *Connection) DialFlow(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error) {
	if c.via == nil {
		return c.Dial(ctx, network, addr)
	}
	ts, err := c.via.Session(ctx)
	if err != nil {
		return nil, err
	}
	return c.dialOver(ctx, ts, network, addr)
}

func (c *Connection) dialOver(ctx context.Context, ts *transport.Session, network string,
	addr netip.AddrPort) (net.Conn, error) {
	r := transport.Request{Proto: transport.ProtoTCP, Src: netip.AddrPortFrom(c.packets.steering.Load().own4(), 0),
		Dst: addr}
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
	return packetConn{packets, c.status.reconnecting}, nil
}

// packetConn is a stream of datagrams as a connected UDP socket. One that was opened before the tunnel went down fails
// at the next write, as a new one would. It is a net.PacketConn: net.Resolver takes any other conn for a stream.
type packetConn struct {
	*transport.Packets
	down func() bool
}

var _ net.PacketConn = packetConn{}

func (c packetConn) Write(p []byte) (int, error) {
	if c.down() {
		return 0, errTunnelDown
	}
	return c.Packets.Write(p)
}

func (c packetConn) ReadFrom(p []byte) (int, net.Addr, error) {
	n, err := c.Read(p)
	return n, c.RemoteAddr(), err
}

func (c packetConn) WriteTo(p []byte, _ net.Addr) (int, error) { return c.Write(p) }
