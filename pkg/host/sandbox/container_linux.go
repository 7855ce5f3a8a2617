package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
)

const (
	// engineTable and enginePriority are the numbers of the routing table and the rule for replies from published
	// ports. The container has its own network namespace, so they cannot collide with others.
	engineTable    = 100
	enginePriority = 100
)

// Serve creates a TUN device in the network namespace of this process, sends its file to [Attach] at the other end of
// conn, and executes the calls of the [Remote] there. [Remote.Update] writes into the empty directory volumes. Serve
// returns nil when the other end closes conn. It owns conn, and needs CAP_NET_ADMIN and /dev/net/tun.
//
//	         ┌── main table: default ─▶ tun0 ─▶ Remote.TUN
//	a packet ┤
//	         └── from eth0's address ─▶ table 100: default ─▶ eth0 ─▶ the engine
//
// Flows that programs of the container start use the TUN; replies to clients of a published port use the engine's
// routes. Serve writes /etc/resolv.conf in place, because an engine bind-mounts it from a file that all containers of
// one network share.
func Serve(conn *net.UnixConn, volumes string) error {
	w, err := newControl(conn)
	if err != nil {
		return err
	}
	defer w.conn.Close()
	f := newServer(w, ContainerInterface)
	f.setNames = func(n *Network) error { return os.WriteFile("/etc/resolv.conf", []byte(n.resolvConf()), 0o644) }
	device, err := f.prepare(volumes)
	if err != nil {
		f.send(report{Error: subreaper.NewFailure(err)}, nil)
		return err
	}
	f.sendReady(device)
	for {
		var o order
		file, err := f.control.receive(&o)
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		}
		f.handle(o, file)
	}
}

func (s *server) prepare(volumes string) (device *os.File, err error) {
	if s.store, err = openStore(volumes); err != nil {
		return nil, err
	}
	if device, err = openTUN(ContainerInterface); err != nil {
		return nil, err
	}
	if err := moveEngineRoutes(); err != nil {
		device.Close()
		return nil, fmt.Errorf("moving the routes of the container engine: %w", err)
	}
	return device, nil
}

// moveEngineRoutes moves the routes of links that have a default route to a table that only replies use, because a
// cluster may use the addresses of the engine's bridge.
func moveEngineRoutes() error {
	for _, family := range []int{netlink.FAMILY_V4, netlink.FAMILY_V6} {
		routes, err := netlink.RouteListFiltered(family, &netlink.Route{Table: unix.RT_TABLE_MAIN},
			netlink.RT_FILTER_TABLE)
		if errors.Is(err, unix.EAFNOSUPPORT) {
			continue
		}
		if err != nil {
			return err
		}
		moved := map[int]bool{} // links with a default route
		for _, r := range routes {
			if !isDefault(r) || moved[r.LinkIndex] {
				continue
			}
			moved[r.LinkIndex] = true
			if err := ruleFor(family, r.LinkIndex, routes); err != nil {
				return err
			}
		}
		for _, r := range routes {
			// link-local routes lead only to neighbours
			if !moved[r.LinkIndex] || r.Dst != nil && r.Dst.IP.IsLinkLocalUnicast() {
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

// ruleFor makes packets from a link's addresses follow the link's routes.
func ruleFor(family, index int, routes []netlink.Route) error {
	for _, r := range routes {
		if r.LinkIndex != index {
			continue
		}
		r.Table = engineTable
		r.Flags &= int(netlink.FLAG_ONLINK) // the kernel sets the other flags, such as linkdown, and rejects them here
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
	client *client
	tun    *os.File
	done   chan struct{}
}

// Attach receives the TUN device from [Serve] at the other end of conn. It owns conn, and closes it after an error
// or when ctx ends first.
func Attach(ctx context.Context, conn *net.UnixConn, logger *slog.Logger) (*Remote, error) {
	w, err := newControl(conn)
	if err != nil {
		return nil, err
	}
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	r := &Remote{client: newClient(w, ContainerInterface, logger), done: make(chan struct{})}
	stop := context.AfterFunc(ctx, func() { w.conn.Close() })
	first := make(chan report, 1)
	go func() {
		defer close(r.done)
		r.client.listen(func(in report, file *os.File) {
			if in.Ready && file != nil && r.tun == nil {
				r.tun, file = file, nil
				first <- in
			} else if in.Error != nil && r.tun == nil {
				first <- in
			}
			if file != nil {
				file.Close()
			}
		})
	}()
	var result report
	select {
	case result = <-first:
	case <-r.done:
		select {
		case result = <-first:
		default:
			err = errors.New("the other end closed the control socket without a report")
		}
	}
	switch {
	case !stop():
		err = context.Cause(ctx)
	case result.Error != nil:
		err = result.Error
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("attaching to the network of a container: %w", err), r.Close())
	}
	return r, nil
}

// TUN returns the device, for tun.Adopt. Its Name is the interface name. Close closes it.
func (r *Remote) TUN() *os.File { return r.tun }

// SetNetwork sets the addresses of the interface, routes everything to it, and makes n.DNS the nameservers. It may
// be called again.
func (r *Remote) SetNetwork(ctx context.Context, n Network) error { return r.client.setNetwork(ctx, n) }

// Dial connects to an address from inside, as [Process.Dial] does.
func (r *Remote) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	return r.client.dial(ctx, network, address)
}

// Update creates a volume, or atomically replaces its files. Groups and empty volumes stay as they were created.
func (r *Remote) Update(ctx context.Context, v Volume) error { return r.client.update(ctx, v) }

// Resolve returns the current location of a path of a volume, relative to the volume, for a mount of that path. The
// mount does not follow updates. In an empty volume Serve creates a directory there.
func (r *Remote) Resolve(ctx context.Context, volume, sub string) (string, error) {
	a, err := r.client.ask(ctx, order{Resolve: &position{volume, sub}}, nil)
	if err == nil && !filepath.IsLocal(a.path) { // another program may have replaced Serve
		err = fmt.Errorf("the other end says that %s is at %q, outside of the volume", sub, a.path)
	}
	return a.path, err
}

// Done returns a channel that is closed when Serve has ended or Close was called.
func (r *Remote) Done() <-chan struct{} { return r.done }

// Close ends Serve.
func (r *Remote) Close() error {
	err := r.client.control.conn.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	<-r.done
	if r.tun != nil {
		if e := r.tun.Close(); !errors.Is(e, os.ErrClosed) { // ErrClosed: the caller closed it
			err = errors.Join(err, e)
		}
	}
	return err
}
