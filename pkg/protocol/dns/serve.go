package dns

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/authlistener"
)

const (
	tcpIdle      = 10 * time.Second // a TCP connection without a query is closed (RFC 7766 section 6.2.3)
	tcpWrite     = 5 * time.Second  // for a client to take one reply
	tcpPipelined = 64               // queries of one TCP connection in flight; then it reads no more
	tcpConns     = 512              // TCP connections of a listener; then it closes the oldest
	socketBuffer = 1 << 20          // bytes of queries that may wait in the kernel
	maxFailures  = 64               // consecutive errors of a UDP socket that count as temporary
)

// Serve answers queries from the given sockets until ctx ends. Before it returns, it closes the sockets and waits
// for queries in flight. It returns nil when ctx has ended, and otherwise the error of the socket that failed. It
// may be called several times concurrently, for example for the sockets of several tunnels.
func (r *Resolver) Serve(ctx context.Context, packets []net.PacketConn, listeners []net.Listener) error {
	g, gctx := errgroup.WithContext(ctx)
	for _, pc := range packets {
		g.Go(func() error { return r.servePackets(gctx, pc) })
	}
	for _, l := range listeners {
		g.Go(func() error { return r.serveListener(gctx, l) })
	}
	g.Go(func() error {
		<-gctx.Done()
		for _, pc := range packets {
			pc.Close()
		}
		for _, l := range listeners {
			l.Close()
		}
		return nil
	})
	err := g.Wait()
	if ctx.Err() != nil {
		return nil
	}
	return err
}

type programsKey struct{}

// ServePrograms is Serve for programs that have the search list of a pod of one zone, which has the Name zone. A name
// without a namespace gets none here, and of the zones with one domain only theirs answers.
func (r *Resolver) ServePrograms(ctx context.Context, zone string, packets []net.PacketConn,
	listeners []net.Listener) error {
	return r.Serve(context.WithValue(ctx, programsKey{}, zone), packets, listeners)
}

// packetBuffers holds the buffers that queries are read into and replies come back in.
type packetBuffers struct{ sync.Pool }

func (p *packetBuffers) get() *[packetBuffer + 1]byte {
	if b, ok := p.Get().(*[packetBuffer + 1]byte); ok {
		return b
	}
	return new([packetBuffer + 1]byte)
}

// servePackets reads queries from one UDP socket, and answers each in a goroutine of its own.
func (r *Resolver) servePackets(ctx context.Context, pc net.PacketConn) error {
	if b, ok := pc.(interface{ SetReadBuffer(int) error }); ok {
		if err := b.SetReadBuffer(socketBuffer); err != nil {
			r.log.DebugContext(ctx, "cannot enlarge the socket buffer", "listen", pc.LocalAddr(), "err", err)
		}
	}
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	var buffers packetBuffers
	read, write := packetFuncs(pc)
	failures := 0
	query := make([]byte, 1<<16)
	for {
		n, from, err := read(query)
		switch {
		case ctx.Err() != nil:
			return nil
		case err == nil:
			failures = 0
		case errors.Is(err, net.ErrClosed) || failures == maxFailures:
			return fmt.Errorf("reading DNS queries on %s: %w", pc.LocalAddr(), err)
		default: // an error that may be temporary, such as a reply to a closed port
			failures++
			wakeup.Pause(ctx, time.Duration(failures)*time.Millisecond)
			continue
		}
		if n < headerLen || query[2]&bitQR != 0 { // cheaper than a goroutine
			continue
		}
		q := append(make([]byte, 0, n), query[:n]...)
		wg.Go(func() {
			buf := buffers.get()
			defer buffers.Put(buf)
			if reply := r.handle(ctx, "udp", q, buf[:]); reply != nil {
				if err := write(reply, from); err != nil && r.log.Enabled(ctx, slog.LevelDebug) {
					r.log.DebugContext(ctx, "reply not sent", "listen", pc.LocalAddr(), "err", err)
				}
			}
		})
	}
}

// sender is the source of a datagram. Sockets of the kernel use addrPort, which needs no allocation.
type sender struct {
	addrPort netip.AddrPort
	addr     net.Addr
}

func packetFuncs(pc net.PacketConn) (read func([]byte) (int, sender, error), write func([]byte, sender) error) {
	if u, ok := pc.(*net.UDPConn); ok {
		return func(p []byte) (int, sender, error) {
				n, from, err := u.ReadFromUDPAddrPort(p)
				return n, sender{addrPort: from}, err
			}, func(p []byte, to sender) error {
				_, err := u.WriteToUDPAddrPort(p, to.addrPort)
				return err
			}
	}
	return func(p []byte) (int, sender, error) {
			n, from, err := pc.ReadFrom(p)
			return n, sender{addr: from}, err
		}, func(p []byte, to sender) error {
			_, err := pc.WriteTo(p, to.addr)
			return err
		}
}

// serveListener accepts TCP connections, at most tcpConns at a time.
func (r *Resolver) serveListener(ctx context.Context, l net.Listener) error {
	ctx, cancel := context.WithCancel(ctx)
	var wg sync.WaitGroup
	defer wg.Wait()
	defer cancel()
	conns := authlistener.Bound{Max: tcpConns}
	return authlistener.Serve(ctx, l, r.log, func(c net.Conn) {
		held := conns.Enter(c)
		wg.Go(func() {
			defer held.Leave()
			r.serveConn(ctx, c)
		})
	})
}

// serveConn answers the queries of one TCP connection, several concurrently and in the order of completion (RFC
// 7766 section 6.2.1). After the client's FIN it still sends the last answers.
func (r *Resolver) serveConn(ctx context.Context, c net.Conn) {
	defer c.Close()
	defer context.AfterFunc(ctx, func() { c.Close() })()
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var (
		wg    sync.WaitGroup
		mu    sync.Mutex // one reply at a time
		slots = make(chan struct{}, tcpPipelined)
	)
	defer wg.Wait()
	write := func(reply []byte) error {
		mu.Lock()
		defer mu.Unlock()
		if err := c.SetWriteDeadline(time.Now().Add(tcpWrite)); err != nil {
			return err
		}
		err := writeTCP(c, reply)
		if err != nil {
			c.Close() // a part may have been sent, so nothing can follow it
		}
		return err
	}
	for {
		if err := c.SetReadDeadline(time.Now().Add(tcpIdle)); err != nil {
			return
		}
		m, err := readTCP(c)
		if err != nil || len(m) < headerLen {
			return
		}
		slots <- struct{}{}
		wg.Go(func() {
			defer func() { <-slots }()
			if err := r.answerTCP(ctx, m, write); err != nil && r.log.Enabled(ctx, slog.LevelDebug) {
				r.log.DebugContext(ctx, "reply not sent", "listen", c.LocalAddr(), "err", err)
			}
		})
	}
}

func (r *Resolver) answerTCP(ctx context.Context, m []byte, write func([]byte) error) error {
	if q, err := parseQuery(m); err == nil && isTransfer(q.qtype) && r.zones(ctx).route(q).isOutside() {
		return r.transfer(ctx, m, q, write)
	}
	reply := r.handle(ctx, "tcp", m, nil)
	if reply == nil {
		return nil
	}
	return write(reply)
}
