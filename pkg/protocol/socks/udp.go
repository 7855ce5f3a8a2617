package socks

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"sync"
	"time"

	"kubevpn/pkg/wakeup"
)

const (
	// maxTargets limits the targets of one association. Datagrams for others are lost.
	maxTargets = 256
	// targetQueue limits the datagrams that wait for the dial of their target.
	targetQueue = 16
	// maxDatagram is the largest datagram, with its header.
	maxDatagram = 1 << 16
)

// association carries the datagrams of one client until its TCP conn ends:
//
//	client ─▶ socket ─▶ read ─▶ queue of the target ─▶ send ─▶ Dial udp ─▶ target
//	client ◀─ socket ◀──────────────────────────── receive ◀──────────────────┘
type association struct {
	server *Server
	socket *net.UDPConn
	peer   netip.Addr // of the TCP conn
	log    *slog.Logger

	mu      sync.Mutex
	client  netip.AddrPort // the first sender; invalid before the first datagram
	targets map[endpoint]chan []byte
	running sync.WaitGroup
}

// associate serves UDP ASSOCIATE. The association ends with the conn, on which nothing else arrives.
func (s *Server) associate(ctx context.Context, conn net.Conn) error {
	local, err := netip.ParseAddrPort(conn.LocalAddr().String())
	if err != nil {
		return err
	}
	remote, err := netip.ParseAddrPort(conn.RemoteAddr().String())
	if err != nil {
		return err
	}
	socket, err := net.ListenUDP("udp", net.UDPAddrFromAddrPort(netip.AddrPortFrom(local.Addr(), 0)))
	if err != nil {
		return errors.Join(fmt.Errorf("listening for datagrams: %w", err), writeReply(conn, replyFailed, nil))
	}
	ctx, cancel := context.WithCancel(ctx)
	a := &association{server: s, socket: socket, peer: remote.Addr().Unmap(), log: s.log,
		targets: map[endpoint]chan []byte{}}
	defer a.running.Wait()
	defer socket.Close()
	defer cancel()
	if err := writeReply(conn, replySucceeded, socket.LocalAddr()); err != nil {
		return err
	}
	a.running.Go(func() { a.read(ctx) })
	_, err = io.Copy(io.Discard, conn)
	return err
}

// read receives the client's datagrams until the socket is closed.
func (a *association) read(ctx context.Context) {
	buf := make([]byte, maxDatagram)
	for {
		n, from, err := a.socket.ReadFromUDPAddrPort(buf)
		if ctx.Err() != nil || errors.Is(err, net.ErrClosed) {
			return
		}
		if err != nil { // on Windows, because the client refused a datagram
			wakeup.Pause(ctx, time.Millisecond)
			continue
		}
		if !a.isClient(from) {
			continue
		}
		if to, data, ok := parseDatagram(buf[:n]); ok {
			a.deliver(ctx, to, bytes.Clone(data))
		}
	}
}

// isClient reports whether a datagram is the client's. The first sender becomes the client.
func (a *association) isClient(from netip.AddrPort) bool {
	if from.Addr().Unmap() != a.peer {
		return false
	}
	a.mu.Lock()
	defer a.mu.Unlock()
	if !a.client.IsValid() {
		a.client = from
	}
	return a.client == from
}

// parseDatagram returns the target and the content of a client's datagram. It rejects fragments.
func parseDatagram(b []byte) (to endpoint, data []byte, ok bool) {
	if len(b) < 3 || b[2] != 0 {
		return endpoint{}, nil, false
	}
	r := bytes.NewReader(b[3:])
	to, err := readEndpoint(r)
	if err != nil {
		return endpoint{}, nil, false
	}
	return to, b[len(b)-r.Len():], true
}

// deliver queues a datagram for its target. It starts a new target, unless there are too many.
func (a *association) deliver(ctx context.Context, to endpoint, data []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	queue, known := a.targets[to]
	if !known {
		if len(a.targets) == maxTargets {
			return
		}
		queue = make(chan []byte, targetQueue)
		a.targets[to] = queue
		a.running.Go(func() {
			if err := a.serve(ctx, to, queue); err != nil {
				a.log.Debug("datagrams of a client of the proxy", "target", to, "err", err)
			}
		})
	}
	select {
	case queue <- data:
	default: // drop the datagram
	}
}

// serve carries the datagrams of one target until it is idle, fails, or ctx ends.
func (a *association) serve(ctx context.Context, to endpoint, queue <-chan []byte) error {
	defer func() {
		a.mu.Lock()
		delete(a.targets, to)
		a.mu.Unlock()
	}()
	target, err := a.server.dial(ctx, "udp", to.String())
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var receiving sync.WaitGroup
	defer receiving.Wait()
	defer target.Close()
	defer cancel()
	defer context.AfterFunc(ctx, func() { target.Close() })()
	idle := time.NewTimer(idleTimeout)
	defer idle.Stop()
	receiving.Go(func() {
		defer cancel()
		a.receive(to, target, func() { idle.Reset(idleTimeout) })
	})
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-idle.C:
			return nil
		case data := <-queue:
			idle.Reset(idleTimeout)
			if _, err := target.Write(data); err != nil {
				return err
			}
		}
	}
}

// receive sends the target's datagrams to the client until the target fails.
func (a *association) receive(to endpoint, target net.Conn, busy func()) {
	header := appendEndpoint([]byte{0, 0, 0}, to)
	buf := make([]byte, maxDatagram)
	copy(buf, header)
	for {
		n, err := target.Read(buf[len(header):])
		if err != nil {
			return
		}
		busy()
		a.mu.Lock()
		client := a.client
		a.mu.Unlock()
		if _, err := a.socket.WriteToUDPAddrPort(buf[:len(header)+n], client); errors.Is(err, net.ErrClosed) {
			return
		}
	}
}
