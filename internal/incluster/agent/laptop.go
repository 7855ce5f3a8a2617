//go:build linux

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
		return p, nil
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
