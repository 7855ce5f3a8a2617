package osdns

import "log/slog"

// DefaultMark is "KV" and 53. It differs from the marks of other programs: Tailscale's 0x80000 and 0x40000 in
// 0xff0000, kube-proxy's 0x4000 and 0x8000, Cilium's 0x200 to 0xf00 in 0xf00, Istio's 0x539.
const DefaultMark uint32 = 0x4b560035

// Options configure a Configurator. The zero value suits a laptop.
type Options struct {
	// Mark is the SO_MARK of the resolver's own queries, which the table does not redirect. Default: DefaultMark.
	Mark uint32
	// Table names the nftables table; several Configurators on a machine need different ones.
	// Default: kubevpn-PID.
	Table string
	// StateDir is root's own directory for the journal. Default: /var/lib/kubevpn.
	StateDir string
	// ResolvConf is the file that names the machine's nameservers. Default: /etc/resolv.conf.
	ResolvConf string
	// ResolverDir, on macOS, is the directory of per-domain resolver files. Default: /etc/resolver.
	ResolverDir string
	// Bus is the D-Bus address of the system bus. Default: the usual one.
	Bus string
	// OnChange is called after a change of the machine changed what applies: resolv.conf names other nameservers, or
	// systemd-resolved started or stopped. Calls do not overlap. It must not call the Configurator.
	OnChange func(Applied)
	// Logger gets the decisions and their reasons. Default: nothing is logged.
	Logger *slog.Logger
}

func (o Options) withDefaults() Options {
	if o.Mark == 0 {
		o.Mark = DefaultMark
	}
	if o.Table == "" {
		o.Table = defaultTable()
	}
	if o.StateDir == "" {
		o.StateDir = "/var/lib/kubevpn"
	}
	if o.ResolvConf == "" {
		o.ResolvConf = "/etc/resolv.conf"
	}
	if o.ResolverDir == "" {
		o.ResolverDir = "/etc/resolver"
	}
	if o.OnChange == nil {
		o.OnChange = func(Applied) {}
	}
	if o.Logger == nil {
		o.Logger = slog.New(slog.DiscardHandler)
	}
	return o
}
