package route

import (
	"errors"
	"fmt"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/vishvananda/netlink"
	"go4.org/netipx"
	"golang.org/x/sys/unix"
)

// addrGenModeNone is IN6_ADDR_GEN_MODE_NONE of if_link.h: the kernel creates no link-local address, so it sends no
// router solicitations into the tunnel.
const addrGenModeNone = 1

// ipv6Timeout limits the time in which the kernel activates an IPv6 address. It takes less than a millisecond on an
// idle machine.
const ipv6Timeout = 2 * time.Second

// probes is the number of routes that Set checks at its end: enough to notice policy routing, and cheap.
const probes = 64

// Router keeps links, their addresses and their routes in the state of the last Set. Its links must be kubevpn's own.
// It changes no other links, and removes only what it set. Its methods are safe for concurrent use; they act on the
// network namespace of the calling thread.
type Router struct {
	openGuard func() (*guard, error)

	mu    sync.Mutex
	links map[string]*managed
	guard *guard // nil: there are no links, or the kernel has none
}

// managed is what the Router set on one link.
type managed struct {
	index  int // a link with the same name and another index is not the Router's
	addrs  []netip.Prefix
	routes []netip.Prefix
}

// New returns a Router that manages no link.
func New() *Router {
	return &Router{openGuard: openGuard, links: map[string]*managed{}}
}

// Set brings the links into the state of cfg and reads it back. A call with the same cfg restores what was removed in
// the meantime. After an error the state is between the old and the new one; a later Set, for example of the zero
// Config, continues from there. Set never replaces another program's route: it returns an error that names it.
func (r *Router) Set(cfg Config) (Applied, error) {
	if err := cfg.validate(); err != nil {
		return Applied{}, err
	}
	r.mu.Lock()
	defer r.mu.Unlock()
	h, err := netlink.NewHandle(unix.NETLINK_ROUTE)
	if err != nil {
		return Applied{}, fmt.Errorf("opening a netlink socket: %w", err)
	}
	defer h.Close()

	var errs []error
	for name, m := range r.links {
		if slices.ContainsFunc(cfg.Links, func(l Link) bool { return l.Name == name }) {
			continue
		}
		if err := m.remove(h, name); err != nil {
			errs = append(errs, err)
			continue
		}
		delete(r.links, name)
	}
	var applied Applied
	warning, err := r.keepNeighboursOut(cfg)
	errs = append(errs, err)
	if warning != "" {
		applied.Warnings = append(applied.Warnings, warning)
	}
	for _, l := range cfg.Links {
		warnings, err := r.apply(h, l)
		applied.Warnings = append(applied.Warnings, warnings...)
		if err != nil {
			errs = append(errs, fmt.Errorf("link %s: %w", l.Name, err))
		}
	}
	if err := errors.Join(errs...); err != nil {
		return applied, err
	}
	applied.Warnings = append(applied.Warnings, r.warnings(h, cfg)...)
	return applied, nil
}

// Close removes everything. The Router can be used again afterwards.
func (r *Router) Close() error {
	_, err := r.Set(Config{})
	return err
}

func (r *Router) apply(h *netlink.Handle, l Link) (warnings []string, err error) {
	link, err := h.LinkByName(l.Name)
	if err != nil {
		return nil, err
	}
	m := r.links[l.Name]
	if m == nil || m.index != link.Attrs().Index {
		m = &managed{index: link.Attrs().Index}
		r.links[l.Name] = m
	}
	if slices.ContainsFunc(slices.Concat(l.Addrs, l.Routes), is6) {
		if err := enableIPv6(l.Name); err != nil {
			warnings = append(warnings, fmt.Sprintf("this machine has no IPv6 (%v): %s carries IPv4 only", err, l.Name))
			l.Addrs, l.Routes = only4(l.Addrs), only4(l.Routes)
		}
	}
	l.Addrs, l.Routes = distinct(l.Addrs), distinct(l.Routes)
	if err := prepare(h, link, l); err != nil {
		return warnings, err
	}
	if err := m.addAddrs(h, link, l.Addrs); err != nil {
		return warnings, err
	}
	if err := h.LinkSetUp(link); err != nil {
		return warnings, fmt.Errorf("bringing it up: %w", err)
	}
	// Add new routes before removing old ones, so that an address that both cover always has a route.
	if err := m.addRoutes(h, link, l.Routes); err != nil {
		return warnings, err
	}
	if err := m.dropRoutes(h, link, without(m.routes, l.Routes)); err != nil {
		return warnings, err
	}
	if err := m.dropAddrs(h, link, without(m.addrs, l.Addrs)); err != nil {
		return warnings, err
	}
	if err := verify(h, l); err != nil {
		return warnings, err
	}
	return warnings, awaitIPv6(h, l.Addrs)
}

func prepare(h *netlink.Handle, link netlink.Link, l Link) error {
	a := link.Attrs()
	if a.MTU != l.MTU {
		if err := h.LinkSetMTU(link, l.MTU); err != nil {
			return fmt.Errorf("setting the MTU to %d: %w", l.MTU, err)
		}
	}
	if l.TxQueueLen != 0 && a.TxQLen != l.TxQueueLen {
		if err := h.LinkSetTxQLen(link, l.TxQueueLen); err != nil {
			return fmt.Errorf("setting the queue length to %d: %w", l.TxQueueLen, err)
		}
	}
	if a.RawFlags&unix.IFF_UP == 0 {
		err := netlink.LinkSetIP6AddrGenMode(link, addrGenModeNone)
		// EAFNOSUPPORT: a kernel without IPv6 has no such address to suppress.
		if err != nil && !errors.Is(err, unix.EAFNOSUPPORT) {
			return fmt.Errorf("turning its link-local address off: %w", err)
		}
	}
	return nil
}

func (m *managed) addAddrs(h *netlink.Handle, link netlink.Link, want []netip.Prefix) error {
	have, err := linkAddrs(h, link)
	if err != nil {
		return err
	}
	for _, p := range without(want, have) {
		a := newAddr(p)
		if p.Addr().Is6() {
			a.Flags = unix.IFA_F_NODAD // a TUN has no neighbours: duplicate address detection would only cost a second
		}
		if err := h.AddrAdd(link, a); err != nil && !errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding address %s: %w", p, err)
		}
		m.addrs = distinct(append(m.addrs, p))
	}
	return nil
}

func (m *managed) dropAddrs(h *netlink.Handle, link netlink.Link, drop []netip.Prefix) error {
	for _, p := range drop {
		if err := h.AddrDel(link, newAddr(p)); err != nil && !errors.Is(err, unix.EADDRNOTAVAIL) {
			return fmt.Errorf("removing address %s: %w", p, err)
		}
	}
	m.addrs = without(m.addrs, drop)
	return nil
}

func (m *managed) addRoutes(h *netlink.Handle, link netlink.Link, want []netip.Prefix) error {
	have, err := linkRoutes(h, link)
	if err != nil {
		return err
	}
	for _, p := range without(want, have) {
		err := h.RouteAdd(newRoute(link, p))
		if errors.Is(err, unix.EEXIST) {
			return fmt.Errorf("adding route %s: %s", p, conflictingRoute(h, p))
		}
		if err != nil {
			return fmt.Errorf("adding route %s: %w", p, err)
		}
		m.routes = distinct(append(m.routes, p))
	}
	return nil
}

func (m *managed) dropRoutes(h *netlink.Handle, link netlink.Link, drop []netip.Prefix) error {
	for _, p := range drop {
		if err := h.RouteDel(newRoute(link, p)); err != nil && !errors.Is(err, unix.ESRCH) {
			return fmt.Errorf("removing route %s: %w", p, err)
		}
	}
	m.routes = without(m.routes, drop)
	return nil
}

// remove removes what the Router set on a link that is no longer wanted, and brings the link down. If the link is
// gone, the kernel has removed everything with it.
func (m *managed) remove(h *netlink.Handle, name string) error {
	link, err := h.LinkByIndex(m.index)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	if link.Attrs().Name != name {
		return nil
	}
	err = errors.Join(m.dropRoutes(h, link, m.routes), m.dropAddrs(h, link, m.addrs), h.LinkSetDown(link))
	if _, gone := h.LinkByIndex(m.index); errors.As(gone, new(netlink.LinkNotFoundError)) {
		return nil // the link was removed concurrently
	}
	if err != nil {
		return fmt.Errorf("link %s: %w", name, err)
	}
	return nil
}

// newAddr returns an address with the length of its network.
func newAddr(p netip.Prefix) *netlink.Addr {
	return &netlink.Addr{IPNet: &net.IPNet{IP: p.Addr().AsSlice(), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}}
}

func newRoute(link netlink.Link, p netip.Prefix) *netlink.Route {
	r := &netlink.Route{
		LinkIndex: link.Attrs().Index,
		Dst:       netipx.PrefixIPNet(p),
		Table:     unix.RT_TABLE_MAIN,
		Protocol:  unix.RTPROT_STATIC,
	}
	if p.Addr().Is4() {
		r.Scope = netlink.SCOPE_LINK // no gateway: the far end of the link is the next hop
	}
	return r
}

func only4(list []netip.Prefix) []netip.Prefix { return slices.DeleteFunc(slices.Clone(list), is6) }

func is6(p netip.Prefix) bool { return p.Addr().Is6() }

// enableIPv6 turns IPv6 on for one of the Router's links if the machine's default for new links is off. The setting
// belongs to the link and is removed with it.
func enableIPv6(name string) error {
	if strings.ContainsAny(name, "/.") {
		return &net.AddrError{Err: "not a link name", Addr: name}
	}
	path := "/proc/sys/net/ipv6/conf/" + name + "/disable_ipv6"
	b, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(b)) == "0" {
		return nil
	}
	return os.WriteFile(path, []byte("0\n"), 0)
}
