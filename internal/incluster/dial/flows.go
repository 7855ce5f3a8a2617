package dial

import (
	"context"
	"net/netip"
	"sync"
	"time"

	"kubevpn/pkg/wire/transport"
)

// Flows are the flows of one session that the Dialer serves. Idle flows hold no buffers. Methods are safe for
// concurrent use. They return an error if the laptop no longer waits for an answer.
type Flows struct {
	dialer  *Dialer
	session *transport.Session
	running *sync.WaitGroup
	buffers buffers
}

// NewFlows returns the flows of a session. It adds their goroutines, which end with the session, to running.
func NewFlows(d *Dialer, s *transport.Session, running *sync.WaitGroup) *Flows {
	return &Flows{dialer: d, session: s, running: running, buffers: buffers{session: s}}
}

// AcceptTCP dials for a TCP flow and carries its bytes until both directions have ended.
func (f *Flows) AcceptTCP(ctx context.Context, in *transport.Incoming, by Caller) error {
	gone := in.Done()
	dialCtx, cancel := context.WithCancel(ctx)
	defer cancel()
	go func() {
		select {
		case <-gone:
			cancel()
		case <-dialCtx.Done():
		}
	}()
	ended := f.dialer.counts.began(transport.ProtoTCP)
	conn, pick, err := f.dialer.dialTCP(dialCtx, unmap(in.Dst), by)
	ended(err)
	if err != nil {
		return in.RejectError(err)
	}
	cancel() // the goroutine above
	st, err := in.Accept()
	if err != nil {
		pick.Release()
		conn.SetLinger(0)
		conn.Close()
		return err
	}
	// The dial has used 8 KiB of this goroutine's stack. The relay gets by with the 2 KiB of a new one.
	f.running.Go(func() {
		defer pick.Release()
		relay(st, conn, gone, f.session.Done(), &f.buffers)
	})
	return nil
}

// AcceptUDP opens a socket for a flow of UDP datagrams, and carries them until nobody uses the flow.
func (f *Flows) AcceptUDP(in *transport.Incoming, by Caller) error {
	ended := f.dialer.counts.began(transport.ProtoUDP)
	flow, err := f.dialer.openUDP(unmap(in.Dst), by)
	ended(err)
	if err != nil {
		return in.RejectError(err)
	}
	return f.accept(in, flow, flow.idle())
}

// AcceptEcho opens a socket for a flow of pings, and carries them until nobody uses the flow.
func (f *Flows) AcceptEcho(in *transport.Incoming, by Caller) error {
	ended := f.dialer.counts.began(transport.ProtoEcho)
	pings, err := f.dialer.openEcho(in.Dst.Addr().Unmap(), by)
	ended(err)
	if err != nil {
		return in.RejectError(err)
	}
	return f.accept(in, pings, echoIdle)
}

func (f *Flows) accept(in *transport.Incoming, d datagrams, idle time.Duration) error {
	laptop, err := in.AcceptPackets()
	if err != nil {
		d.close()
		return err
	}
	f.running.Go(func() { exchange(laptop, d, idle, &f.buffers) }) // as acceptTCP does
	return nil
}

// unmap converts an IPv4-mapped IPv6 address to IPv4, so that comparisons work.
func unmap(a netip.AddrPort) netip.AddrPort { return netip.AddrPortFrom(a.Addr().Unmap(), a.Port()) }
