package manager

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"

	"kubevpn/pkg/wire/transport"
)

// pinger is a socket for ICMP echo with one address. Requests and replies are 2 bytes of sequence number, big
// endian, and the payload. The kernel chooses the identifier.
type pinger interface {
	send([]byte) error
	// receive calls use with each reply from the address, until the socket is closed or an ICMP error comes.
	receive(b *buffers, use func([]byte) error) error
	close()
}

// openEcho prepares a flow of pings to dst. The pod must answer them itself: a ClusterIP has nobody behind it
// who could (where kube-proxy uses IPVS the node would, and that proves nothing), so it is silent.
func (d *dialer) openEcho(dst netip.Addr, by caller) (pinger, error) {
	if _, ok := d.balancer.Service(dst); ok {
		return nil, fmt.Errorf("%v is a ClusterIP, which does not answer pings: %w", dst, syscall.ETIMEDOUT)
	}
	to := netip.AddrPortFrom(dst, 0)
	if err := errors.Join(d.check(to), d.checkHost(to, by.extra)); err != nil {
		return nil, err
	}
	return openPinger(dst)
}

// ping carries pings until the laptop ends the flow, an ICMP error comes, or nobody uses it for long.
func ping(laptop packets, p pinger, b *buffers) {
	var idle idleTimer
	idle.start(echoIdle, func() { laptop.CloseWithCode(transport.CodeOK) })
	received := make(chan struct{})
	go func() {
		defer close(received)
		laptop.CloseWithCode(endCode(p.receive(b, func(reply []byte) error {
			idle.touch()
			return laptop.WritePacket(reply)
		})))
	}()
	laptop.CloseWithCode(endCode(sendPings(laptop, p, b, &idle)))
	idle.timer.Stop()
	p.close()
	<-received
}

func sendPings(laptop packets, p pinger, b *buffers, idle *idleTimer) error {
	for laptop.Wait() == nil {
		buf := b.take()
		n, err := laptop.ReadPacket(buf.data)
		if err == nil && n >= 2 && n <= maxEchoLen {
			idle.touch()
			err = p.send(buf.data[:n])
		} else {
			err = nil // Wait tells; what is too short is no ping
		}
		b.give(buf)
		if err != nil && !isLoss(err) {
			return err
		}
	}
	return nil
}
