package redirect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"slices"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

const (
	// rulePriority is the priority of the routing rule that brings answers back to this host.
	rulePriority = 19286
	// zone is the conntrack zone of connections that Dial opens: see divert.
	zone uint16 = 19286
	// proofTimeout limits the test connection of Transparent.
	proofTimeout = 2 * time.Second
)

// diversion is the mark of the packets and connections that keep the client's address, and the number of their routing
// table.
type diversion uint32

// chain returns the name of the chain. Processes with the same mark share the rule and the route; the chain shows that
// one still needs them.
func (d diversion) chain() string { return fmt.Sprintf("divert-%x", uint32(d)) }

// Transparent makes Dial keep the client's address. It proves that with a test connection to the first address of each
// family. The error names the families in which Dial does not keep it, and why; in the others it does.
func (r *Redirects) Transparent() error {
	addrs, err := localAddrs()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.table == nil {
		return os.ErrClosed
	}
	if err := r.divert(); err != nil {
		return fmt.Errorf("keeping clients' addresses: %w", err)
	}
	var errs []error
	kept := map[netip.Addr]bool{}
	for _, f := range []struct {
		name   string
		family int
		is     func(netip.Addr) bool
	}{{"IPv4", unix.AF_INET, netip.Addr.Is4}, {"IPv6", unix.AF_INET6, netip.Addr.Is6}} {
		first := slices.IndexFunc(addrs, f.is)
		if first < 0 {
			continue
		}
		err := r.diversion.addRoutes(f.family)
		if err == nil {
			err = r.prove(addrs[first])
		}
		if err != nil {
			errs = append(errs, fmt.Errorf("keeping clients' addresses in %s: %w", f.name, err))
			continue
		}
		for _, a := range addrs {
			if f.is(a) {
				kept[a] = true
			}
		}
	}
	r.kept.Store(&kept)
	if len(addrs) == 0 {
		errs = append(errs, errors.New("keeping clients' addresses: the pod has no address that a client can reach"))
	}
	return errors.Join(errs...)
}

// localAddrs returns the addresses of this network namespace that others can reach.
func localAddrs() ([]netip.Addr, error) {
	all, err := net.InterfaceAddrs()
	if err != nil {
		return nil, fmt.Errorf("listing addresses: %w", err)
	}
	var out []netip.Addr
	for _, a := range all {
		if p, err := netip.ParsePrefix(a.String()); err == nil && p.Addr().Unmap().IsGlobalUnicast() {
			out = append(out, p.Addr().Unmap())
		}
	}
	return out, nil
}

// Neighbors returns these addresses of other hosts, those of the network namespace's routers, and all link-local ones.
// With an error, it may lack routers.
func Neighbors(addrs ...netip.Addr) (near []netip.Prefix, err error) {
	routes, err := netlink.RouteList(nil, netlink.FAMILY_ALL)
	for _, route := range routes {
		if a, ok := netip.AddrFromSlice(route.Gw); ok {
			addrs = append(addrs, a.Unmap())
		}
	}
	near = []netip.Prefix{netip.MustParsePrefix("169.254.0.0/16"), netip.MustParsePrefix("fe80::/10")}
	for _, a := range addrs {
		if p := netip.PrefixFrom(a, a.BitLen()); !slices.ContainsFunc(near, p.Overlaps) {
			near = append(near, p)
		}
	}
	return near, err
}

// rule returns the routing rule that, with route, delivers packets with the mark to this host, whatever their
// destination.
func (d diversion) rule(family int) *netlink.Rule {
	rule := netlink.NewRule()
	rule.Family, rule.Priority, rule.Mark, rule.Table = family, rulePriority, uint32(d), int(d)
	return rule
}

func (d diversion) route(family int) (*netlink.Route, error) {
	lo, err := netlink.LinkByName("lo")
	if err != nil {
		return nil, fmt.Errorf("looking for lo: %w", err)
	}
	all := &net.IPNet{IP: net.IPv4zero.To4(), Mask: net.CIDRMask(0, 32)}
	if family == unix.AF_INET6 {
		all = &net.IPNet{IP: net.IPv6zero, Mask: net.CIDRMask(0, 128)}
	}
	return &netlink.Route{
		Family: family, LinkIndex: lo.Attrs().Index, Dst: all, Table: int(d),
		Type: unix.RTN_LOCAL, Scope: netlink.SCOPE_HOST,
	}, nil
}

func (d diversion) addRoutes(family int) error {
	route, err := d.route(family)
	if err != nil {
		return err
	}
	if err := netlink.RouteReplace(route); err != nil {
		return fmt.Errorf("adding the route %s: %w", route, err)
	}
	if err := netlink.RuleAdd(d.rule(family)); err != nil && !errors.Is(err, unix.EEXIST) {
		return fmt.Errorf("adding the rule %s: %w", d.rule(family), err)
	}
	return nil
}

// removeRoutes removes the rules and routes of the mark, including those of a process that was killed, unless another
// process needs them. It checks before and, because another process may have started meanwhile, afterwards. The
// routes remain if the other process was killed and the kernel has not removed its table yet.
func (d diversion) removeRoutes() error {
	if needed, err := d.othersDivert(); needed || err != nil {
		return err
	}
	var errs []error
	for _, family := range []int{unix.AF_INET, unix.AF_INET6} {
		if err := netlink.RuleDel(d.rule(family)); err != nil && !absent(err) {
			errs = append(errs, fmt.Errorf("removing the rule %s: %w", d.rule(family), err))
		}
		route, err := d.route(family)
		if err == nil {
			err = netlink.RouteDel(route)
		}
		if err != nil && !absent(err) {
			errs = append(errs, fmt.Errorf("removing the route of table %d: %w", uint32(d), err))
		}
	}
	if needed, err := d.othersDivert(); err != nil {
		errs = append(errs, err)
	} else if needed {
		// IPv6 fails here if the namespace has none. The other process may have ended before the routes were back.
		errs = append(errs, d.addRoutes(unix.AF_INET),
			ignore(d.addRoutes(unix.AF_INET6), unix.EAFNOSUPPORT, unix.EACCES), d.removeRoutes())
	}
	return errors.Join(errs...)
}

// absent reports whether err means that there is nothing to remove: no such rule, route or family.
func absent(err error) bool {
	return ignore(err, unix.ENOENT, unix.ESRCH, unix.EAFNOSUPPORT, unix.EOPNOTSUPP) == nil
}

func ignore(err error, those ...error) error {
	if slices.ContainsFunc(those, func(e error) bool { return errors.Is(err, e) }) {
		return nil
	}
	return err
}

// othersDivert reports whether a table of another process has the same chain.
func (d diversion) othersDivert() (bool, error) {
	conn, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("opening a netlink socket: %w", err)
	}
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, fmt.Errorf("listing chains: %w", err)
	}
	return slices.ContainsFunc(chains, func(c *nftables.Chain) bool { return c.Name == d.chain() }), nil
}

// prove opens a test connection to a local address from a foreign one, and sends a byte each way.
func (r *Redirects) prove(local netip.Addr) error {
	client, err := foreignAddress(local)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(context.Background(), proofTimeout)
	defer cancel()
	var lc net.ListenConfig
	lc.SetMultipathTCP(false)
	l, err := lc.Listen(ctx, TCP, netip.AddrPortFrom(local, 0).String())
	if err != nil {
		return err
	}
	defer l.Close()
	out, err := r.dialAs(ctx, TCP, client, l.Addr().(*net.TCPAddr).AddrPort())
	if err != nil {
		return fmt.Errorf("the proof: %w", err)
	}
	defer out.Close()
	deadline, _ := ctx.Deadline()
	if err := errors.Join(l.(*net.TCPListener).SetDeadline(deadline), out.SetDeadline(deadline)); err != nil {
		return err
	}
	in, err := l.Accept()
	if err != nil {
		return fmt.Errorf("the proof: %w", err)
	}
	defer in.Close()
	if seen := in.RemoteAddr().(*net.TCPAddr).AddrPort().Addr().Unmap(); seen != client {
		return fmt.Errorf("the proof: a connection from %v came from %v", client, seen)
	}
	if err := in.SetDeadline(deadline); err != nil {
		return err
	}
	for _, way := range [][2]net.Conn{{out, in}, {in, out}} {
		if _, err := way[0].Write([]byte{1}); err != nil {
			return fmt.Errorf("the proof: %w", err)
		}
		if _, err := io.ReadFull(way[1], make([]byte, 1)); err != nil {
			return fmt.Errorf("the proof: %w", err)
		}
	}
	return nil
}

// foreignAddress returns an address outside of this network namespace that has a route, like that of every client. The
// proof sends nothing to it. The first choice is an address for documentation.
func foreignAddress(local netip.Addr) (netip.Addr, error) {
	candidates := []netip.Addr{netip.MustParseAddr("192.0.2.1"), local.Next(), local.Prev()}
	if local.Is6() {
		candidates[0] = netip.MustParseAddr("2001:db8::1")
	}
	var errs []error
	for _, c := range candidates {
		routes, err := netlink.RouteGet(c.AsSlice())
		if err == nil && len(routes) == 1 && routes[0].Type == unix.RTN_UNICAST {
			return c, nil
		}
		errs = append(errs, err)
	}
	return netip.Addr{}, fmt.Errorf("there is no route to any other host: %w", errors.Join(errs...))
}

// Dial connects to the application by network, TCP or UDP. If Transparent succeeded, and others can reach the
// address of "to", the application sees the client's address, with another port. Otherwise it is an ordinary
// connection with the mark.
func (r *Redirects) Dial(ctx context.Context, network string, client netip.Addr,
	to netip.AddrPort) (net.Conn, error) {
	client, to = client.Unmap(), netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if r.keeps(client, to.Addr()) {
		return r.dialAs(ctx, network, client, to)
	}
	d := net.Dialer{Control: unixsocket.DialControl(func(fd int) error { return setMark(fd, r.mark) })}
	return d.DialContext(ctx, network, to.String())
}

// keeps reports whether a connection to an address can keep the client's. A link-local address would also need its
// link.
func (r *Redirects) keeps(client, to netip.Addr) bool {
	kept := r.kept.Load()
	return kept != nil && (*kept)[to] && client.IsGlobalUnicast() && client.Is4() == to.Is4()
}

// dialAs connects from a foreign address.
func (r *Redirects) dialAs(ctx context.Context, network string, client netip.Addr,
	to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{
		Control: unixsocket.DialControl(func(fd int) error {
			var err error
			if client.Is4() {
				err = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
			} else {
				err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
			}
			if err != nil {
				return fmt.Errorf("cannot use a foreign address: %w", err)
			}
			if network == TCP {
				// The kernel chooses the port when it connects: so a client has all ports for each port of the
				// application.
				if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
					return fmt.Errorf("cannot choose the port late: %w", err)
				}
			}
			return setMark(fd, uint32(r.diversion))
		}),
	}
	if network == TCP {
		d.LocalAddr = net.TCPAddrFromAddrPort(netip.AddrPortFrom(client, 0))
	} else {
		d.LocalAddr = net.UDPAddrFromAddrPort(netip.AddrPortFrom(client, 0))
	}
	return d.DialContext(ctx, network, to.String())
}

func setMark(fd int, mark uint32) error {
	if err := unix.SetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_MARK, int(mark)); err != nil {
		return fmt.Errorf("cannot mark a socket: %w", err)
	}
	return nil
}
