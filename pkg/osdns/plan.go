package osdns

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// env is what plan decides from.
type env struct {
	// ResolvConf is /etc/resolv.conf as it is without us; nil if there is none. ResolvConfPath is where it is
	// when symlinks are followed.
	ResolvConf     []byte
	ResolvConfPath string
	// Resolved says why systemd-resolved cannot be used; nil: it is on the bus.
	Resolved error
	// ResolvedUplinks are the servers that systemd-resolved asks.
	ResolvedUplinks []netip.Addr
	// NFTables says why there can be no owner table; nil: there is one.
	NFTables error
	Config   Config
}

// decision is what plan wants done.
type decision struct {
	Mode      Mode
	Upstreams []netip.AddrPort
	// Redirect, in ModeNFTables, are the addresses whose port 53 is redirected.
	Redirect []netip.Addr
	// Nameservers, in ModeFile, are what resolv.conf shall name.
	Nameservers []netip.Addr
	// PerLink tells systemd-resolved of our links. In ModeResolved it is all that is done. In the other modes
	// programs that ask resolved by its own interface (glibc's nss-resolve) need it all the same, for resolved
	// sends no name that ends in .local to a server that was not given that domain.
	PerLink  bool
	Warnings []string
}

// plan picks the mode. An error says why none fits.
//
//	resolv.conf names only resolved's stub, resolved answers ──────▶ systemd-resolved
//	an owner table can be had, and our listener's family fits ─────▶ nftables
//	resolv.conf is resolved's list of uplinks, resolved answers ───▶ systemd-resolved, with a warning
//	a nameserver of ours can stand in resolv.conf (port 53) ───────▶ resolv.conf
func plan(e env) (decision, error) {
	servers := without(nameservers(e.ResolvConf), e.Config)
	stub := len(servers) > 0 && !slices.ContainsFunc(servers, func(a netip.Addr) bool { return !isStub(a) })
	perLink := slices.ContainsFunc(e.Config.Links, func(l Link) bool { return l.Resolver.IsValid() })
	byResolved := e.Resolved == nil && perLink

	if stub && byResolved {
		return decision{Mode: ModeResolved, PerLink: true, Upstreams: port53(without(e.ResolvedUplinks, e.Config))}, nil
	}
	d := decision{PerLink: byResolved}
	if stub && perLink {
		d.warn("resolv.conf points to systemd-resolved, which cannot be used: %v", e.Resolved)
	}
	local := len(servers) == 0
	if local {
		// resolv.conf(5): without a nameserver line, the one on this machine is asked.
		servers = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	d.Upstreams = port53(servers)
	if e.NFTables == nil {
		if local && e.Config.Listen6.IsValid() {
			servers = append(servers, netip.IPv6Loopback()) // Go's resolver tries this one as well
		}
		if d.redirect(servers, e.Config); len(d.Redirect) > 0 {
			d.Mode = ModeNFTables
			return d, nil
		}
	} else {
		d.warn("nftables cannot redirect DNS: %v", e.NFTables)
	}
	if byResolved && strings.HasPrefix(e.ResolvConfPath, "/run/systemd/resolve/") {
		d.Mode = ModeResolved
		d.warn("resolv.conf bypasses systemd-resolved: programs that read it themselves do not find cluster names; link it to /run/systemd/resolve/stub-resolv.conf")
		return d, nil
	}
	if d.Nameservers = fileNameservers(e.Config); len(d.Nameservers) > 0 {
		d.Mode = ModeFile
		d.warn("editing %s, until kubevpn ends", e.ResolvConfPath)
		return d, nil
	}
	return decision{}, fmt.Errorf("no way to put the resolver in the path of DNS queries: %s", strings.Join(d.Warnings, "; "))
}

// redirect picks the nameservers whose queries come to us.
//
// Where one is on this machine (dnsmasq, unbound), only those on this machine are: the others are likely to
// be what it asks in turn, and its queries would come back to us for ever.
func (d *decision) redirect(servers []netip.Addr, cfg Config) {
	here := slices.ContainsFunc(servers, netip.Addr.IsLoopback)
	for _, s := range servers {
		if here && !s.IsLoopback() {
			d.warn("nameserver %s stays as it is, because the one on this machine may be asking it: programs that query both may miss cluster names", s)
			continue
		}
		listen := cfg.Listen4
		if s.Is6() {
			listen = cfg.Listen6
		}
		if !listen.IsValid() {
			d.warn("nameserver %s cannot be redirected, because the resolver does not listen on %s", s, family(s))
			continue
		}
		d.Redirect = append(d.Redirect, s.WithZone(""))
	}
}

func (d *decision) warn(format string, args ...any) {
	d.Warnings = append(d.Warnings, fmt.Sprintf(format, args...))
}

func family(a netip.Addr) string {
	if a.Is4() {
		return "IPv4"
	}
	return "IPv6"
}

// isStub reports an address of systemd-resolved's own listeners.
func isStub(a netip.Addr) bool {
	return a == netip.AddrFrom4([4]byte{127, 0, 0, 53}) || a == netip.AddrFrom4([4]byte{127, 0, 0, 54})
}

// fileNameservers are the addresses of ours that resolv.conf can name, which knows no ports but 53.
func fileNameservers(cfg Config) []netip.Addr {
	var out []netip.Addr
	for _, l := range []netip.AddrPort{cfg.Listen4, cfg.Listen6} {
		if l.IsValid() && l.Port() == 53 {
			out = append(out, l.Addr())
		}
	}
	for _, l := range cfg.Links {
		if l.Resolver.IsValid() && !slices.Contains(out, l.Resolver) {
			out = append(out, l.Resolver)
		}
	}
	return out[:min(len(out), 3)] // resolv.conf(5): MAXNS
}

// without leaves our own addresses out: a resolver must not be its own upstream.
func without(servers []netip.Addr, cfg Config) []netip.Addr {
	ours := []netip.Addr{}
	for _, l := range []netip.AddrPort{cfg.Listen4, cfg.Listen6} {
		if l.IsValid() && l.Port() == 53 {
			ours = append(ours, l.Addr())
		}
	}
	for _, l := range cfg.Links {
		ours = append(ours, l.Resolver)
	}
	return slices.DeleteFunc(slices.Clone(servers), func(a netip.Addr) bool { return slices.Contains(ours, a) })
}

func port53(list []netip.Addr) []netip.AddrPort {
	var out []netip.AddrPort
	for _, a := range list {
		out = append(out, netip.AddrPortFrom(a, 53))
	}
	return out
}
