package lab

import (
	"fmt"
	"net"
	"net/netip"
	"os"
	"path/filepath"
	"strings"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"

	"kubevpn/test/lab/guest"
)

// The names of links inside the namespaces.
const (
	bridgeName = "br0"    // of the router, with all nodes on it
	laptopLink = "laptop" // the router's end of the link to the laptop
	uplink     = "eth0"   // of a node, and of the laptop
)

// createNetwork creates the namespaces, their links, addresses and routes.
func (l *Lab) createNetwork() error {
	for _, place := range l.config.places() {
		if err := createNet(l.config.namespace(place)); err != nil {
			return err
		}
		if err := onThread(func() error { return l.sysctls(place) }); err != nil {
			return fmt.Errorf("setting up %s: %w", place, err)
		}
	}
	if err := l.writeLaptopFiles(); err != nil {
		return err
	}
	router, err := l.open("router")
	if err != nil {
		return err
	}
	defer router.Close()
	if err := router.bridge(); err != nil {
		return err
	}
	for _, f := range l.config.Families() {
		if err := router.address(bridgeName, netip.PrefixFrom(f.Router, f.NodeNet.Bits())); err != nil {
			return err
		}
		if err := router.address("lo", netip.PrefixFrom(f.Outside, f.Outside.BitLen())); err != nil {
			return err
		}
	}
	if err := l.wireLaptop(router); err != nil {
		return err
	}
	if l.config.guests {
		if err := l.wireHost(router, controlPlace, 0); err != nil {
			return err
		}
	}
	for n := 1; n <= l.config.Nodes; n++ {
		if l.config.guest(n) {
			if err := l.wireGuest(router, n); err != nil {
				return err
			}
			continue
		}
		name := fmt.Sprintf("node%d", n)
		if err := l.wireHost(router, name, n); err != nil {
			return err
		}
		if _, err := l.run(name, strings.NewReader(l.config.masquerade()), "nft", "-f", "-"); err != nil {
			return err
		}
		if err := onThread(func() error { return l.forgetUnanswered(name) }); err != nil {
			return err
		}
	}
	return nil
}

// sysctls configures a namespace before it has any link, so that every link starts with these settings.
func (l *Lab) sysctls(place string) error {
	if err := enterNet(l.config.namespace(place)); err != nil {
		return err
	}
	settings := kernelNetwork(place)
	if l.inGuest(place) {
		// Only the guest uses the uplink. This kernel must not send packets there.
		settings = []string{"net.ipv6.conf.all.disable_ipv6=1", "net.ipv6.conf.default.disable_ipv6=1"}
	}
	for _, s := range settings {
		name, value, _ := strings.Cut(s, "=")
		err := sysctl(name, value)
		if os.IsNotExist(err) && strings.HasPrefix(name, "net.ipv6") && !l.config.IPv6 {
			continue // a machine without IPv6
		}
		if err != nil {
			return err
		}
	}
	return nil
}

// forgetUnanswered makes a node forget an unanswered connection after 5 s instead of 120. A packet to a ClusterIP that
// kube-proxy does not know yet stays untranslated, and conntrack remembers that by the source port. The kernel returns
// to a source port after some 3000 connections (Linux 6.18 advances by 10 on average), which a test opens in seconds.
// Conntrack still knows a SYN's first three retransmissions.
func (l *Lab) forgetUnanswered(node string) error {
	if err := enterNet(l.config.namespace(node)); err != nil {
		return err
	}
	return sysctl("net.netfilter.nf_conntrack_tcp_timeout_syn_sent", "5")
}

// kernelNetwork returns the kernel's network settings of a place.
func kernelNetwork(place string) []string {
	settings := []string{
		"net.ipv6.conf.all.accept_dad=0", // skip duplicate address detection, so that an address is usable at once
		"net.ipv6.conf.default.accept_dad=0",
		"net.ipv4.conf.all.rp_filter=0",
		"net.ipv4.conf.default.rp_filter=0",
	}
	if place != "laptop" {
		settings = append(settings, "net.ipv4.ip_forward=1", "net.ipv6.conf.all.forwarding=1",
			"net.ipv6.conf.default.forwarding=1")
	}
	if place == "router" {
		// send each "unreachable"
		settings = append(settings, "net.ipv4.icmp_ratelimit=0", "net.ipv6.icmp.ratelimit=0")
	}
	return settings
}

func (l *Lab) wireLaptop(router *place) error {
	laptop, err := l.open("laptop")
	if err != nil {
		return err
	}
	defer laptop.Close()
	if err := router.wire(laptopLink, laptop, uplink); err != nil {
		return err
	}
	for _, f := range l.config.Families() {
		if err := router.address(laptopLink, netip.PrefixFrom(f.Gateway, f.LaptopNet.Bits())); err != nil {
			return err
		}
		if err := laptop.address(uplink, netip.PrefixFrom(f.Laptop, f.LaptopNet.Bits())); err != nil {
			return err
		}
		if err := laptop.route(netip.PrefixFrom(unspecified(f.Gateway), 0), f.Gateway); err != nil {
			return err
		}
	}
	return nil
}

// wireHost connects a place to the router's bridge: node n, or the control plane for 0.
func (l *Lab) wireHost(router *place, name string, n int) error {
	host, err := l.open(name)
	if err != nil {
		return err
	}
	defer host.Close()
	if err := router.wire(name, host, uplink); err != nil {
		return err
	}
	if err := router.enslave(name); err != nil {
		return err
	}
	network := l.config.hostNetwork(n)
	for _, a := range network.Addresses {
		if err := host.address(uplink, a); err != nil {
			return err
		}
	}
	for _, r := range network.Routes {
		if err := host.route(r.To, r.Via); err != nil {
			return err
		}
	}
	return nil
}

// hostNetwork returns the network of node n, or for 0 that of the control plane's own place: its addresses, and routes
// to the router and to the other nodes' pods.
func (c Config) hostNetwork(n int) guest.Network {
	network := guest.Network{Name: uplink}
	for _, f := range c.Families() {
		own := f.Control
		if n > 0 {
			own = f.Node(n)
		}
		network.Addresses = append(network.Addresses, netip.PrefixFrom(own, f.NodeNet.Bits()))
		network.Routes = append(network.Routes,
			guest.Route{To: netip.PrefixFrom(unspecified(f.Router), 0), Via: f.Router})
		for other := 1; other <= c.Nodes; other++ {
			if other != n {
				network.Routes = append(network.Routes, guest.Route{To: f.PodRange(other), Via: f.Node(other)})
			}
		}
	}
	return network
}

// masquerade returns the node's nftables ruleset. Packets that pods send beyond the cluster leave with the node's
// address, because the router has no route to the pods.
func (c Config) masquerade() string {
	var b strings.Builder
	for _, f := range c.Families() {
		family := "ip"
		if f.Pods.Addr().Is6() {
			family = "ip6"
		}
		fmt.Fprintf(&b, `table %[1]s lab {
	chain postrouting {
		type nat hook postrouting priority 100; policy accept;
		oifname %[2]q %[1]s saddr %[3]s %[1]s daddr != %[3]s masquerade
	}
}
`, family, uplink, f.Pods)
	}
	return b.String()
}

// writeLaptopFiles writes the files that `ip netns exec` mounts over the laptop's /etc.
func (l *Lab) writeLaptopFiles() error {
	dir := filepath.Join(etcNetns, l.config.namespace("laptop"))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	resolv := ""
	for _, f := range l.config.Families() {
		resolv += "nameserver " + f.Gateway.String() + "\n"
	}
	files := map[string]string{
		"resolv.conf": resolv,
		"hosts":       "127.0.0.1 localhost\n::1 localhost\n127.0.1.1 " + l.config.namespace("laptop") + "\n",
	}
	// The machine's nsswitch.conf may use a service outside of the namespace (systemd-resolved, mDNS).
	if b, err := os.ReadFile("/etc/nsswitch.conf"); err == nil {
		files["nsswitch.conf"] = plainHosts(string(b))
	}
	for name, content := range files {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(content), 0o644); err != nil {
			return err
		}
	}
	return nil
}

const etcNetns = "/etc/netns"

// plainHosts returns an nsswitch.conf that resolves host names only from files and DNS.
func plainHosts(nsswitch string) string {
	var b strings.Builder
	for line := range strings.Lines(nsswitch) {
		if strings.HasPrefix(line, "hosts:") {
			line = "hosts: files dns\n"
		}
		b.WriteString(line)
	}
	return b.String()
}

// place is a network namespace that is open for configuration.
type place struct {
	name   string
	handle *netlink.Handle
	ns     netns.NsHandle
}

func (l *Lab) open(name string) (*place, error) {
	ns, err := netns.GetFromPath(filepath.Join(netnsDir, l.config.namespace(name)))
	if err != nil {
		return nil, fmt.Errorf("opening the namespace of %s: %w", name, err)
	}
	handle, err := netlink.NewHandleAt(ns, unix.NETLINK_ROUTE)
	if err != nil {
		ns.Close()
		return nil, fmt.Errorf("opening netlink of %s: %w", name, err)
	}
	p := &place{name: name, handle: handle, ns: ns}
	if err := p.up("lo"); err != nil {
		p.Close()
		return nil, err
	}
	return p, nil
}

func (p *place) Close() {
	p.handle.Close()
	p.ns.Close()
}

func (p *place) up(link string) error {
	found, err := p.handle.LinkByName(link)
	if err == nil {
		err = p.handle.LinkSetUp(found)
	}
	if err != nil {
		return fmt.Errorf("bringing up %s of %s: %w", link, p.name, err)
	}
	return nil
}

func (p *place) bridge() error {
	b := &netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: bridgeName}}
	if err := p.handle.LinkAdd(b); err != nil {
		return fmt.Errorf("adding bridge %s to %s: %w", bridgeName, p.name, err)
	}
	return p.up(bridgeName)
}

func (p *place) enslave(link string) error {
	port, err := p.handle.LinkByName(link)
	if err != nil {
		return fmt.Errorf("finding %s of %s: %w", link, p.name, err)
	}
	master, err := p.handle.LinkByName(bridgeName)
	if err != nil {
		return fmt.Errorf("finding %s of %s: %w", bridgeName, p.name, err)
	}
	if err := p.handle.LinkSetMaster(port, master); err != nil {
		return fmt.Errorf("putting %s on %s: %w", link, bridgeName, err)
	}
	return nil
}

// wire joins two places with a veth pair. It creates both ends directly in their namespaces, so neither end appears in
// the machine's own namespace.
func (p *place) wire(name string, other *place, otherName string) error {
	pair := &netlink.Veth{
		LinkAttrs:     netlink.LinkAttrs{Name: name},
		PeerName:      otherName,
		PeerNamespace: netlink.NsFd(other.ns),
	}
	if err := p.handle.LinkAdd(pair); err != nil {
		return fmt.Errorf("wiring %s to %s: %w", p.name, other.name, err)
	}
	if err := p.up(name); err != nil {
		return err
	}
	return other.up(otherName)
}

func (p *place) address(link string, prefix netip.Prefix) error {
	found, err := p.handle.LinkByName(link)
	if err == nil {
		err = p.handle.AddrReplace(found, &netlink.Addr{IPNet: ipNet(prefix)})
	}
	if err != nil {
		return fmt.Errorf("giving %s of %s the address %s: %w", link, p.name, prefix, err)
	}
	return nil
}

func (p *place) route(to netip.Prefix, via netip.Addr) error {
	if err := p.handle.RouteReplace(&netlink.Route{Dst: ipNet(to), Gw: net.IP(via.AsSlice())}); err != nil {
		return fmt.Errorf("routing %s of %s via %s: %w", to, p.name, via, err)
	}
	return nil
}

func ipNet(p netip.Prefix) *net.IPNet {
	return &net.IPNet{IP: net.IP(p.Addr().AsSlice()), Mask: net.CIDRMask(p.Bits(), p.Addr().BitLen())}
}
