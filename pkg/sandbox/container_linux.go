package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/pid1"
)

const (
	// engineTable and enginePriority are the table and the rule that what the container's engine has published is answered by.
	// The container's namespace is its own: nobody else numbers any there.
	engineTable    = 100
	enginePriority = 100
)

// Serve makes a TUN in the namespace of this process, a container's, gives its file to [Attach] at the other end of conn, and
// does what that one's [Remote] says, until conn ends, which is no error. It needs CAP_NET_ADMIN and /dev/net/tun, and takes
// conn over.
//
//	         ┌── main table: default ─▶ tun0 ─▶ Remote.TUN
//	a packet ┤
//	         └── from eth0's address ─▶ table 100: default ─▶ eth0 ─▶ the engine
//
// So all that the container's programs begin goes by the TUN, and who connects to a port that the engine has published is
// answered the way that he came. Names are asked of Network.DNS: /etc/resolv.conf, which an engine binds to a file that all
// containers of one network share, is written in place.
func Serve(conn *net.UnixConn) error {
	w, err := newWire(conn)
	if err != nil {
		return err
	}
	defer w.conn.Close()
	f := newFar(w, ContainerInterface)
	f.nameSpace = func(n *Network) error { return os.WriteFile("/etc/resolv.conf", []byte(n.resolvConf()), 0o644) }
	device, err := openTUN(ContainerInterface)
	if err == nil {
		if err = setAside(); err != nil {
			device.Close()
			err = fmt.Errorf("setting the routes of the container's engine aside: %w", err)
		}
	}
	if err != nil {
		f.say(report{Error: pid1.NewFailure(err)}, nil)
		return err
	}
	f.hand(device)
	for {
		var o order
		file, err := f.wire.receive(&o)
		if file != nil {
			file.Close()
		}
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		f.obey(o)
	}
}

// setAside moves the routes of links with a default route to a table that only answers use: a cluster may have the addresses of the
// engine's bridge.
func setAside() error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN}, netlink.RT_FILTER_TABLE)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if err != nil {
			return err
		}
		ruled := map[int]bool{} // links
		for _, r := range routes {
			if !isDefault(r) || ruled[r.LinkIndex] {
				continue
			}
			ruled[r.LinkIndex] = true
			if err := ruleFor(family, r.LinkIndex, routes); err != nil {
				return err
			}
		}
		for _, r := range routes {
			if !ruled[r.LinkIndex] || r.Dst != nil && r.Dst.IP.IsLinkLocalUnicast() { // which lead to the link's own neighbours
				continue
			}
			if err := netlink.RouteDel(&r); err != nil && !errors.Is(err, unix.ESRCH) {
				return fmt.Errorf("removing %v: %w", r, err)
			}
		}
	}
	return nil
}

func isDefault(r netlink.Route) bool {
	if r.Dst == nil {
		return true
	}
	ones, _ := r.Dst.Mask.Size()
	return ones == 0
}

// ruleFor has what is sent from a link's addresses go by the link's routes.
func ruleFor(family, index int, routes []netlink.Route) error {
	for _, r := range routes {
		if r.LinkIndex != index {
			continue
		}
		r.Table = engineTable
		r.Flags &= int(netlink.FLAG_ONLINK) // what else is there the kernel has noted, as that the link has no carrier yet, and refuses
		if err := netlink.RouteReplace(&r); err != nil {
			return fmt.Errorf("adding %v: %w", r, err)
		}
	}
	link, err := netlink.LinkByIndex(index)
	if err != nil {
		return err
	}
	addrs, err := netlink.AddrList(link, family)
	if err != nil {
		return err
	}
	for _, a := range addrs {
		rule := netlink.NewRule()
		rule.Family, rule.Table, rule.Priority = family, engineTable, enginePriority
		rule.Src = &net.IPNet{IP: a.IP, Mask: net.CIDRMask(len(a.Mask)*8, len(a.Mask)*8)}
		if err := netlink.RuleAdd(rule); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding %v: %w", rule, err)
		}
	}
	return nil
}

// Remote is the network of a container in which [Serve] runs. Its methods may be called from several goroutines.
type Remote struct {
	near *near
	tun  *os.File
	done chan struct{}
}

// Attach takes conn over and returns when the TUN is there. When ctx ends before, conn is closed.
func Attach(ctx context.Context, conn *net.UnixConn, logger *slog.Logger) (*Remote, error) {
	w, err := newWire(conn)
	if err != nil {
		return nil, err
	}
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	r := &Remote{near: newNear(w, ContainerInterface, logger), done: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { w.conn.Close() })
	first := make(chan report, 1)
	go func() {
		defer close(r.done)
		r.near.listen(func(said report, file *os.File) {
			if said.Ready && file != nil && r.tun == nil {
				r.tun, file = file, nil
				first <- said
			} else if said.Error != nil && r.tun == nil {
				first <- said
			}
			if file != nil {
				file.Close()
			}
		})
	}()
	var said report
	select {
	case said = <-first:
	case <-r.done:
		select {
		case said = <-first:
		default:
			err = errors.New("the other end has gone without a word")
		}
	}
	switch {
	case !stop():
		err = context.Cause(ctx)
	case said.Error != nil:
		err = said.Error
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("having the network of a container: %w", err), r.Close())
	}
	return r, nil
}

// TUN is the device, for tun.Adopt; its Name is the interface's. Close closes it.
func (r *Remote) TUN() *os.File { return r.tun }

// SetNetwork gives the interface addresses, routes everything to it, and has names asked of n.DNS. It may be called again.
func (r *Remote) SetNetwork(ctx context.Context, n Network) error { return r.near.setNetwork(ctx, n) }

// Dial connects to an address from inside, as [Process.Dial] does.
func (r *Remote) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return r.near.dial(ctx, network, address)
}

// Done is closed when Serve has ended, or Close was called.
func (r *Remote) Done() <-chan struct{} { return r.done }

// Close ends Serve.
func (r *Remote) Close() error {
	err := r.near.wire.conn.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	<-r.done
	if r.tun != nil {
		if e := r.tun.Close(); !errors.Is(e, os.ErrClosed) { // the caller may have
			err = errors.Join(err, e)
		}
	}
	return err
}
