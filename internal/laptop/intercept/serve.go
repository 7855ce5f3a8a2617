package intercept

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// Limits of one intercept on this machine: streams that agents open, one for each request, and buffered bytes that a
// local program or an agent has not read. One agent alone may use half of each. A UDP flow uses 128 KiB.
const (
	maxRequests = 4 << 10
	maxBuffered = 128 << 20
)

// localTimeout limits a dial of a local address: a listener whose backlog is full does not answer.
const localTimeout = 10 * time.Second

// addresses are those of a program, in the order in which the server tries them.
type addresses []string

func addressesOf(p api.PortMap) addresses {
	if p.Host != "" {
		return addresses{p.Place()}
	}
	return addresses{fmt.Sprintf("127.0.0.1:%d", p.Local), fmt.Sprintf("[::1]:%d", p.Local)}
}

type port struct {
	protocol string // "tcp" or "udp"
	number   uint16
}

// server connects the streams of agents to programs of this machine.
//
//	agent opens a stream:  TCP or UDP, from the client, to a port of the pod
//	  the place for that port ─▶ 127.0.0.1, else ::1, or the host that the user named
//	    connected ─▶ accepted: the server relays bytes, half-closes, resets, and datagrams one by one
//	    refused   ─▶ rejected with that code, which the agent passes to the client
type server struct {
	local  map[port]addresses
	dial   dialLocal
	budget *transport.Budget // shared by the sessions with all agents
	log    *slog.Logger
}

// dialLocal connects to a local program. Its conns are sockets.
type dialLocal func(ctx context.Context, network, address string) (net.Conn, error)

// newServer returns a server that connects to programs with dial.
func newServer(ports []api.PortMap, dial dialLocal, log *slog.Logger) *server {
	s := &server{local: make(map[port]addresses, len(ports)), dial: dial,
		budget: transport.NewBudget(maxRequests, maxBuffered), log: log}
	for _, p := range ports {
		s.local[port{p.Protocol, p.Container}] = addressesOf(p)
	}
	return s
}

// accept answers the session's streams until it ends, and waits for them.
func (s *server) accept(ctx context.Context, ts *transport.Session) {
	var flows sync.WaitGroup
	defer flows.Wait()
	for {
		in, err := ts.Accept(ctx)
		if err != nil {
			return // the conversation of the session reports the error
		}
		flows.Go(func() {
			if err := s.answer(ctx, in); err != nil {
				s.log.Debug("an intercepted flow failed", "request", in.Request, "err", err)
			}
		})
	}
}

// answer serves one stream until it ends.
func (s *server) answer(ctx context.Context, in *transport.Incoming) error {
	var protocol string
	switch in.Proto {
	case transport.ProtoTCP:
		protocol = "tcp"
	case transport.ProtoUDP:
		protocol = "udp"
	default:
		return in.Reject(transport.CodeProhibited)
	}
	local, ok := s.local[port{protocol, in.Dst.Port()}]
	if !ok {
		return in.Reject(transport.CodeProhibited)
	}
	if protocol == "udp" {
		return s.answerUDP(ctx, in, local)
	}
	conn, err := s.dialTCP(ctx, in.Done(), local)
	if err != nil {
		return errors.Join(err, in.RejectError(err))
	}
	stream, err := in.Accept()
	if err != nil {
		reset(conn)
		return err
	}
	relay(stream, conn, stream.Gone())
	return nil
}

// dialTCP connects to a program. It gives up when ctx ends or gone is closed.
func (s *server) dialTCP(ctx context.Context, gone <-chan struct{}, local addresses) (*net.TCPConn, error) {
	ctx, cancel := context.WithTimeout(ctx, localTimeout)
	defer cancel()
	defer wakeup.Go(ctx, func(ctx context.Context) {
		select {
		case <-gone:
			cancel()
		case <-ctx.Done():
		}
	})()
	var refused error
	for _, address := range local {
		conn, err := s.dial(ctx, "tcp", address)
		if err == nil {
			return conn.(*net.TCPConn), nil
		}
		if refused == nil { // report the error of 127.0.0.1: users expect that address
			refused = err
		}
	}
	return nil, refused
}

func reset(conn *net.TCPConn) {
	conn.SetLinger(0) // fails only if conn is already closed
	conn.Close()
}

// relay copies bytes between an agent and a local program until both directions have ended, and closes both. gone
// closes when the agent has reset the stream, or its session has ended.
//
//	agent FIN ─▶ shutdown(SHUT_WR) to the program     program FIN ─▶ CloseWrite to the agent
//	agent RST ─▶ RST to the program                   program RST ─▶ Reset to the agent
func relay(agent *transport.Stream, program *net.TCPConn, gone <-chan struct{}) {
	abort := sync.OnceFunc(func() {
		agent.Reset()
		reset(program)
	})
	var both sync.WaitGroup
	both.Go(func() {
		_, err := io.Copy(agent, program)
		if err == nil {
			err = agent.CloseWrite()
		}
		if err != nil {
			abort()
		}
	})
	both.Go(func() {
		_, err := agent.WriteTo(program)
		if err == nil {
			err = program.CloseWrite()
		}
		// the program has closed its socket, and both directions have ended
		if err != nil && !errors.Is(err, syscall.ENOTCONN) {
			abort()
		}
	})
	ended := make(chan struct{})
	go func() {
		both.Wait()
		close(ended)
	}()
	select {
	case <-ended:
	case <-gone: // the copies may be blocked
		abort()
		<-ended
	}
	program.Close()
	agent.Close()
}

func (s *server) answerUDP(ctx context.Context, in *transport.Incoming, local addresses) error {
	flow := &udpFlow{ctx: ctx, dial: s.dial, local: local}
	if err := flow.advance(); err != nil {
		return errors.Join(err, in.RejectError(err))
	}
	agent, err := in.AcceptPackets()
	if err != nil {
		return errors.Join(err, flow.conn.Load().Close())
	}
	flow.run(agent)
	return nil
}

// udpFlow relays one client's datagrams over a connected socket, which reports a closed port. It does so only after a
// datagram was sent: then udpFlow sends the same datagram to the next address. The agent ends idle flows.
type udpFlow struct {
	ctx   context.Context // the server's
	dial  dialLocal
	local addresses
	conn  atomic.Pointer[net.UDPConn]

	mu       sync.Mutex
	first    []byte // the first datagram, until the program answers
	answered bool
	next     int // index in local
	closed   bool
}

// advance connects to the next host.
func (f *udpFlow) advance() error {
	err := fmt.Errorf("%s: %w", f.local[0], syscall.ECONNREFUSED)
	ctx, cancel := context.WithTimeout(f.ctx, localTimeout)
	defer cancel()
	for f.next < len(f.local) {
		conn, failed := f.dial(ctx, "udp", f.local[f.next])
		f.next++
		if failed == nil {
			f.conn.Store(conn.(*net.UDPConn))
			return nil
		}
		err = failed
	}
	return err
}

// run relays datagrams until the agent ends the flow, or no program listens.
func (f *udpFlow) run(agent *transport.Packets) {
	var both sync.WaitGroup
	both.Go(func() { agent.CloseWithCode(endCode(f.receive(agent))) })
	agent.CloseWithCode(endCode(f.send(agent)))
	f.mu.Lock()
	f.closed = true
	f.conn.Load().Close()
	f.mu.Unlock()
	both.Wait()
}

// endCode returns the code that tells the agent why a flow has ended.
func endCode(err error) transport.Code {
	if errors.Is(err, net.ErrClosed) || errors.Is(err, io.EOF) { // run or the agent has closed it
		return transport.CodeOK
	}
	return transport.CodeOf(err)
}

func (f *udpFlow) send(agent *transport.Packets) error {
	b := make([]byte, transport.MaxPacket)
	for {
		n, err := agent.ReadPacket(b)
		if err != nil {
			return err
		}
		f.mu.Lock()
		if f.first == nil && !f.answered {
			f.first = append([]byte{}, b[:n]...)
		}
		conn := f.conn.Load()
		f.mu.Unlock()
		// Write may also return the refusal of an earlier datagram. receive handles that one, or the next.
		if _, err := conn.Write(b[:n]); err != nil && !errors.Is(err, syscall.ECONNREFUSED) && !isLoss(err) {
			if f.conn.Load() != conn {
				continue // the flow now has another socket
			}
			return err
		} else if errors.Is(err, syscall.ECONNREFUSED) {
			if err := f.refused(conn); err != nil {
				return err
			}
		}
	}
}

// isLoss reports whether only this datagram is lost. UDP may lose datagrams; the flow continues.
func isLoss(err error) bool {
	return errors.Is(err, syscall.EMSGSIZE) || errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.ENOMEM)
}

func (f *udpFlow) receive(agent *transport.Packets) error {
	b := make([]byte, transport.MaxPacket)
	for {
		conn := f.conn.Load()
		n, err := conn.Read(b)
		switch {
		case errors.Is(err, syscall.ECONNREFUSED):
			err = f.refused(conn)
		case err != nil && f.moved(conn):
			err = nil
		case err == nil:
			f.mu.Lock()
			f.answered, f.first = true, nil
			f.mu.Unlock()
			err = agent.WritePacket(b[:n])
		}
		if err != nil {
			return err
		}
	}
}

// moved reports whether the flow now has another socket than conn.
func (f *udpFlow) moved(conn *net.UDPConn) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.conn.Load() != conn && !f.closed
}

// refused moves the flow to the next address. It returns an error if the program had answered or no address is left.
func (f *udpFlow) refused(conn *net.UDPConn) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case f.closed:
		return net.ErrClosed
	case f.conn.Load() != conn:
		return nil // the flow has another socket already
	case f.answered:
		return fmt.Errorf("%s: %w", f.local[0], syscall.ECONNREFUSED)
	}
	if err := f.advance(); err != nil {
		return err
	}
	conn.Close() // wakes receive, which continues with the new socket
	if _, err := f.conn.Load().Write(f.first); err != nil && !isLoss(err) && !errors.Is(err, syscall.ECONNREFUSED) {
		return err
	}
	return nil
}
