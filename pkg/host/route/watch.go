package route

import (
	"context"
	"maps"
	"net"
	"net/netip"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/pkg/wakeup"
)

// A DHCP client removes an address, adds another one, and then a route. Watch reads the state when nothing has changed
// for quietTime, or after busyTime if changes do not end.
const (
	quietTime = 100 * time.Millisecond
	busyTime  = 500 * time.Millisecond
)

// Watch calls changed each time the addresses or the routes of this machine have changed, except link-local ones and
// those of the links that ignoreLinks names. It calls both from one goroutine, and changed must not block for long.
// Watch needs no privilege. It returns when ctx ends, or when it cannot read the network's state.
func Watch(ctx context.Context, ignoreLinks func() []string, changed func()) error {
	g, ctx := errgroup.WithContext(ctx)
	events := wakeup.NewSignal()
	g.Go(func() error { return notice(ctx, events.Raise) })
	g.Go(func() error {
		var before map[any]bool // nil: not read yet
		for {
			select {
			case <-events:
			case <-ctx.Done():
				return ctx.Err()
			}
			if before != nil {
				settle(ctx, events)
			}
			l, err := readLocal(ignoreLinks())
			if err != nil {
				return err
			}
			now := l.beyondLinks()
			if before != nil && !maps.Equal(before, now) {
				changed()
			}
			before = now
		}
	})
	return g.Wait()
}

// settle waits until there were no events for quietTime, but not longer than busyTime.
func settle(ctx context.Context, events wakeup.Signal) {
	busy := time.After(busyTime)
	for {
		select {
		case <-events:
		case <-time.After(quietTime):
			return
		case <-busy:
			return
		case <-ctx.Done():
			return
		}
	}
}

// beyondLinks returns the set of the addresses and routes that packets to other networks use.
func (l local) beyondLinks() map[any]bool {
	set := make(map[any]bool)
	for _, a := range l.addrs {
		if a.addr.IsGlobalUnicast() {
			set[a] = true
		}
	}
	for _, r := range l.routes {
		if a := r.dst.Addr(); !a.IsLinkLocalUnicast() && !a.IsMulticast() {
			set[r] = true
		}
	}
	return set
}

// GoneAddress returns a function that reports whether this machine no longer has the local address of a TCP connection.
func GoneAddress() func(net.Addr) bool {
	own := make(map[netip.Addr]bool)
	all, err := net.InterfaceAddrs()
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil {
			own[p.Addr().Unmap()] = true
		}
	}
	return func(local net.Addr) bool {
		tcp, ok := local.(*net.TCPAddr)
		if !ok || err != nil {
			return false
		}
		a := tcp.AddrPort().Addr().Unmap().WithZone("")
		return a.IsValid() && !a.IsLoopback() && !own[a]
	}
}
