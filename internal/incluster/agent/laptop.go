package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"time"

	"kubevpn/pkg/protocol/interceptor"
	"kubevpn/pkg/wire/transport"
)

// dialTimeout bounds the wait for a laptop, which dials its own loopback interface.
const dialTimeout = 10 * time.Second

// laptop is the laptop at the other end of a session, as an interceptor.Target.
type laptop struct{ session *transport.Session }

// Away reports whether the laptop cannot be reached now.
func (t laptop) Away() bool { return t.session.Err() != nil || !t.session.Attached() }

// Dial opens a stream for f. If the laptop cannot dial its target, errors.Is matches the error with
// syscall.ECONNREFUSED and similar ones.
func (t laptop) Dial(ctx context.Context, f interceptor.Flow) (net.Conn, error) {
	ctx, cancel := context.WithTimeout(ctx, dialTimeout)
	defer cancel()
	switch f.Protocol {
	case "udp":
		p, err := t.session.OpenPackets(ctx, transport.Request{Proto: transport.ProtoUDP, Src: f.Client, Dst: f.Dst})
		if err != nil {
			return nil, err
		}
		return datagramConn{p}, nil
	case "tcp":
	default:
		return nil, fmt.Errorf("cannot send %q to a laptop: %w", f.Protocol, errors.ErrUnsupported)
	}
	s, err := t.session.Open(ctx, transport.Request{Proto: transport.ProtoTCP, Src: f.Client, Dst: f.Dst})
	if err != nil {
		return nil, err
	}
	return s, nil
}

// datagramConn is a flow of datagrams as a net.Conn: one datagram for each Read and Write.
type datagramConn struct{ *transport.Packets }

// Read returns one datagram. Like a socket, it discards the rest of a datagram that is longer than p.
func (d datagramConn) Read(p []byte) (int, error) { return d.ReadPacket(p) }

// Write sends one datagram.
func (d datagramConn) Write(p []byte) (int, error) {
	if err := d.WritePacket(p); err != nil {
		return 0, err
	}
	return len(p), nil
}

// SetDeadline sets the deadlines of Read and Write.
func (d datagramConn) SetDeadline(t time.Time) error {
	return errors.Join(d.SetReadDeadline(t), d.SetWriteDeadline(t))
}
