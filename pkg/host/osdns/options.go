package osdns

import (
	"cmp"
	"fmt"
	"log/slog"
	"os"
)

// Mark is the SO_MARK of the resolver's own queries, which the table does not redirect: "KV" and 53. It differs from
// the marks of other programs: Tailscale's 0x80000 and 0x40000 in 0xff0000, kube-proxy's 0x4000 and 0x8000, Cilium's
// 0x200 to 0xf00 in 0xf00, Istio's 0x539.
const Mark uint32 = 0x4b560035

// tablePrefix begins the name of every table of kubevpn.
const tablePrefix = "kubevpn-"

// Options configure a Configurator. The zero value suits a laptop.
type Options struct {
	// Table names the nftables table; several Configurators on a machine need different ones.
	// Default: kubevpn-PID.
	Table string
	// StateDir is root's own directory for the journal. Default: /var/lib/kubevpn.
	StateDir string
	// ResolvConf is the file that names the machine's nameservers. Default: /etc/resolv.conf.
	ResolvConf string
	// Bus is the D-Bus address of the system bus. Default: the usual one.
	Bus string
	// OnChange is called after a change of the machine changed what applies: resolv.conf names other nameservers, or
	// systemd-resolved started or stopped. Calls do not overlap. It must not call the Configurator.
	OnChange func(Applied)
	// Logger gets the decisions and their reasons. Default: nothing is logged.
	Logger *slog.Logger
}

func (o Options) withDefaults() Options {
	o.Table = cmp.Or(o.Table, fmt.Sprintf("%s%d", tablePrefix, os.Getpid()))
	o.StateDir = cmp.Or(o.StateDir, "/var/lib/kubevpn")
	o.ResolvConf = cmp.Or(o.ResolvConf, "/etc/resolv.conf")
	o.Logger = cmp.Or(o.Logger, slog.New(slog.DiscardHandler))
	if o.OnChange == nil {
		o.OnChange = func(Applied) {}
	}
	return o
}
