//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"net"
	"net/netip"
	"slices"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/interceptor"
	"kubevpn/pkg/wire/authlistener"
)

const (
	// handshakeTimeout is how long a TCP handshake may take that began before the redirects were removed.
	handshakeTimeout = 200 * time.Millisecond
	// closeTimeout is how long connections may take to end after drainTime.
	closeTimeout = 5 * time.Second
)

// kernel redirects in the pod's network namespace: pkg/host/redirect. Its methods may be called concurrently.
type kernel interface {
	// Set redirects new connections from outside to these ports to local ports. Open connections stay.
	Set(map[port]uint16) error
	// Original returns the original destination of a redirected connection.
	Original(net.Conn) (netip.AddrPort, error)
	// Dial connects to the application from the client's address or, if that is not possible, from an address of the
	// pod.
	Dial(ctx context.Context, network string, client netip.Addr, to netip.AddrPort) (net.Conn, error)
	// Opaque returns why the application does not see clients' addresses, or nil.
	Opaque() error
	// Flush ends the application's connections on ports.
	Flush([]port) (int, error)
	// Open returns the clients of the connections that Flush would end, without those of UDP.
	Open([]port) ([]netip.AddrPort, error)
	// Close gives all ports back.
	Close() error
}

// receiver receives the connections of intercepted ports, and gives them to the interceptor:
//
//	ephemeral   every redirected TCP port ─▶ one listener; the kernel knows which port it was
//	            each redirected UDP port  ─▶ a socket
//	sidecar     each port ─▶ a listener, or a socket, to which Services lead
//
// Its methods are called with the leader's lock held, unless they say otherwise.
type receiver struct {
	cfg    Config
	log    *slog.Logger
	leader *leader // decides what happens to requests
	own    uint16  // the listener's port
	open   func() (kernel, error)
	app    *application

	flows   context.Context // of the connections that are open
	end     context.CancelFunc
	serving sync.WaitGroup // listeners' goroutines
	conns   sync.WaitGroup
	count   atomic.Int64 // of conns

	kernel     kernel       // nil: not opened yet
	source     string       // api.AgentState.Source
	tcp        net.Listener // of redirected ports; nil: none was claimed yet
	tcpPort    uint16
	udp        map[port]*sockets // of redirected ports
	redirected *interceptor.Interceptor
	listeners  map[port]listening // of a sidecar
	listened   *interceptor.Interceptor
	stopped    bool
}

// listening is where a sidecar listens for a port.
type listening struct {
	at    uint16
	close func()
}

func newReceiver(cfg Config, l *leader, own uint16) *receiver {
	r := &receiver{
		cfg: cfg, log: cfg.Logger, leader: l, own: own, open: sync.OnceValues(cfg.kernel),
		udp: make(map[port]*sockets), listeners: make(map[port]listening),
		app: newApplication(cfg.listeners, cfg.Logger),
	}
	r.flows, r.end = context.WithCancel(context.Background())
	return r
}

// start starts a sidecar's listeners, because nothing else would serve there. Otherwise it opens the kernel in advance,
// which takes a moment.
func (r *receiver) start(sidecar []api.AgentPort) error {
	r.recordListeners()
	for _, l := range sidecar {
		if err := r.listen(portOf(l), l.Listen); err != nil {
			return err
		}
	}
	if len(sidecar) == 0 {
		r.serving.Go(func() {
			if _, err := r.open(); err != nil {
				r.log.Info("cannot redirect in this pod", "err", err)
			}
		})
	}
	return nil
}

// await waits until the kernel is open, or cannot be opened. Call it without the lock.
func (r *receiver) await() {
	if len(r.cfg.Listen) == 0 {
		_, _ = r.open() // prepare returns the error
	}
}

// recordListeners records where the application listens now.
func (r *receiver) recordListeners() {
	if _, err := r.app.recordListeners(); err != nil {
		r.log.Warn("cannot see where the application listens", "err", err)
	}
}

// set replaces the intercepted ports, each with the port on which a sidecar listens for it, or 0. If it fails, the
// previous ports stay.
func (r *receiver) set(want map[port]uint16) error {
	if r.stopped {
		return nil
	}
	r.recordListeners()
	to := make(map[port]uint16)
	for _, at := range slices.SortedFunc(maps.Keys(want), comparePorts) {
		listen := want[at]
		if at.Protocol == "tcp" && (at.Port == r.own || at.Port == r.tcpPort) || listen == r.own {
			return api.Errorf(api.ExitConflict, "%s belongs to the traffic agent", describePort(at))
		}
		if listen != 0 {
			if err := r.listen(at, listen); err != nil {
				return err
			}
			continue
		}
		if err := r.prepare(); err != nil {
			return err
		}
		var err error
		if to[at], err = r.localPort(at); err != nil {
			return err
		}
	}
	if r.kernel == nil {
		return nil
	}
	if err := r.kernel.Set(to); err != nil {
		return api.Errorf(api.ExitInject, "cannot redirect in the pod: %w", err)
	}
	for at, s := range r.udp {
		if _, stays := to[at]; !stays {
			s.close()
			delete(r.udp, at)
		}
	}
	return nil
}

func comparePorts(a, b port) int { return int(a.Port) - int(b.Port) }

// prepare opens the kernel, the first time.
func (r *receiver) prepare() error {
	if r.kernel != nil {
		return nil
	}
	if len(r.cfg.Listen) > 0 {
		return api.Errorf(api.ExitInject, "the pod's traffic agent is a sidecar, which cannot redirect").
			WithHint("Use --mode sidecar, or ask the owners of the sidecar to run `kubevpn leave`.")
	}
	k, err := r.open()
	if err != nil {
		return api.Errorf(api.ExitInject, "cannot redirect in this pod: %w", err).
			WithHint("Use --mode sidecar, which needs nothing from the kernel.")
	}
	r.kernel = k
	r.source = "address"
	if err := k.Opaque(); err != nil {
		r.source = "header: " + err.Error()
	}
	r.redirected = r.interceptor(k.Opaque() != nil, k.Dial)
	return nil
}

// dialFunc is kernel.Dial.
type dialFunc func(ctx context.Context, network string, client netip.Addr, to netip.AddrPort) (net.Conn, error)

func (r *receiver) interceptor(forwarded bool, dial dialFunc) *interceptor.Interceptor {
	return interceptor.New(interceptor.Config{
		Claims: r.leader.claimsOf,
		Application: func(ctx context.Context, f interceptor.Flow) (net.Conn, error) {
			return r.app.dial(ctx, f, dial)
		},
		ForwardedFor: forwarded,
		Checks:       r.cfg.Pod.Checks, CheckedFrom: r.cfg.CheckedFrom,
		Probe: interceptor.Probe{
			Prefix: api.ProbePrefix, Length: api.ProbeLength, Expected: r.leader.expects, Due: r.leader.probeDue,
		},
		Trace:  r.leader.traced,
		Note:   r.leader.note,
		Drain:  drainTime,
		Logger: r.log,
	})
}

// dialPlain dials without the client's address, for a sidecar.
func dialPlain(ctx context.Context, network string, _ netip.Addr, to netip.AddrPort) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, to.String())
}

// localPort returns the local port to which a port is redirected, and listens there.
func (r *receiver) localPort(at port) (uint16, error) {
	if at.Protocol == "udp" {
		s := r.udp[at]
		if s == nil {
			var err error
			if s, err = r.listenPackets(0, r.destinations(at.Port), r.redirected); err != nil {
				return 0, err
			}
			r.udp[at] = s
		}
		return s.port, nil
	}
	if r.tcp == nil {
		l, err := r.cfg.listenTCP(0)
		if err != nil {
			return 0, fmt.Errorf("cannot listen for redirected connections: %w", err)
		}
		r.tcp, r.tcpPort = l, l.Addr().(*net.TCPAddr).AddrPort().Port()
		k := r.kernel
		r.accept(l, r.redirected, func(conn net.Conn) (netip.AddrPort, error) {
			to, err := k.Original(conn)
			if err == nil && to.Port() == r.tcpPort {
				err = errors.New("it was not redirected")
			}
			return to, err
		})
	}
	return r.tcpPort, nil
}

// listen starts a sidecar's listener for a port. It runs as long as the agent.
func (r *receiver) listen(at port, listen uint16) error {
	if l, ok := r.listeners[at]; ok {
		if l.at != listen {
			return api.Errorf(api.ExitConflict, "the sidecar listens for %s on port %d, not %d", describePort(at), l.at,
				listen)
		}
		return nil
	}
	if r.listened == nil {
		r.listened = r.interceptor(true, r.cfg.dialPlain)
		r.source = "header: a sidecar has no capability to keep addresses"
		if len(r.cfg.Listen) == 0 && r.prepare() == nil { // only what the kernel dials is not redirected again
			r.listened = r.redirected
		}
	}
	if at.Protocol == "udp" {
		s, err := r.listenPackets(listen, r.destinations(at.Port), r.listened)
		if err != nil {
			return err
		}
		r.listeners[at] = listening{listen, s.close}
		return nil
	}
	l, err := r.cfg.listenTCP(listen)
	if err != nil {
		return fmt.Errorf("cannot listen for %s: %w", describePort(at), err)
	}
	r.listeners[at] = listening{listen, func() { l.Close() }}
	r.accept(l, r.listened, func(conn net.Conn) (netip.AddrPort, error) {
		return netip.AddrPortFrom(unmap(conn.LocalAddr()).Addr(), at.Port), nil
	})
	return nil
}

// listenTCP listens at all addresses. Without MPTCP: the kernel does not know the original destination of its
// connections.
func listenTCP(number uint16) (net.Listener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	return config.Listen(context.Background(), "tcp", ":"+strconv.Itoa(int(number)))
}

// accept serves l's connections until it is closed. where returns the original destination of one.
func (r *receiver) accept(l net.Listener, i *interceptor.Interceptor, where func(net.Conn) (netip.AddrPort, error)) {
	serve := func(conn net.Conn) {
		defer r.count.Add(-1)
		dst, err := where(conn)
		if err != nil {
			r.log.Debug("closed a connection of unknown destination", "remote", conn.RemoteAddr(), "err", err)
			conn.Close()
			return
		}
		i.ServeConn(r.flows, conn, interceptor.Flow{
			Protocol: "tcp", Client: unmap(conn.RemoteAddr()),
			Dst: netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port()),
		})
	}
	r.serving.Go(func() {
		_ = authlistener.Serve(r.flows, l, r.log, func(conn net.Conn) { // the error is that l is closed
			r.count.Add(1)
			r.conns.Go(func() { serve(conn) })
		})
	})
}

// unmap returns a TCP address, with IPv4 addresses unmapped.
func unmap(addr net.Addr) netip.AddrPort {
	a := addr.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// destinations returns a port at the pod's first address of each family.
func (r *receiver) destinations(number uint16) map[string]netip.AddrPort {
	to := make(map[string]netip.AddrPort)
	for _, ip := range r.cfg.PodIPs {
		family := "udp4"
		if ip.Is6() {
			family = "udp6"
		}
		if _, ok := to[family]; !ok {
			to[family] = netip.AddrPortFrom(ip, number)
		}
	}
	return to
}

// sockets receive a port's datagrams. There is one for each family of the pod, so that the destination of a datagram is
// known.
type sockets struct {
	port  uint16
	conns map[string]*net.UDPConn // by family: "udp4", "udp6"
}

func (s *sockets) close() {
	for _, conn := range s.conns {
		conn.Close()
	}
}

// listenPackets serves datagrams to a port, or to any free one if number is 0, in each family of to.
func (r *receiver) listenPackets(number uint16, to map[string]netip.AddrPort,
	i *interceptor.Interceptor) (*sockets, error) {
	const attempts = 16 // a port that is free in one family may be in use in the other
	var refused error
	for range attempts {
		s := &sockets{port: number, conns: make(map[string]*net.UDPConn)}
		refused = nil
		for family := range to {
			conn, err := new(net.ListenConfig).ListenPacket(context.Background(), family, ":"+strconv.Itoa(int(s.port)))
			if err != nil {
				refused = err
				break
			}
			s.conns[family] = conn.(*net.UDPConn)
			s.port = conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		}
		if refused == nil {
			for family, conn := range s.conns {
				r.servePackets(conn, to[family], i)
			}
			return s, nil
		}
		s.close()
		if number != 0 || !errors.Is(refused, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("cannot listen for datagrams: %w", refused)
}

func (r *receiver) servePackets(conn *net.UDPConn, dst netip.AddrPort, i *interceptor.Interceptor) {
	r.conns.Go(func() {
		if err := i.ServePackets(r.flows, conn, dst); err != nil && !errors.Is(err, net.ErrClosed) {
			r.log.Error("cannot serve datagrams", "for", dst, "err", err)
		}
	})
}

// flush ends the connections that the application has on ports.
func (r *receiver) flush(ports []port) (int, error) {
	if r.kernel == nil {
		return 0, errors.New("a sidecar cannot end them")
	}
	return r.kernel.Flush(ports)
}

// idle reports whether no connection is open.
func (r *receiver) idle() bool { return r.count.Load() == 0 }

// stop sends new connections to the application. Open redirected connections continue.
func (r *receiver) stop() {
	if r.kernel != nil {
		if err := r.kernel.Set(nil); err != nil {
			r.log.Error("cannot remove redirects", "err", err)
		}
	}
	for _, l := range r.listeners {
		l.close()
	}
	r.stopped = true
}

// drain waits for open connections: idle ones end at once, the others have drainTime. Call it once, after stop, without
// the lock.
func (r *receiver) drain() {
	if r.tcp != nil {
		// Handshakes whose SYN was redirected before stop may still complete. With SYN cookies the kernel keeps no
		// record of them, so there is no condition to wait for.
		time.Sleep(handshakeTimeout)
		r.tcp.Close()
	}
	r.serving.Wait()
	r.end()
	done := make(chan struct{})
	go func() {
		defer close(done)
		r.conns.Wait()
	}()
	select {
	case <-done:
	case <-time.After(drainTime + closeTimeout):
		r.log.Error("connections did not end in time", "connections", r.count.Load())
	}
}

// close ends everything, and releases the kernel.
func (r *receiver) close() {
	r.end()
	if r.tcp != nil {
		r.tcp.Close()
	}
	for _, l := range r.listeners {
		l.close()
	}
	for _, s := range r.udp {
		s.close()
	}
	r.serving.Wait()
	k := r.kernel
	if k == nil && len(r.cfg.Listen) == 0 {
		k, _ = r.open() // by start; an error is in the log
	}
	if k == nil {
		return
	}
	if err := k.Close(); err != nil {
		r.log.Error("cannot close the redirects", "err", err)
	}
}
