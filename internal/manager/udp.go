package manager

import (
	"errors"
	"net"
	"net/netip"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"kubevpn/pkg/datapath/balancer"
	"kubevpn/pkg/wire/transport"
)

const (
	udpIdle    = 2 * time.Minute  // as conntrack keeps a flow that was answered (nf_conntrack_udp_timeout_stream)
	dnsIdle    = 30 * time.Second // a query rarely has a second one from the same port
	echoIdle   = 30 * time.Second
	maxEchoLen = 2 + 65507 // sequence number, and the most that fits into an IPv4 packet
)

// packets is a laptop's end of a flow of datagrams (transport.Packets).
type packets interface {
	Wait() error // until ReadPacket does not block
	ReadPacket([]byte) (int, error)
	WritePacket([]byte) error
	CloseWithCode(transport.Code) error
}

// idleTimer ends a flow of datagrams that nobody uses: nothing else tells that one has ended.
type idleTimer struct {
	used  atomic.Int64 // nanoseconds since began
	began time.Time
	timer *time.Timer
}

func (t *idleTimer) start(idle time.Duration, end func()) {
	t.began = time.Now()
	t.timer = time.AfterFunc(idle, func() {
		if left := idle - (time.Since(t.began) - time.Duration(t.used.Load())); left > 0 {
			t.timer.Reset(left)
			return
		}
		end()
	})
}

func (t *idleTimer) touch() { t.used.Store(int64(time.Since(t.began))) }

// udpFlow is one flow of datagrams between a laptop and a pod, each with a connected socket of its own, so that
// ICMP port unreachable comes back as ECONNREFUSED.
//
// A flow to a Service stays with its endpoint as long as that serves. When it no longer does and another
// endpoint is usable, the next datagram from the laptop goes there, over a new socket: kube-proxy gets the same
// by deleting the flow's conntrack entry. A stream is never moved, here as there.
type udpFlow struct {
	d      *dialer
	b      *buffers
	laptop packets
	dst    netip.AddrPort
	by     caller
	pick   balancer.Pick // for the goroutine of send
	idle   idleTimer

	mu     sync.Mutex
	conn   *net.UDPConn
	closed bool
}

// dialUDP makes the socket of a flow. There is no handshake: only what the kernel knows by itself is refused.
func (d *dialer) dialUDP(dst netip.AddrPort) (*net.UDPConn, error) {
	if err := d.check(dst); err != nil {
		return nil, err
	}
	return net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(dst))
}

// openUDP prepares a flow to dst. Its error is for the laptop.
func (d *dialer) openUDP(dst netip.AddrPort, by caller, b *buffers) (*udpFlow, error) {
	pick, err := d.pick(balancer.UDP, dst, by)
	if err != nil {
		return nil, err
	}
	to := dst
	if pick.Endpoint().IsValid() {
		to = pick.Endpoint()
	} else if err := d.checkHost(dst, by.extra); err != nil {
		return nil, err
	}
	conn, err := d.dialUDP(to)
	if err != nil {
		pick.Release()
		return nil, err
	}
	return &udpFlow{d: d, b: b, dst: dst, by: by, pick: pick, conn: conn}, nil
}

// run carries datagrams until the laptop ends the flow, the pod refuses, or nobody uses it for long.
func (f *udpFlow) run(laptop packets) {
	f.laptop = laptop
	idle := udpIdle
	if f.dst.Port() == dnsPort {
		idle = dnsIdle
	}
	f.idle.start(idle, func() { laptop.CloseWithCode(transport.CodeOK) })
	received := make(chan struct{})
	go func() {
		defer close(received)
		laptop.CloseWithCode(endCode(f.receive()))
	}()
	laptop.CloseWithCode(endCode(f.send()))
	f.idle.timer.Stop()
	f.mu.Lock()
	f.closed = true
	f.conn.Close()
	f.mu.Unlock()
	<-received
	f.pick.Release()
}

// endCode is how the laptop learns why a flow of datagrams has ended.
func endCode(err error) transport.Code {
	if errors.Is(err, net.ErrClosed) { // here, by ourselves
		return transport.CodeOK
	}
	return transport.CodeOf(err)
}

// send carries datagrams to the pod. It ends with nil when the laptop does.
func (f *udpFlow) send() error {
	for f.laptop.Wait() == nil {
		b := f.b.take()
		n, err := f.laptop.ReadPacket(b.data)
		if err == nil {
			f.idle.touch()
			if f.pick.Stale() {
				f.move()
			}
			_, err = f.conn.Write(b.data[:n])
		} else {
			n, err = 0, nil // Wait tells
		}
		f.b.give(b)
		if err != nil && !isLoss(err) {
			return err
		}
	}
	return nil
}

// isLoss reports whether a datagram was lost for a reason of its own: it was too large, or the network was too
// busy. UDP may lose datagrams; the flow goes on.
func isLoss(err error) bool {
	return errors.Is(err, syscall.EMSGSIZE) || errors.Is(err, syscall.ENOBUFS) || errors.Is(err, syscall.ENOMEM)
}

// move gives the flow another endpoint, if there is one.
func (f *udpFlow) move() {
	pick, err := f.d.pick(balancer.UDP, f.dst, f.by)
	if err != nil || !pick.Endpoint().IsValid() {
		return
	}
	conn, err := f.d.dialUDP(pick.Endpoint())
	if err != nil {
		pick.Release()
		return
	}
	f.pick.Release()
	f.pick = pick
	f.mu.Lock()
	old := f.conn
	f.conn = conn
	f.mu.Unlock()
	old.Close()
}

// receive carries datagrams to the laptop.
func (f *udpFlow) receive() error {
	f.mu.Lock()
	conn := f.conn
	f.mu.Unlock()
	for {
		err := readable(conn, f.b, false, func(p []byte) error {
			f.idle.touch()
			return f.laptop.WritePacket(p)
		})
		f.mu.Lock()
		moved := f.conn != conn
		conn = f.conn
		closed := f.closed
		f.mu.Unlock()
		if !moved || closed {
			return err
		}
	}
}
