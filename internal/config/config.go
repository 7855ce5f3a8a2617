// Package config holds what a user may settle beforehand (config.go, file.go) and where kubevpn keeps its
// files (paths.go). For each setting a flag beats the environment, which beats the file, which beats the
// default. Nothing is read on import: commands call Load and Locate.
package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
)

// ImageRepository is where the default image of the traffic manager is pulled from. There is no public
// build of it yet: until there is, clusters need --image, or an image loaded into their nodes.
const ImageRepository = "docker.io/kubevpn/kubevpn"

// Config is what `connect`, `proxy` and `install` do where no flag says otherwise. It is a plain value: copy it freely.
type Config struct {
	Image            string         // of the traffic manager
	ManagerNamespace string         // empty: "kubevpn" where it may be used, else the current namespace
	Scheduler        string         // one of Schedulers
	Netstack         string         // one of Netstacks
	Transport        string         // one of Transports
	Mode             string         // one of Modes
	ExtraCIDRs       []netip.Prefix // masked; routed into the tunnel besides what was found
	ExcludeCIDRs     []netip.Prefix // masked; never routed into the tunnel
}

// Default is the configuration where nothing is settled.
func Default() Config {
	return Config{
		Image:     ImageRepository + ":" + version.String(),
		Scheduler: Schedulers()[0],
		Netstack:  Netstacks()[0],
		Transport: Transports()[0],
		Mode:      Modes()[0],
	}
}

// Schedulers are the ways to choose an endpoint of a Service, by IPVS's names; the first is the default.
func Schedulers() []string { return []string{"rr", "lc", "sh", "random"} }

// Netstacks are the ways to carry packets into the cluster; the first, which chooses between the others, is the default.
func Netstacks() []string {
	return []string{api.NetstackAuto, api.NetstackGVisor, api.NetstackSystem}
}

// Transports are the ways to the traffic manager; the first, which takes the best that works, is the default.
func Transports() []string {
	return []string{api.TransportAuto, api.TransportPortForward, api.TransportAPIProxy}
}

// Modes are the ways of a traffic agent into pods; the first, which chooses between the others, is the default.
func Modes() []string { return []string{api.ModeAuto, api.ModeEphemeral, api.ModeSidecar} }

// Key is a setting's name in the file; FlagName gives that of its flag.
type Key string

// The settings.
const (
	KeyImage            Key = "image"
	KeyManagerNamespace Key = "managerNamespace"
	KeyScheduler        Key = "scheduler"
	KeyNetstack         Key = "netstack"
	KeyTransport        Key = "transport"
	KeyMode             Key = "mode"
	KeyExtraCIDRs       Key = "extraCIDRs"
	KeyExcludeCIDRs     Key = "excludeCIDRs"
)

// setting is everything that is to know about a Key.
type setting struct {
	key  Key
	flag string // "--" is not part of it
	env  string
	list bool // takes several values; comma-separated in the environment
	set  func(c *Config, values []string) error
}

func settings() []setting {
	return []setting{
		{KeyImage, "image", "KUBEVPN_IMAGE", false, func(c *Config, v []string) error {
			c.Image = v[0]
			return nil
		}},
		{KeyManagerNamespace, "manager-namespace", "KUBEVPN_MANAGER_NAMESPACE", false, func(c *Config, v []string) error {
			c.ManagerNamespace = v[0]
			return nil
		}},
		{KeyScheduler, "scheduler", "KUBEVPN_SCHEDULER", false, func(c *Config, v []string) error {
			return choose(&c.Scheduler, v[0], Schedulers())
		}},
		{KeyNetstack, "netstack", "KUBEVPN_NETSTACK", false, func(c *Config, v []string) error {
			return choose(&c.Netstack, v[0], Netstacks())
		}},
		{KeyTransport, "transport", "KUBEVPN_TRANSPORT", false, func(c *Config, v []string) error {
			return choose(&c.Transport, v[0], Transports())
		}},
		{KeyMode, "mode", "KUBEVPN_MODE", false, func(c *Config, v []string) error {
			return choose(&c.Mode, v[0], Modes())
		}},
		{KeyExtraCIDRs, "extra-cidr", "KUBEVPN_EXTRA_CIDRS", true, func(c *Config, v []string) error {
			return prefixes(&c.ExtraCIDRs, v)
		}},
		{KeyExcludeCIDRs, "exclude-cidr", "KUBEVPN_EXCLUDE_CIDRS", true, func(c *Config, v []string) error {
			return prefixes(&c.ExcludeCIDRs, v)
		}},
	}
}

func find(key Key) (setting, bool) {
	all := settings()
	i := slices.IndexFunc(all, func(s setting) bool { return s.key == key })
	if i < 0 {
		return setting{}, false
	}
	return all[i], true
}

// FlagName is the flag that sets k, without its dashes.
func (k Key) FlagName() string {
	s, _ := find(k)
	return s.flag
}

// SetFlag gives key the values that its flag had on the command line. The error is an *api.Error that names
// the flag.
func (c *Config) SetFlag(key Key, values []string) error {
	s, ok := find(key)
	if !ok {
		return fmt.Errorf("no setting is called %q", key)
	}
	if err := s.set(c, values); err != nil {
		return api.Errorf(api.ExitUsage, "--%s: %w", s.flag, err)
	}
	return nil
}

// choose sets dst to value if it is among those allowed.
func choose(dst *string, value string, allowed []string) error {
	if !slices.Contains(allowed, value) {
		if len(allowed) == 1 {
			return fmt.Errorf("%q does not exist: there is %s", value, allowed[0])
		}
		return fmt.Errorf("%q does not exist: there are %s", value, strings.Join(allowed, ", "))
	}
	*dst = value
	return nil
}

// prefixes sets dst to the networks that values name: CIDRs, or single addresses.
func prefixes(dst *[]netip.Prefix, values []string) error {
	out := make([]netip.Prefix, 0, len(values))
	for _, v := range values {
		p, err := prefix(v)
		if err != nil {
			return err
		}
		out = append(out, p)
	}
	*dst = out
	return nil
}

func prefix(s string) (netip.Prefix, error) {
	if addr, err := netip.ParseAddr(s); err == nil && addr.Zone() == "" {
		addr = addr.Unmap()
		return netip.PrefixFrom(addr, addr.BitLen()), nil
	}
	p, err := netip.ParsePrefix(s)
	switch {
	case err != nil:
		return netip.Prefix{}, fmt.Errorf("%q is not a network: write it like 10.20.0.0/16", s)
	case p.Addr().Is4In6():
		return netip.Prefix{}, fmt.Errorf("%q is an IPv4 network in IPv6 form: write it like 10.20.0.0/16", s)
	case p.Bits() == 0:
		return netip.Prefix{}, fmt.Errorf("%q is the whole Internet", s)
	}
	return p.Masked(), nil
}
