package gateway

import (
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netlink/nl"
	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/datapath/tun"
	"kubevpn/pkg/host/route"
)

// device is the TUN device's name.
const device = "kubevpn0"

// sysctlRoot is the directory of sysctls. A container without privilege can only read them.
const sysctlRoot = "/proc/sys/net"

// network is the configuration of the pod's network namespace for one connection of the manager. Its methods act on
// the calling thread's namespace, and must not run concurrently.
type network struct {
	log      *slog.Logger
	firewall *firewall
	mtu      int
	ipv6     bool
	warnings []string
	router   *route.Router
	have     []netip.Prefix
	undo     []func() error // restore forwarding; close calls them in reverse
}

// openNetwork creates the TUN device, without addresses, and turns on forwarding. The kernel removes the device
// when the last copy of the file is closed. After an error, openNetwork has removed everything.
func openNetwork(firewall *firewall, log *slog.Logger) (_ *network, _ *os.File, err error) {
	n := &network{log: log, firewall: firewall, router: route.New()}
	if err := removeDevice(); err != nil {
		return nil, nil, err
	}
	uplinks, err := route.Uplinks()
	if err != nil {
		return nil, nil, err
	}
	n.mtu = 1500
	if len(uplinks) > 0 {
		n.mtu = slices.MinFunc(uplinks, func(a, b netlink.Link) int {
			return a.Attrs().MTU - b.Attrs().MTU
		}).Attrs().MTU
	} else {
		n.warnings = append(n.warnings, "the pod has no default route")
	}
	file, err := tun.Create(device, n.mtu)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, n.close(), file.Close())
		}
	}()
	if err := n.forward4(); err != nil {
		return nil, nil, err
	}
	n.forward6(uplinks)
	return n, file, nil
}

// removeDevice removes our device, which a killed gateway may have left to the manager.
func removeDevice() error {
	link, err := netlink.LinkByName(device)
	if errors.As(err, new(netlink.LinkNotFoundError)) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("looking for %s: %w", device, err)
	}
	if err := netlink.LinkDel(link); err != nil && !errors.Is(err, unix.ENODEV) {
		return fmt.Errorf("removing %s: %w", device, err)
	}
	return nil
}

// forward4 turns on IPv4 forwarding on every link of the pod, including the device. The kernel forwards a packet if the
// link on which it arrives forwards.
func (n *network) forward4() error {
	links, err := netlink.LinkList()
	if err != nil {
		return fmt.Errorf("listing links: %w", err)
	}
	for _, l := range links {
		attrs := l.Attrs()
		if attrs.Name == "lo" {
			continue
		}
		file := filepath.Join(sysctlRoot, "ipv4/conf", attrs.Name, "forwarding")
		if value, err := readSysctl(file); err != nil {
			return fmt.Errorf("reading whether %s forwards: %w", attrs.Name, err)
		} else if value == "1" {
			continue
		}
		if err := setForwarding4(attrs.Index, 1); err != nil {
			return fmt.Errorf("turning on IPv4 forwarding on %s: %w", attrs.Name, err)
		}
		if attrs.Name != device { // close removes the device
			n.undo = append(n.undo, func() error { return setForwarding4(attrs.Index, 0) })
		}
		n.log.Info("IPv4 forwarding was off", "link", attrs.Name)
	}
	return nil
}

// setForwarding4 sets a link's sysctl forwarding by rtnetlink, which needs only NET_ADMIN and no writable /proc/sys.
func setForwarding4(index int, value uint32) error {
	const ( // of linux/if_link.h and linux/ip.h
		iflaInetConf        = 1
		ipv4DevconfForwards = 1
	)
	request := nl.NewNetlinkRequest(unix.RTM_SETLINK, unix.NLM_F_ACK)
	header := nl.NewIfInfomsg(unix.AF_UNSPEC)
	header.Index = int32(index)
	request.AddData(header)
	families := nl.NewRtAttr(unix.IFLA_AF_SPEC, nil)
	families.AddRtAttr(unix.AF_INET, nil).AddRtAttr(iflaInetConf, nil).AddRtAttr(ipv4DevconfForwards,
		nl.Uint32Attr(value))
	request.AddData(families)
	_, err := request.Execute(unix.NETLINK_ROUTE, 0)
	return err
}

// forward6 turns on IPv6 forwarding if it can: only a writable /proc/sys can set it, and rtnetlink cannot.
func (n *network) forward6(uplinks []netlink.Link) {
	if !hasIPv6(uplinks) {
		return // there is nothing to forward to
	}
	if n.firewall.v6 == nil {
		n.warnings = append(n.warnings, "IPv6 is not carried: "+n.firewall.noV6)
		return
	}
	all := filepath.Join(sysctlRoot, "ipv6/conf/all/forwarding")
	value, err := readSysctl(all)
	if err == nil && value != "1" {
		for _, l := range uplinks {
			// A link with the value 1 accepts router advertisements only while it does not forward. The pod's default
			// route may come from one.
			file := filepath.Join(sysctlRoot, "ipv6/conf", l.Attrs().Name, "accept_ra")
			if accept, _ := readSysctl(file); accept == "1" && err == nil {
				err = n.setSysctl(file, "2", accept)
			}
		}
		if err == nil {
			err = n.setSysctl(all, "1", value)
		}
	}
	if err != nil {
		n.warnings = append(n.warnings,
			fmt.Sprintf("IPv6 is not carried: net.ipv6.conf.all.forwarding is off in the pod and cannot be set: %v",
				err))
		return
	}
	n.ipv6 = true
}

// hasIPv6 reports whether one of the links has a global IPv6 address.
func hasIPv6(links []netlink.Link) bool {
	for _, l := range links {
		addrs, err := netlink.AddrList(l, netlink.FAMILY_V6)
		if err == nil && slices.ContainsFunc(addrs, func(a netlink.Addr) bool {
			return a.Scope == unix.RT_SCOPE_UNIVERSE
		}) {
			return true
		}
	}
	return false
}

func readSysctl(file string) (string, error) {
	text, err := os.ReadFile(file)
	return strings.TrimSpace(string(text)), err
}

func (n *network) setSysctl(file, value, before string) error {
	if err := os.WriteFile(file, []byte(value), 0); err != nil {
		return err
	}
	n.undo = append(n.undo, func() error {
		err := os.WriteFile(file, []byte(before), 0)
		if errors.Is(err, fs.ErrNotExist) {
			return nil // its link is gone
		}
		return err
	})
	return nil
}

// check rejects networks that must not be routed to laptops. The gateway does not trust the manager: at worst the
// manager can take private networks from its own pod.
func check(networks []netip.Prefix) error {
	const most = 64
	inner := routable.Of(routable.Inner())
	if len(networks) > most {
		return fmt.Errorf("%d networks, more than %d", len(networks), most)
	}
	for _, p := range networks {
		if !p.IsValid() || p != p.Masked() || p.Addr().Is4In6() {
			return fmt.Errorf("%v is not a network", p)
		}
		if !inner.ContainsPrefix(p) {
			return fmt.Errorf("%v is not in a network for laptops: %v", p, routable.Inner())
		}
		// An address for the device, and one for a laptop at least.
		if p.Bits() > p.Addr().BitLen()-2 {
			return fmt.Errorf("%v is too small", p)
		}
	}
	return nil
}

// set replaces the device's addresses, the routes to it and the rules by those for networks. It fails if the pod itself
// has a route to one of them.
func (n *network) set(networks []netip.Prefix) error {
	if err := check(networks); err != nil {
		return err
	}
	want := slices.DeleteFunc(slices.Clone(networks), func(p netip.Prefix) bool { return p.Addr().Is6() && !n.ipv6 })
	link := route.Link{Name: device, MTU: n.mtu, Routes: want}
	for _, p := range want {
		link.Addrs = append(link.Addrs, netip.PrefixFrom(first(p), p.Addr().BitLen()))
	}
	applied, err := n.router.Set(route.Config{Links: []route.Link{link}, Forwards: true})
	if err != nil {
		return err
	}
	for _, warning := range applied.Warnings {
		n.log.Warn("network", "warning", warning)
	}
	n.have = want
	if err := n.firewall.v4.set(want); err != nil {
		return err
	}
	if n.ipv6 {
		return n.firewall.v6.set(want)
	}
	return nil
}

// first returns the device's address in a network, which is the first after the network's own.
func first(p netip.Prefix) netip.Addr { return p.Addr().Next() }

// state returns the description that the manager receives.
func (n *network) state() api.Gateway {
	g := api.Gateway{MTU: n.mtu, IPv4: true, IPv6: n.ipv6, Backend: n.firewall.backend, Warnings: n.warnings}
	for _, p := range n.have {
		g.Addrs = append(g.Addrs, first(p))
	}
	return g
}

// close removes everything, even if the manager still has the device's file.
func (n *network) close() error {
	err := removeDevice() // with its addresses and routes
	err = errors.Join(err, n.firewall.v4.remove())
	if n.firewall.v6 != nil {
		err = errors.Join(err, n.firewall.v6.remove())
	}
	for _, undo := range slices.Backward(n.undo) {
		err = errors.Join(err, undo())
	}
	return err
}
