package dial

import (
	"errors"
	"fmt"
	"net/netip"
	"syscall"
	"time"
)

const (
	echoIdle   = 30 * time.Second
	sequence   = 2                // bytes of the sequence number
	maxEchoLen = sequence + 65507 // the most that fits into an IPv4 packet
)

// openEcho prepares a flow of pings to dst. A request or reply is a sequence number of 2 bytes, big endian, and the
// payload. The kernel chooses the identifier.
//
// The pod must answer them itself. Pings to a ClusterIP fail: it belongs to no pod, and the answer of a node
// (kube-proxy with IPVS) proves nothing.
func (d *Dialer) openEcho(dst netip.Addr, by Caller) (datagrams, error) {
	if _, ok := d.Balancer.Service(dst); ok {
		return nil, fmt.Errorf("%v is a ClusterIP, which does not answer pings: %w", dst, syscall.ETIMEDOUT)
	}
	to := netip.AddrPortFrom(dst, 0)
	if err := errors.Join(d.Check(to), d.CheckHost(to, by.Extra), d.Policy.Check(to, to, by.User)); err != nil {
		return nil, err
	}
	return openPinger(dst)
}
