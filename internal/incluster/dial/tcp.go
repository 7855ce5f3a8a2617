package dial

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"syscall"
	"time"

	"kubevpn/internal/incluster/access"
	"kubevpn/pkg/datapath/balancer"
)

const (
	// dialTimeout is how long Linux goes on sending SYNs (tcp_syn_retries = 6).
	dialTimeout = 127 * time.Second
	// unknownVIPTimeout is for an address in a Service range without a known Service. The manager dials it, because
	// kube-proxy may already know the Service, or the manager does not watch its namespace. If nothing answers, the
	// laptop's next SYN leads to a new look-up: without a kube-proxy, nothing would ever answer the first dial.
	unknownVIPTimeout = 3 * time.Second
)

// keepAlive finds pods that vanished with their node: after 60 + 9*30 seconds without an answer.
var keepAlive = net.KeepAliveConfig{Enable: true, Idle: time.Minute, Interval: 30 * time.Second, Count: 9}

// Dialer makes the manager's connections. All sessions share it. Set the exported fields before use. Methods are safe
// for concurrent use.
type Dialer struct {
	Balancer *balancer.Balancer

	Check     func(netip.AddrPort) error                           // access.Filter.Check
	CheckHost func(dst netip.AddrPort, extra []netip.Prefix) error // access.Filter.CheckHost, if dst is no ClusterIP
	Policy    *access.Policy                                       // nil: no limit
	InRange   func(netip.Addr) bool                                // whether an address is in a Service range

	ports  *ports
	counts dialCounts
}

// New returns a dialer that resolves ClusterIPs with b. The caller sets its exported fields.
func New(b *balancer.Balancer) *Dialer { return &Dialer{Balancer: b, ports: newPorts()} }

// Caller identifies the laptop for which the manager dials.
type Caller struct {
	Client    string // keys affinity
	Scheduler balancer.Scheduler
	Extra     []netip.Prefix // of --extra-cidr
	User      *access.User   // nil: unknown
}

// pick resolves dst, and checks that the policy allows the result. Its error is for the laptop (transport.CodeOf). If
// the Endpoint is invalid, dst is no ClusterIP and the caller dials it as it is. The caller releases the Pick.
func (d *Dialer) pick(protocol balancer.Protocol, dst netip.AddrPort, by Caller) (balancer.Pick, error) {
	pick, verdict := d.Balancer.Pick(protocol, dst, by.Client, by.Scheduler)
	d.counts.picks[verdict].Add(1)
	switch verdict {
	case balancer.Refused:
		return pick, fmt.Errorf("no Service port or no ready endpoint at %v: %w", dst, syscall.ECONNREFUSED)
	case balancer.Dropped: // no answer; the laptop's next SYN leads to a new look-up
		return pick, fmt.Errorf("internalTrafficPolicy Local and no endpoint on the manager's node for %v: %w", dst,
			syscall.ETIMEDOUT)
	}
	if !pick.Endpoint().IsValid() {
		return pick, d.Policy.Check(dst, dst, by.User)
	}
	if err := d.Policy.CheckPick(dst, &pick, by.User); err != nil {
		pick.Release()
		return pick, err
	}
	return pick, nil
}

// dialTCP connects to dst or, if it is a ClusterIP, to an endpoint of the Service. If an endpoint refuses, or its host
// is gone, dialTCP tries another one, because the laptop has no answer yet. The caller closes the connection and
// releases the Pick.
func (d *Dialer) dialTCP(ctx context.Context, dst netip.AddrPort, by Caller) (*net.TCPConn, balancer.Pick, error) {
	pick, err := d.pick(balancer.TCP, dst, by)
	if err != nil {
		return nil, pick, err
	}
	if !pick.Endpoint().IsValid() {
		if err := d.CheckHost(dst, by.Extra); err != nil {
			return nil, pick, err
		}
		timeout := dialTimeout
		if d.InRange(dst.Addr()) {
			timeout = unknownVIPTimeout
		}
		conn, err := d.connect(ctx, dst, timeout)
		return conn, pick, err
	}
	for {
		conn, err := d.connect(ctx, pick.Endpoint(), dialTimeout)
		if err == nil {
			return conn, pick, nil
		}
		if !tryAnother(err) || !pick.Next() || d.Policy.CheckPick(dst, &pick, by.User) != nil {
			pick.Release()
			return nil, pick, err
		}
		d.counts.retries.Add(1)
	}
}

// tryAnother reports whether err shows that nothing listens at the endpoint. After a timeout dialTCP does not retry,
// because it took too long already.
func tryAnother(err error) bool {
	return errors.Is(err, syscall.ECONNREFUSED) || errors.Is(err, syscall.EHOSTUNREACH)
}

func (d *Dialer) connect(ctx context.Context, dst netip.AddrPort, timeout time.Duration) (*net.TCPConn, error) {
	if err := d.Check(dst); err != nil {
		return nil, err
	}
	to := net.Dialer{Timeout: timeout, KeepAliveConfig: keepAlive}
	conn, err := d.ports.connect(ctx, to, dst)
	if err != nil {
		return nil, err
	}
	return conn.(*net.TCPConn), nil
}
