package dial

import (
	"net"
	"net/netip"
	"sync"
	"time"

	"kubevpn/internal/incluster/access"
	"kubevpn/pkg/datapath/balancer"
)

const (
	udpIdle = 2 * time.Minute  // conntrack's timeout of an answered flow (nf_conntrack_udp_timeout_stream)
	dnsIdle = 30 * time.Second // resolvers rarely send a second query from the same port

	// socketBuffer is the size of a socket's receive buffer in bytes that the manager asks for.
	socketBuffer = 4 << 20
)

// udpFlow is one flow of datagrams between a laptop and a pod. Each flow has a connected socket of its own, so that
// ICMP port unreachable comes back as ECONNREFUSED.
//
// A flow to a Service stays with its endpoint while that serves. When it no longer serves and another endpoint is
// usable, the next datagram from the laptop goes there, over a new socket. kube-proxy does the same by deleting the
// flow's conntrack entry. Neither moves a TCP connection.
type udpFlow struct {
	d    *Dialer
	dst  netip.AddrPort
	by   Caller
	pick balancer.Pick // for send and close

	mu     sync.Mutex
	conn   *udpSocket
	closed bool
}

// dialUDP opens the socket of a flow. There is no handshake, so it returns only the errors that the kernel knows.
func (d *Dialer) dialUDP(dst netip.AddrPort) (*udpSocket, error) {
	if err := d.Check(dst); err != nil {
		return nil, err
	}
	conn, err := net.DialUDP("udp", nil, net.UDPAddrFromAddrPort(dst))
	if err != nil {
		return nil, err
	}
	return newUDPSocket(conn)
}

// openUDP prepares a flow to dst. Its error is for the laptop.
func (d *Dialer) openUDP(dst netip.AddrPort, by Caller) (*udpFlow, error) {
	pick, err := d.pick(balancer.UDP, dst, by)
	if err != nil {
		return nil, err
	}
	to := dst
	if pick.Endpoint().IsValid() {
		to = pick.Endpoint()
	} else if err := d.CheckHost(dst, by.Extra); err != nil {
		return nil, err
	}
	conn, err := d.dialUDP(to)
	if err != nil {
		pick.Release()
		return nil, err
	}
	return &udpFlow{d: d, dst: dst, by: by, pick: pick, conn: conn}, nil
}

// idle returns how long the flow may be unused.
func (f *udpFlow) idle() time.Duration {
	if f.dst.Port() == access.DNSPort {
		return dnsIdle
	}
	return udpIdle
}

func (f *udpFlow) send(p []byte, size int) error {
	if f.pick.Stale() {
		f.move()
	}
	return f.conn.send(p, size)
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

func (f *udpFlow) receive(b *buffers, use func(p []byte, size int) error) error {
	f.mu.Lock()
	conn := f.conn
	f.mu.Unlock()
	for {
		err := conn.receive(b, use)
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

func (f *udpFlow) close() {
	f.mu.Lock()
	f.closed = true
	f.conn.Close()
	f.mu.Unlock()
	f.pick.Release()
}
