package redirect

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"syscall"
	"time"

	"github.com/google/nftables"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
)

const (
	// rulePriority is of the rule that brings answers back to us.
	rulePriority = 19286
	// zone is conntrack's, for the connections that DialFrom opens: see divert.
	zone uint16 = 19286
	// proofTimeout is how long the proof of Transparent may take.
	proofTimeout = 2 * time.Second
)

// diversion is the mark of the packets and connections that keep the client's address. It is the number of their routing table,
// too.
type diversion uint32

func diversionOf(mark uint32) diversion { return diversion(mark + 1) }

// chain is named after the mark, so that others can see who needs the rule and the route, which all of a mark share.
func (d diversion) chain() string { return fmt.Sprintf("divert-%x", uint32(d)) }

// Transparent has DialFrom and DialUDPFrom keep the client's address, which it proves with a connection of its own to each
// family's first address. An error says in which families they do not and why; in the others they do.
func (r *Redirects) Transparent() error {
	addrs, err := localAddrs()
	if err != nil {
		return err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.backend == nil {
		return os.ErrClosed
	}
	if err := r.backend.divert(); err != nil {
		return fmt.Errorf("keeping clients' addresses: %w", err)
	}
	var errs []error
	for _, f := range []struct {
		name   string
		family int
		is     func(netip.Addr) bool
		local  *map[netip.Addr]bool
	}{{"IPv4", unix.AF_INET, netip.Addr.Is4, &r.local4}, {"IPv6", unix.AF_INET6, netip.Addr.Is6, &r.local6}} {
		local := map[netip.Addr]bool{}
		var first netip.Addr
		for _, a := range addrs {
			if f.is(a) {
				local[a] = true
				if !first.IsValid() {
					first = a
				}
			}
		}
		if len(local) == 0 {
			continue
		}
		err := r.diversion.addRoutes(f.family)
		if err == nil {
			err = r.prove(first)
		}
		if err != nil {
			r.keep(f.local, nil)
			errs = append(errs, fmt.Errorf("keeping clients' addresses in %s: %w", f.name, err))
			continue
		}
		r.keep(f.local, local)
	}
	if len(addrs) == 0 {
		errs = append(errs, errors.New("keeping clients' addresses: there is none that a client can reach"))
	}
	return errors.Join(errs...)
}

// keep has connections to these addresses keep the client's.
func (r *Redirects) keep(family *map[netip.Addr]bool, addrs map[netip.Addr]bool) {
	r.keeping.Lock()
	defer r.keeping.Unlock()
	*family = addrs
}

// localAddrs are the addresses of this network namespace that others can reach.
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

// rule and route have packets with the mark delivered to this host, whoever they are for.
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

// removeRoutes removes rules and routes of our mark, ours or those of a process that was killed, unless somebody else's table
// needs them. It looks before and, as another may have come meanwhile, afterwards.
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
		// A family that this namespace does not have fails here, as it did for the other.
		errs = append(errs, d.addRoutes(unix.AF_INET), ignore(d.addRoutes(unix.AF_INET6), unix.EAFNOSUPPORT, unix.EACCES))
	}
	return errors.Join(errs...)
}

// absent says that there is nothing to remove: no such rule, no such route, no such family.
func absent(err error) bool {
	return ignore(err, unix.ENOENT, unix.ESRCH, unix.EAFNOSUPPORT, unix.EOPNOTSUPP) == nil
}

func ignore(err error, those ...error) error {
	for _, e := range those {
		if errors.Is(err, e) {
			return nil
		}
	}
	return err
}

// othersDivert reports whether there is a table with a chain like ours.
func (d diversion) othersDivert() (bool, error) {
	conn, err := nftables.New()
	if err != nil {
		return false, fmt.Errorf("opening a netlink socket: %w", err)
	}
	chains, err := conn.ListChainsOfTableFamily(nftables.TableFamilyINet)
	if err != nil {
		return false, fmt.Errorf("listing chains: %w", err)
	}
	for _, c := range chains {
		if c.Name == d.chain() {
			return true, nil
		}
	}
	return false, nil
}

// prove opens a connection to ourselves at an address, as somebody else, and has bytes cross both ways.
func (r *Redirects) prove(local netip.Addr) error {
	client, err := stranger(local)
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

// stranger is an address outside of this network namespace to which there is a route, as there is to every client. Nothing is
// sent to it. The first choice is one for documentation.
func stranger(local netip.Addr) (netip.Addr, error) {
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
	return netip.Addr{}, fmt.Errorf("there is no route to anybody: %w", errors.Join(errs...))
}

// DialFrom connects to the application. Where Transparent has found that it works, and "to" is one of the addresses that others
// can reach, the application sees the client's address, with another port; else it is an ordinary connection with the mark.
func (r *Redirects) DialFrom(ctx context.Context, client netip.Addr, to netip.AddrPort) (net.Conn, error) {
	return r.dialFrom(ctx, TCP, client, to)
}

// DialUDPFrom is DialFrom for UDP.
func (r *Redirects) DialUDPFrom(ctx context.Context, client netip.Addr, to netip.AddrPort) (net.Conn, error) {
	return r.dialFrom(ctx, UDP, client, to)
}

func (r *Redirects) dialFrom(ctx context.Context, network string, client netip.Addr, to netip.AddrPort) (net.Conn, error) {
	client, to = client.Unmap(), netip.AddrPortFrom(to.Addr().Unmap(), to.Port())
	if r.keeps(client, to.Addr()) {
		return r.dialAs(ctx, network, client, to)
	}
	d := net.Dialer{Control: control(func(fd int) error { return setMark(fd, r.mark) })}
	return d.DialContext(ctx, network, to.String())
}

// keeps reports whether a connection to an address can come from the client's. A link-local one would need its link, too.
func (r *Redirects) keeps(client, to netip.Addr) bool {
	if !client.IsGlobalUnicast() {
		return false
	}
	r.keeping.RLock()
	defer r.keeping.RUnlock()
	if client.Is4() {
		return r.local4[to]
	}
	return r.local6[to]
}

// dialAs connects from an address that is not ours.
func (r *Redirects) dialAs(ctx context.Context, network string, client netip.Addr, to netip.AddrPort) (net.Conn, error) {
	d := net.Dialer{
		Control: control(func(fd int) error {
			var err error
			if client.Is4() {
				err = unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_TRANSPARENT, 1)
			} else {
				err = unix.SetsockoptInt(fd, unix.SOL_IPV6, unix.IPV6_TRANSPARENT, 1)
			}
			if err != nil {
				return fmt.Errorf("an address that is not ours: %w", err)
			}
			if network == TCP {
				// The port is chosen once it is known where to: so a client has all ports for each application's port.
				if err := unix.SetsockoptInt(fd, unix.SOL_IP, unix.IP_BIND_ADDRESS_NO_PORT, 1); err != nil {
					return fmt.Errorf("a port for one destination: %w", err)
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
		return fmt.Errorf("marking a socket: %w", err)
	}
	return nil
}

// control has f prepare a socket.
func control(f func(fd int) error) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, c syscall.RawConn) error {
		var inner error
		err := c.Control(func(fd uintptr) { inner = f(int(fd)) })
		if err != nil {
			return err
		}
		return inner
	}
}
