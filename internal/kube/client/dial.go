package client

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"time"

	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/sshjump"
)

const (
	dialTimeout = 10 * time.Second
	addressPace = 300 * time.Millisecond // before the next address of a name is tried
	lookupTime  = time.Second            // for a name with known addresses
	// With these, a connection to a peer that is gone ends after about a minute.
	keepAliveIdle     = 15 * time.Second
	keepAliveInterval = 15 * time.Second
	keepAliveCount    = 3
)

// dialer opens the TCP connections to one API server, or to its proxy, and remembers their addresses. It is safe for
// concurrent use.
type dialer struct {
	jump   *sshjump.Client // opens the connections; nil: this machine does
	net    net.Dialer
	lookup func(ctx context.Context, network, host string) ([]netip.Addr, error)

	mu   sync.Mutex
	seen map[string][]netip.Addr // by host name or address; the latest that worked is last
}

func newDialer() *dialer {
	return &dialer{
		net: net.Dialer{
			Timeout: dialTimeout,
			KeepAliveConfig: net.KeepAliveConfig{
				Enable: true, Idle: keepAliveIdle, Interval: keepAliveInterval, Count: keepAliveCount,
			},
		},
		lookup: net.DefaultResolver.LookupNetIP,
		seen:   make(map[string][]netip.Addr),
	}
}

// DialContext implements rest.Config.Dial. It tries the addresses of a name one after the other, as RFC 8305 describes.
// If the name does not resolve in time, because the laptop has moved to another network, it tries the addresses that
// worked before.
func (d *dialer) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	if d.jump != nil {
		return d.jump.DialContext(ctx, address)
	}
	host, port, err := net.SplitHostPort(address)
	if err != nil {
		return nil, fmt.Errorf("dialing %s: %w", address, err)
	}
	addrs, err := d.find(ctx, host)
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: err}
	}
	conn, err := wakeup.First(ctx, len(addrs), addressPace, func(ctx context.Context, n int) (net.Conn, error) {
		return d.net.DialContext(ctx, network, net.JoinHostPort(addrs[n].Unmap().String(), port))
	})
	if err != nil {
		return nil, err
	}
	if remote, ok := conn.RemoteAddr().(*net.TCPAddr); ok {
		d.remember(host, remote.AddrPort().Addr())
	}
	return conn, nil
}

// find looks up the addresses of host, and returns those that worked before if that fails.
func (d *dialer) find(ctx context.Context, host string) ([]netip.Addr, error) {
	if addr, err := netip.ParseAddr(host); err == nil {
		return []netip.Addr{addr}, nil
	}
	known := d.known(host)
	if len(known) > 0 {
		bounded, cancel := context.WithTimeout(ctx, lookupTime)
		defer cancel()
		ctx = bounded
	}
	addrs, err := d.lookup(ctx, "ip", host)
	if err != nil && len(known) > 0 {
		slices.Reverse(known)
		return known, nil
	}
	return addrs, err
}

func (d *dialer) known(host string) []netip.Addr {
	d.mu.Lock()
	defer d.mu.Unlock()
	return slices.Clone(d.seen[host])
}

func (d *dialer) remember(host string, addrs ...netip.Addr) {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, addr := range addrs {
		addr = addr.Unmap().WithZone("")
		list := slices.DeleteFunc(d.seen[host], func(a netip.Addr) bool { return a == addr })
		d.seen[host] = append(list, addr)
	}
}

// resolve remembers every address of host, so that all of them are known before the first connection.
func (d *dialer) resolve(ctx context.Context, host string) error {
	if addr, err := netip.ParseAddr(host); err == nil {
		d.remember(host, addr)
		return nil
	}
	addrs, err := d.lookup(ctx, "ip", host)
	if err != nil {
		return fmt.Errorf("resolving %s: %w", host, err)
	}
	used := d.known(host)
	d.remember(host, addrs...)
	d.remember(host, used...) // DialContext still tries these first
	return nil
}

// addresses returns every address seen, sorted.
func (d *dialer) addresses() []netip.Addr {
	d.mu.Lock()
	defer d.mu.Unlock()
	var all []netip.Addr
	for _, addrs := range d.seen {
		all = append(all, addrs...)
	}
	slices.SortFunc(all, netip.Addr.Compare)
	return slices.Compact(all)
}
