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
	"kubevpn/pkg/interceptor"
)

const (
	acceptPause = 50 * time.Millisecond // after a failed accept
	// stragglers is how long a handshake may take that has begun when redirects go.
	stragglers = 200 * time.Millisecond
	// overtime is what a connection may take to end that has to.
	overtime = 5 * time.Second
)

// kernel is what the plane asks of the pod's kernel: pkg/redirect. Its methods may be called concurrently.
type kernel interface {
	// Set has new connections from outside to these ports go to local ports. What is open stays.
	Set(map[port]uint16) error
	// Original is where a connection was for that came to a local port.
	Original(net.Conn) (netip.AddrPort, error)
	// Dial connects to the application from the client's address, or, if that cannot be, from an own one.
	Dial(ctx context.Context, network string, client netip.Addr, to netip.AddrPort) (net.Conn, error)
	// Opaque is why the application does not see clients' addresses, or nil.
	Opaque() error
	// Flush ends the application's connections on ports.
	Flush([]port) (int, error)
	// Close gives all ports back.
	Close() error
}

// overseer is what the plane asks of the primary, which calls it with its lock held.
type overseer interface {
	judges(protocol string, number uint16) []interceptor.Claim
	expects(preface []byte) bool
	note(protocol string, number uint16, text string)
}

// plane is where requests come in, and how they get to the application:
//
//	ephemeral   every redirected TCP port ─▶ one listener; the kernel knows which port it was
//	            each redirected UDP port  ─▶ a socket
//	sidecar     each port ─▶ a listener, or a socket, to which Services lead
//
// All but what runs on its own is called with the primary's lock held.
type plane struct {
	cfg      Config
	log      *slog.Logger
	overseer overseer
	own      uint16 // the door's port
	open     func() (kernel, error)

	flows   context.Context // of the connections that are open
	end     context.CancelFunc
	serving sync.WaitGroup // listeners' goroutines
	conns   sync.WaitGroup
	count   atomic.Int64 // of conns

	kernel     kernel // nil: not opened yet
	sourced    string
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

func newPlane(cfg Config, o overseer, own uint16) *plane {
	p := &plane{
		cfg: cfg, log: cfg.Logger, overseer: o, own: own, open: sync.OnceValues(cfg.kernel),
		udp: make(map[port]*sockets), listeners: make(map[port]listening),
	}
	p.flows, p.end = context.WithCancel(context.Background())
	return p
}

// start has a sidecar listen, whoever claims what: nobody else would serve there. Where there are redirects to be made, it
// has the kernel asked in advance, which takes a moment.
func (p *plane) start(sidecar []Listen) error {
	for _, l := range sidecar {
		if err := p.listen(port{l.Protocol, l.Port}, l.Listen); err != nil {
			return err
		}
	}
	if len(sidecar) == 0 {
		p.serving.Go(func() {
			if _, err := p.open(); err != nil {
				p.log.Info("this pod's kernel cannot redirect", "err", err)
			}
		})
	}
	return nil
}

// await waits until the kernel was asked for redirects, if it is.
func (p *plane) await() {
	if len(p.cfg.Listen) == 0 {
		p.open() // why it failed is told to who needs it
	}
}

// source says how the application sees where a request comes from.
func (p *plane) source() string { return p.sourced }

// set makes want the ports whose requests come here, each with where a sidecar listens for it, or 0. If it fails, what was
// before goes on.
func (p *plane) set(want map[port]uint16) error {
	if p.stopped {
		return nil
	}
	to := make(map[port]uint16)
	for _, at := range slices.SortedFunc(maps.Keys(want), comparePorts) {
		listen := want[at]
		if at.Protocol == "tcp" && (at.Port == p.own || at.Port == p.tcpPort) || listen == p.own {
			return api.Errorf(api.ExitConflict, "%s is the traffic agent's own", describePort(at))
		}
		if listen != 0 {
			if err := p.listen(at, listen); err != nil {
				return err
			}
			continue
		}
		if err := p.prepare(); err != nil {
			return err
		}
		var err error
		if to[at], err = p.target(at); err != nil {
			return err
		}
	}
	if p.kernel == nil {
		return nil
	}
	if err := p.kernel.Set(to); err != nil {
		return api.Errorf(api.ExitInject, "redirecting in the pod: %w", err)
	}
	for at, s := range p.udp {
		if _, stays := to[at]; !stays {
			s.close()
			delete(p.udp, at)
		}
	}
	return nil
}

func comparePorts(a, b port) int { return int(a.Port) - int(b.Port) }

// prepare asks the kernel for redirects, the first time.
func (p *plane) prepare() error {
	if p.kernel != nil {
		return nil
	}
	if len(p.cfg.Listen) > 0 {
		return api.Errorf(api.ExitInject, "the pod's traffic agent is a sidecar, which cannot redirect").
			WithHint("`kubevpn leave` of whoever uses the sidecar ends it, or intercept with --mode sidecar")
	}
	k, err := p.open()
	if err != nil {
		return api.Errorf(api.ExitInject, "this pod's kernel cannot redirect: %w", err).
			WithHint("--mode sidecar needs nothing of the kernel")
	}
	p.kernel = k
	p.sourced = "address"
	if err := k.Opaque(); err != nil {
		p.sourced = "header: " + err.Error()
	}
	p.redirected = p.interceptor(k.Opaque() != nil, k.Dial)
	return nil
}

// dialFunc is kernel.Dial.
type dialFunc func(ctx context.Context, network string, client netip.Addr, to netip.AddrPort) (net.Conn, error)

func (p *plane) interceptor(forwarded bool, dial dialFunc) *interceptor.Interceptor {
	return interceptor.New(interceptor.Config{
		Claims: p.overseer.judges,
		Application: func(ctx context.Context, f interceptor.Flow) (net.Conn, error) {
			return dialApplication(ctx, f, dial)
		},
		ForwardedFor: forwarded,
		Canary:       interceptor.Canary{Prefix: api.CanaryPrefix, Length: api.CanaryLength, Expected: p.overseer.expects},
		Note:         p.overseer.note,
		Drain:        drainTime,
		Logger:       p.log,
	})
}

// dialApplication connects to the application: at the address that the client meant or, if it listens on localhost only,
// there.
func dialApplication(ctx context.Context, f interceptor.Flow, dial dialFunc) (net.Conn, error) {
	conn, err := dial(ctx, f.Protocol, f.Client.Addr().Unmap(), f.Dst)
	if f.Protocol != "tcp" || !errors.Is(err, syscall.ECONNREFUSED) {
		return conn, err
	}
	hosts := []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1}), netip.IPv6Loopback()}
	if f.Dst.Addr().Is6() {
		slices.Reverse(hosts)
	}
	for _, host := range hosts {
		if conn, e := dial(ctx, f.Protocol, netip.Addr{}, netip.AddrPortFrom(host, f.Dst.Port())); e == nil {
			return conn, nil
		}
	}
	return nil, err
}

// dialPlain is for a sidecar, which may not do more.
func dialPlain(ctx context.Context, network string, _ netip.Addr, to netip.AddrPort) (net.Conn, error) {
	return new(net.Dialer).DialContext(ctx, network, to.String())
}

// target is the local port that a redirected port's requests come to.
func (p *plane) target(at port) (uint16, error) {
	if at.Protocol == "udp" {
		s := p.udp[at]
		if s == nil {
			var err error
			if s, err = p.listenPackets(0, p.destinations(at.Port), p.redirected); err != nil {
				return 0, err
			}
			p.udp[at] = s
		}
		return s.port, nil
	}
	if p.tcp == nil {
		l, err := p.cfg.listenTCP(0)
		if err != nil {
			return 0, fmt.Errorf("listening for redirected connections: %w", err)
		}
		p.tcp, p.tcpPort = l, l.Addr().(*net.TCPAddr).AddrPort().Port()
		k := p.kernel
		p.accept(l, p.redirected, func(conn net.Conn) (netip.AddrPort, error) {
			to, err := k.Original(conn)
			if err == nil && to.Port() == p.tcpPort {
				err = errors.New("it was not redirected")
			}
			return to, err
		})
	}
	return p.tcpPort, nil
}

// listen has a sidecar listen for a port, for as long as it lives.
func (p *plane) listen(at port, listen uint16) error {
	if l, ok := p.listeners[at]; ok {
		if l.at != listen {
			return api.Errorf(api.ExitConflict, "the sidecar listens for %s on port %d, not %d", describePort(at), l.at, listen)
		}
		return nil
	}
	if p.listened == nil {
		p.listened = p.interceptor(true, p.cfg.dialPlain)
		p.sourced = "header: a sidecar has no right to more"
	}
	if at.Protocol == "udp" {
		s, err := p.listenPackets(listen, p.destinations(at.Port), p.listened)
		if err != nil {
			return err
		}
		p.listeners[at] = listening{listen, s.close}
		return nil
	}
	l, err := p.cfg.listenTCP(listen)
	if err != nil {
		return fmt.Errorf("listening for %s: %w", describePort(at), err)
	}
	p.listeners[at] = listening{listen, func() { l.Close() }}
	p.accept(l, p.listened, func(conn net.Conn) (netip.AddrPort, error) {
		return netip.AddrPortFrom(unmap(conn.LocalAddr()).Addr(), at.Port), nil
	})
	return nil
}

// listenTCP listens at all addresses, without MPTCP, of whose connections the kernel does not say where they were for.
func listenTCP(number uint16) (net.Listener, error) {
	var config net.ListenConfig
	config.SetMultipathTCP(false)
	return config.Listen(context.Background(), "tcp", ":"+strconv.Itoa(int(number)))
}

// accept serves l's connections until it is closed. where says where one was for.
func (p *plane) accept(l net.Listener, i *interceptor.Interceptor, where func(net.Conn) (netip.AddrPort, error)) {
	p.serving.Go(func() {
		for {
			conn, err := l.Accept()
			switch {
			case errors.Is(err, net.ErrClosed):
				return
			case err != nil: // out of file descriptors, or the peer went away already: it passes
				p.log.Warn("accepting a connection", "err", err)
				select {
				case <-time.After(acceptPause):
				case <-p.flows.Done():
				}
				continue
			}
			p.count.Add(1)
			p.conns.Go(func() {
				defer p.count.Add(-1)
				dst, err := where(conn)
				if err != nil {
					p.log.Debug("closing a connection", "remote", conn.RemoteAddr(), "err", err)
					conn.Close()
					return
				}
				i.ServeConn(p.flows, conn, interceptor.Flow{
					Protocol: "tcp", Client: unmap(conn.RemoteAddr()), Dst: netip.AddrPortFrom(dst.Addr().Unmap(), dst.Port()),
				})
			})
		}
	})
}

// unmap gives a TCP address, IPv4 as such.
func unmap(addr net.Addr) netip.AddrPort {
	a := addr.(*net.TCPAddr).AddrPort()
	return netip.AddrPortFrom(a.Addr().Unmap().WithZone(""), a.Port())
}

// destinations are a port at the pod's first address of each family.
func (p *plane) destinations(number uint16) map[string]netip.AddrPort {
	to := make(map[string]netip.AddrPort)
	for _, ip := range p.cfg.PodIPs {
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

// sockets take a port's datagrams, one for each family of the pod, so that it is known for which of its addresses they were.
type sockets struct {
	port  uint16
	conns []net.PacketConn
}

func (s *sockets) close() {
	for _, conn := range s.conns {
		conn.Close()
	}
}

// listenPackets serves datagrams that come to a port, or to any if that is 0, in each of the families.
func (p *plane) listenPackets(number uint16, to map[string]netip.AddrPort, i *interceptor.Interceptor) (*sockets, error) {
	const attempts = 16 // what is free in one family may be taken in the other
	var refused error
	for range attempts {
		s := &sockets{port: number}
		refused = nil
		for family := range to {
			conn, err := new(net.ListenConfig).ListenPacket(context.Background(), family, ":"+strconv.Itoa(int(s.port)))
			if err != nil {
				refused = err
				break
			}
			s.conns = append(s.conns, conn)
			s.port = conn.LocalAddr().(*net.UDPAddr).AddrPort().Port()
		}
		if refused == nil {
			for _, conn := range s.conns {
				dst := to["udp4"]
				if conn.LocalAddr().(*net.UDPAddr).AddrPort().Addr().Is6() {
					dst = to["udp6"]
				}
				p.servePackets(conn, dst, i)
			}
			return s, nil
		}
		s.close()
		if number != 0 || !errors.Is(refused, syscall.EADDRINUSE) {
			break
		}
	}
	return nil, fmt.Errorf("listening for datagrams: %w", refused)
}

func (p *plane) servePackets(conn net.PacketConn, dst netip.AddrPort, i *interceptor.Interceptor) {
	p.conns.Go(func() {
		if err := i.ServePackets(p.flows, conn, dst); err != nil && !errors.Is(err, net.ErrClosed) {
			p.log.Error("serving datagrams", "for", dst, "err", err)
		}
	})
}

// flush ends the connections that the application has on ports.
func (p *plane) flush(ports []port) (int, error) {
	if p.kernel == nil {
		return 0, errors.New("a sidecar cannot end them")
	}
	return p.kernel.Flush(ports)
}

// idle reports whether no connection is open.
func (p *plane) idle() bool { return p.count.Load() == 0 }

// stop has new connections go to the application. What is redirected and open goes on.
func (p *plane) stop() {
	if p.kernel != nil {
		if err := p.kernel.Set(nil); err != nil {
			p.log.Error("removing redirects", "err", err)
		}
	}
	for _, l := range p.listeners {
		l.close()
	}
	p.stopped = true
}

// drain waits for what is open: idle connections end at once, the others have drainTime. It is called once, after stop and
// without the lock.
func (p *plane) drain() {
	if p.tcp != nil {
		time.Sleep(stragglers) // whose first packet was redirected before stop, and the last one of whose handshake comes after it
		p.tcp.Close()
	}
	p.serving.Wait()
	p.end()
	done := make(chan struct{})
	go func() {
		defer close(done)
		p.conns.Wait()
	}()
	select {
	case <-done:
	case <-time.After(drainTime + overtime):
		p.log.Error("connections are left that did not end", "connections", p.count.Load())
	}
}

// close ends all, once nothing new can come.
func (p *plane) close() {
	p.end()
	if p.tcp != nil {
		p.tcp.Close()
	}
	for _, l := range p.listeners {
		l.close()
	}
	for _, s := range p.udp {
		s.close()
	}
	p.serving.Wait()
	k := p.kernel
	if k == nil && len(p.cfg.Listen) == 0 {
		k, _ = p.open() // which was asked in advance; why it failed is in the log
	}
	if k == nil {
		return
	}
	if err := k.Close(); err != nil {
		p.log.Error("closing the redirects", "err", err)
	}
}
