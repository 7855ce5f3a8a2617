// Package config reads the settings of a user (config.go, file.go) and locates the files of kubevpn (paths.go). It also
// stores the key of the user (key.go) and the trusted clusters (trust.go). For each setting, a flag takes precedence
// over the environment, the environment over the file, and the file over the default.
package config

import (
	"fmt"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
)

// Config contains the settings of commands such as `connect`, `proxy` and `install`. Copies share the slices.
type Config struct {
	Image            string         // of the traffic manager; empty: not set
	ManagerNamespace string         // empty: "kubevpn" if the user has access to it, else the current namespace
	Scheduler        string         // one of Schedulers
	Netstack         string         // one of Netstacks
	Transport        string         // one of Transports
	Mode             string         // one of Modes
	ExtraCIDRs       []netip.Prefix // masked; routed into the tunnel in addition to the networks of the cluster
	ExcludeCIDRs     []netip.Prefix // masked; never routed into the tunnel
	AllowInbound     []api.Inbound  // ports of this laptop that other laptops may connect to
	Yes              bool           // give consent to clusters without a question
}

// Default returns the configuration without any settings of the user.
func Default() Config {
	return Config{
		Image:     version.Image(),
		Scheduler: Schedulers()[0],
		Netstack:  Netstacks()[0],
		Transport: Transports()[0],
		Mode:      Modes()[0],
	}
}

// Schedulers returns the algorithms that choose an endpoint of a Service, with their names in IPVS. The first is the
// default.
func Schedulers() []string { return []string{"rr", "lc", "sh", "random"} }

// Netstacks returns the values of the setting netstack. The first, the default, chooses one of the others.
func Netstacks() []string {
	return []string{api.NetstackAuto, api.NetstackGVisor, api.NetstackSystem}
}

// Transports returns the values of the setting transport. The first, the default, uses the best transport that works.
func Transports() []string {
	return []string{api.TransportAuto, api.TransportPortForward, api.TransportAPIProxy}
}

// Modes returns the ways to add a traffic agent to pods. The first, the default, chooses one of the others.
func Modes() []string { return []string{api.ModeAuto, api.ModeEphemeral, api.ModeSidecar} }

// Key is the name of a setting in the file. FlagName returns the name of its flag.
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
	KeyAllowInbound     Key = "allowInbound"
	KeyYes              Key = "yes"
)

// setting describes a Key: its flag, its environment variable, and how to set it.
type setting struct {
	key  Key
	flag string // without "--"
	env  string
	list bool // accepts several values, separated by commas in the environment
	set  func(c *Config, values []string) error
}

func settings() []setting {
	return []setting{
		{KeyImage, "image", "KUBEVPN_IMAGE", false, func(c *Config, v []string) error {
			c.Image = v[0]
			return nil
		}},
		{KeyManagerNamespace, "manager-namespace", "KUBEVPN_MANAGER_NAMESPACE", false,
			func(c *Config, v []string) error {
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
		{KeyAllowInbound, "allow-inbound", "KUBEVPN_ALLOW_INBOUND", true, func(c *Config, v []string) error {
			return inbound(&c.AllowInbound, v)
		}},
		{KeyYes, "yes", "KUBEVPN_YES", false, func(c *Config, v []string) (err error) {
			if c.Yes, err = strconv.ParseBool(v[0]); err != nil {
				return fmt.Errorf("%q is invalid: must be true or false", v[0])
			}
			return nil
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

// FlagName returns the name of the flag that sets k, without dashes.
func (k Key) FlagName() string {
	s, _ := find(k)
	return s.flag
}

// SetFlag sets key to the values of its flag on the command line. If a value is invalid, it returns an *api.Error that
// names the flag.
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

// choose sets dst to value if value is in allowed.
func choose(dst *string, value string, allowed []string) error {
	if !slices.Contains(allowed, value) {
		return fmt.Errorf("%q is invalid: must be one of %s", value, strings.Join(allowed, ", "))
	}
	*dst = value
	return nil
}

// prefixes sets dst to the networks in values: CIDRs or single addresses.
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

// inbound sets dst to the ports in values.
func inbound(dst *[]api.Inbound, values []string) error {
	out := make([]api.Inbound, len(values))
	for i, v := range values {
		if err := out[i].UnmarshalText([]byte(v)); err != nil {
			return err
		}
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
		return netip.Prefix{}, fmt.Errorf("%q is not a network; write it like 10.20.0.0/16", s)
	case p.Addr().Is4In6():
		return netip.Prefix{}, fmt.Errorf("%q is an IPv4 network in IPv6 form; write it like 10.20.0.0/16", s)
	case p.Bits() == 0:
		return netip.Prefix{}, fmt.Errorf("%q is the whole Internet", s)
	}
	return p.Masked(), nil
}
