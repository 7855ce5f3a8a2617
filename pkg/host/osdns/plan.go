package osdns

import (
	"cmp"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"strings"
)

// env is what a Configurator observed, and its Config.
type env struct {
	// ResolvConf is the content of /etc/resolv.conf without kubevpn's edit; nil if there is no file. ResolvConfPath is
	// its path after symlinks.
	ResolvConf     []byte
	ResolvConfPath string
	// Resolved is the reason why systemd-resolved cannot be used; nil: it is on the bus.
	Resolved error
	// ResolvedUplinks are the upstream servers of systemd-resolved.
	ResolvedUplinks []netip.Addr
	// NFTables is the reason why there is no owner table; nil: there is one.
	NFTables error
	Config   Config
}

// decision is the result of plan.
type decision struct {
	Mode      Mode
	Upstreams []netip.AddrPort
	// Redirect, in ModeNFTables, are the addresses whose port 53 the table redirects.
	Redirect []netip.Addr
	// Nameservers, in ModeFile, are the new nameservers of resolv.conf.
	Nameservers []netip.Addr
	// PerLink configures the links in systemd-resolved. ModeResolved does nothing else. In the other modes, programs
	// that use resolved's own interface (glibc's nss-resolve) need it too: resolved sends names that end in .local only
	// to servers with that domain.
	PerLink  bool
	Warnings []string
}

// plan chooses the mode. Its error says why none fits.
//
//	resolv.conf names only resolved's stub, resolved answers ──────▶ systemd-resolved; without a link's resolver: none
//	the Config is for the links' domains only ─────────────────────▶ systemd-resolved as in the fourth line, or none
//	an owner table works, and the listener's family fits ──────────▶ nftables
//	resolv.conf is resolved's list of uplinks, resolved answers ───▶ systemd-resolved, with a warning
//	the resolver listens on port 53, as resolv.conf requires ──────▶ resolv.conf
func plan(e env) (decision, error) {
	servers := without(nameservers(e.ResolvConf), e.Config)
	stub := len(servers) > 0 && !slices.ContainsFunc(servers, func(a netip.Addr) bool { return !isStub(a) })
	perLink := slices.ContainsFunc(e.Config.Links, func(l Link) bool { return l.Resolver.IsValid() })
	byResolved := e.Resolved == nil && perLink

	if stub && byResolved {
		return decision{Mode: ModeResolved, PerLink: true, Upstreams: port53(without(e.ResolvedUplinks, e.Config))}, nil
	}
	if stub && e.Resolved == nil {
		return decision{}, errors.New("systemd-resolved answers this machine's queries, and " +
			"no link has a resolver for it")
	}
	bypassed := byResolved && strings.HasPrefix(e.ResolvConfPath, "/run/systemd/resolve/")
	d := decision{PerLink: byResolved}
	if e.Config.DomainsOnly && !bypassed {
		return decision{}, fmt.Errorf("%w, because systemd-resolved does not answer them: %w", ErrAllQueries,
			cmp.Or(e.Resolved, fmt.Errorf("%s does not lead to it", e.ResolvConfPath)))
	}
	if stub {
		d.warn("resolv.conf points to systemd-resolved, which cannot be used: %v", e.Resolved)
	}
	local := len(servers) == 0
	if local {
		// resolv.conf(5): without a nameserver line, programs ask the one on this machine.
		servers = []netip.Addr{netip.AddrFrom4([4]byte{127, 0, 0, 1})}
	}
	d.Upstreams = port53(servers)
	if e.Config.DomainsOnly {
		return d.bypass(), nil
	}
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
	if bypassed {
		return d.bypass(), nil
	}
	if d.Nameservers = fileNameservers(e.Config); len(d.Nameservers) > 0 {
		d.Mode = ModeFile
		d.warn("editing %s, until kubevpn ends", e.ResolvConfPath)
		return d, nil
	}
	return decision{}, fmt.Errorf("cannot put the resolver into the path of DNS queries: %s",
		strings.Join(d.Warnings, "; "))
}

// bypass returns the decision for a resolv.conf that is resolved's list of uplinks.
func (d decision) bypass() decision {
	d.Mode = ModeResolved
	d.warn("resolv.conf bypasses systemd-resolved: programs that read it themselves do not find cluster names; " +
		"link it to /run/systemd/resolve/stub-resolv.conf")
	return d
}

// redirect chooses the nameservers whose queries the table redirects.
//
// If one is on this machine (dnsmasq, unbound), redirect chooses only those on this machine. The others probably are
// its upstreams, and its queries would return to the resolver in a loop.
func (d *decision) redirect(servers []netip.Addr, cfg Config) {
	here := slices.ContainsFunc(servers, netip.Addr.IsLoopback)
	for _, s := range servers {
		if here && !s.IsLoopback() {
			d.warn("nameserver %s is not redirected, because the one on this machine may ask it: programs that query "+
				"both may miss cluster names", s)
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

// isStub reports whether a is one of systemd-resolved's own listeners.
func isStub(a netip.Addr) bool {
	return a == netip.AddrFrom4([4]byte{127, 0, 0, 53}) || a == netip.AddrFrom4([4]byte{127, 0, 0, 54})
}

// fileNameservers returns the resolver's addresses with port 53, which is the only one that resolv.conf can name.
func fileNameservers(cfg Config) []netip.Addr {
	out := listenersOnPort53(cfg)
	for _, l := range cfg.Links {
		if l.Resolver.IsValid() && !slices.Contains(out, l.Resolver) {
			out = append(out, l.Resolver)
		}
	}
	return out[:min(len(out), 3)] // resolv.conf(5): MAXNS
}

// listenersOnPort53 returns the loopback addresses at which the resolver listens on port 53.
func listenersOnPort53(cfg Config) (out []netip.Addr) {
	for _, l := range []netip.AddrPort{cfg.Listen4, cfg.Listen6} {
		if l.IsValid() && l.Port() == 53 {
			out = append(out, l.Addr())
		}
	}
	return out
}

// without returns servers without the resolver's own addresses: a resolver must not be its own upstream.
func without(servers []netip.Addr, cfg Config) []netip.Addr {
	ours := listenersOnPort53(cfg)
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
