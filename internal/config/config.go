// Package config resolves the settings of a user (config.go, file.go, defaults.go) and locates the files of kubevpn
// (paths.go). It also stores the key of the user (key.go) and the trusted clusters (trust.go). For each setting, a flag
// takes precedence over the environment, the environment over the user's file, the file over the client defaults of the
// cluster, and these over the built-in default.
package config

import (
	"fmt"
	"net/http"
	"net/netip"
	"slices"
	"strconv"
	"strings"

	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wire/sshjump"
)

// Config contains the settings of commands such as `connect`, `proxy` and `install`. Copies share slices and maps.
type Config struct {
	Image            string         // of the traffic manager; empty: not set
	ManagerNamespace string         // empty: "kubevpn" if the user has access to it, else the current namespace
	Scheduler        string         // one of Schedulers
	Netstack         string         // one of Netstacks
	Transport        string         // one of Transports
	Mode             string         // one of Modes
	ExtraCIDRs       []netip.Prefix // masked; routed into the tunnel in addition to the networks of the cluster
	ExcludeCIDRs     []netip.Prefix // masked; never routed into the tunnel
	ExtraDomains     []string       // in lower case, no dots at their ends; cluster DNS answers names under them
	ExcludeDomains   []string       // likewise; cluster DNS never does
	AllowInbound     []api.Inbound  // ports of this laptop that other laptops may connect to
	Yes              bool           // give consent to clusters without a question
	RequireMatch     MatchRule      // where an intercept must select requests
	SSHJump          sshjump.Hosts  // before the API server
	MetricsListen    string         // loopback address and port for /metrics; empty: none
	Objects          api.Objects    // what policies demand of the objects that kubevpn creates
	Redact           []string       // more headers whose values `kubevpn requests` does not show: see api.Secrets

	origins map[Key]origin // a key that it lacks has the built-in default
}

// origin says which layer set a setting, and in which words api.Setting.Source names it.
type origin struct {
	layer  api.Origin
	source string
}

// Default returns the configuration without any settings of the user.
func Default() Config {
	return Config{
		Image:     version.Image(),
		Scheduler: Schedulers()[0],
		Netstack:  Netstacks()[0],
		Transport: Transports()[0],
		Mode:      Modes()[0],
		origins:   map[Key]origin{},
	}
}

// Settings returns all settings, in a fixed order.
func (c *Config) Settings() []api.Setting {
	var out []api.Setting
	for _, s := range settings() {
		out = append(out, c.Setting(s.key))
	}
	return out
}

// Setting returns the setting of the key.
func (c *Config) Setting(key Key) api.Setting {
	out := api.Setting{Key: string(key), Origin: api.OriginDefault}
	if s, ok := find(key); ok {
		out.Value = s.text(c)
	}
	if o, ok := c.origins[key]; ok {
		out.Origin, out.Source = o.layer, o.source
	}
	return out
}

// ConnectionKeys returns the settings that a connection has from its beginning to its end, in a fixed order. The image
// and the SSH jump hosts are not among them: they also belong to what else a request does.
func ConnectionKeys() []Key {
	var out []Key
	for _, s := range settings() {
		if s.connection {
			out = append(out, s.key)
		}
	}
	return out
}

// ObjectKeys returns the settings of Config.Objects.
func ObjectKeys() []Key { return []Key{KeyLabels, KeyAnnotations, KeyResources} }

// Schedulers returns the algorithms that choose an endpoint of a Service, with their names in IPVS. The first is the
// default.
func Schedulers() []string { return []string{"rr", "lc", "sh", "random"} }

// Netstacks returns the values of the setting netstack. The first, the default, chooses one of the others.
func Netstacks() []string {
	return []string{api.NetstackAuto, api.NetstackGVisor, api.NetstackSystem}
}

// Transports returns the values of the setting transport. The first, the default, uses the best transport that works.
func Transports() []string {
	return []string{api.TransportAuto, api.TransportPortForward, api.TransportAPIProxy, api.TransportDirect}
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
	KeyExtraDomains     Key = "extraDomains"
	KeyExcludeDomains   Key = "excludeDomains"
	KeyAllowInbound     Key = "allowInbound"
	KeyYes              Key = "yes"
	KeyRequireMatch     Key = "requireMatch"
	KeySSHJump          Key = "sshJump"
	KeyRedact           Key = "redact"
	KeyMetricsListen    Key = "metricsListen"
	KeyLabels           Key = "labels"
	KeyAnnotations      Key = "annotations"
	KeyResources        Key = "resources"
)

// setting describes a Key: its flag, its environment variable, and how to set and print it.
type setting struct {
	key     Key
	flag    string // without "--"
	env     string
	list    bool // accepts several values, separated by commas in the environment
	cluster bool // the client defaults of the cluster may set it
	// a connection has it from its beginning to its end: another request cannot change it
	connection bool
	set        func(c *Config, values []string) error
	text       func(c *Config) string
}

func settings() []setting {
	return []setting{
		text(KeyImage, "image", "KUBEVPN_IMAGE", func(c *Config) *string { return &c.Image }),
		text(KeyManagerNamespace, "manager-namespace", "KUBEVPN_MANAGER_NAMESPACE",
			func(c *Config) *string { return &c.ManagerNamespace }).ofConnection(),
		choice(KeyScheduler, "scheduler", "KUBEVPN_SCHEDULER", Schedulers(),
			func(c *Config) *string { return &c.Scheduler }).ofConnection(),
		choice(KeyNetstack, "netstack", "KUBEVPN_NETSTACK", Netstacks(),
			func(c *Config) *string { return &c.Netstack }).ofConnection().fromCluster(),
		choice(KeyTransport, "transport", "KUBEVPN_TRANSPORT", Transports(),
			func(c *Config) *string { return &c.Transport }).ofConnection().fromCluster(),
		choice(KeyMode, "mode", "KUBEVPN_MODE", Modes(), func(c *Config) *string { return &c.Mode }).fromCluster(),
		list(KeyExtraCIDRs, "extra-cidr", "KUBEVPN_EXTRA_CIDRS", prefix,
			func(c *Config) *[]netip.Prefix { return &c.ExtraCIDRs }).ofConnection().fromCluster(),
		list(KeyExcludeCIDRs, "exclude-cidr", "KUBEVPN_EXCLUDE_CIDRS", prefix,
			func(c *Config) *[]netip.Prefix { return &c.ExcludeCIDRs }).ofConnection().fromCluster(),
		list(KeyExtraDomains, "extra-domain", "KUBEVPN_EXTRA_DOMAINS", extraDomain,
			func(c *Config) *[]string { return &c.ExtraDomains }).ofConnection().fromCluster(),
		list(KeyExcludeDomains, "exclude-domain", "KUBEVPN_EXCLUDE_DOMAINS", domain,
			func(c *Config) *[]string { return &c.ExcludeDomains }).ofConnection().fromCluster(),
		list(KeyAllowInbound, "allow-inbound", "KUBEVPN_ALLOW_INBOUND", inbound,
			func(c *Config) *[]api.Inbound { return &c.AllowInbound }).ofConnection(),
		{
			key: KeyYes, flag: "yes", env: "KUBEVPN_YES",
			set: func(c *Config, v []string) (err error) {
				if c.Yes, err = strconv.ParseBool(v[0]); err != nil {
					return fmt.Errorf("%q is invalid: must be true or false", v[0])
				}
				return nil
			},
			text: func(c *Config) string { return strconv.FormatBool(c.Yes) },
		},
		{
			key: KeyRequireMatch, flag: "require-match", env: "KUBEVPN_REQUIRE_MATCH", list: true, cluster: true,
			set: func(c *Config, v []string) (err error) {
				c.RequireMatch, err = parseMatchRule(v)
				return err
			},
			text: func(c *Config) string { return c.RequireMatch.String() },
		},
		{
			key: KeySSHJump, flag: "ssh-jump", env: "KUBEVPN_SSH_JUMP", list: true,
			set: func(c *Config, v []string) (err error) {
				c.SSHJump, err = sshjump.Parse(strings.Join(v, ","))
				return err
			},
			text: func(c *Config) string { return c.SSHJump.String() },
		},
		list(KeyRedact, "redact", "KUBEVPN_REDACT", headerName, func(c *Config) *[]string { return &c.Redact }),
		list(KeyLabels, "labels", "KUBEVPN_LABELS", label,
			func(c *Config) *[]string { return &c.Objects.Labels }).fromCluster(),
		list(KeyAnnotations, "annotations", "KUBEVPN_ANNOTATIONS", annotation,
			func(c *Config) *[]string { return &c.Objects.Annotations }).fromCluster(),
		list(KeyResources, "resources", "KUBEVPN_RESOURCES", quantity,
			func(c *Config) *[]string { return &c.Objects.Resources }).fromCluster(),
		{
			key: KeyMetricsListen, flag: "metrics-listen", env: "KUBEVPN_METRICS_LISTEN",
			set: func(c *Config, v []string) (err error) {
				c.MetricsListen, err = ParseMetricsListen(v[0])
				return err
			},
			text: func(c *Config) string { return c.MetricsListen },
		},
	}
}

// ParseMetricsListen returns the address and port for metrics in their usual form, or an error if the address is not a
// loopback address. Empty means none.
func ParseMetricsListen(s string) (string, error) {
	at, err := netip.ParseAddrPort(s)
	switch {
	case s == "":
		return "", nil
	case err != nil || at.Port() == 0:
		return "", fmt.Errorf("%q is not IP:PORT, such as 127.0.0.1:9464", s)
	case !at.Addr().IsLoopback():
		return "", fmt.Errorf("%s is not a loopback address: other machines could read the metrics", at.Addr())
	}
	return at.String(), nil
}

func label(s string) (string, error) {
	_, value, _ := strings.Cut(s, "=")
	if errs := validation.IsValidLabelValue(value); len(errs) > 0 {
		return "", fmt.Errorf("%q: %s", s, errs[0])
	}
	return annotation(s)
}

func annotation(s string) (string, error) {
	name, _, found := strings.Cut(s, "=")
	if errs := validation.IsQualifiedName(name); !found || len(errs) > 0 {
		return "", fmt.Errorf("%q is not NAME=VALUE", s)
	}
	return s, nil
}

// quantity parses requests.NAME=QUANTITY or limits.NAME=QUANTITY.
func quantity(s string) (string, error) {
	name, value, _ := strings.Cut(s, "=")
	kind, name, _ := strings.Cut(name, ".")
	if _, err := resource.ParseQuantity(value); err != nil || name == "" || kind != "requests" && kind != "limits" {
		return "", fmt.Errorf("%q is not requests.NAME=QUANTITY or limits.NAME=QUANTITY", s)
	}
	return s, nil
}

// headerName parses the name of a header. "none" is valid: see api.ShowAll.
func headerName(s string) (string, error) {
	if _, err := httpmatch.New(httpmatch.Spec{Headers: []httpmatch.Header{{Name: s, Value: "x"}}}); err != nil {
		return "", fmt.Errorf("%q is not the name of a header", s)
	}
	return http.CanonicalHeaderKey(s), nil
}

func (s setting) fromCluster() setting {
	s.cluster = true
	return s
}

func (s setting) ofConnection() setting {
	s.connection = true
	return s
}

// text returns a setting with any value.
func text(key Key, flag, env string, field func(*Config) *string) setting {
	return setting{
		key: key, flag: flag, env: env,
		set: func(c *Config, v []string) error {
			*field(c) = v[0]
			return nil
		},
		text: func(c *Config) string { return *field(c) },
	}
}

// choice returns a setting whose value is one of allowed.
func choice(key Key, flag, env string, allowed []string, field func(*Config) *string) setting {
	s := text(key, flag, env, field)
	s.set = func(c *Config, v []string) error {
		if !slices.Contains(allowed, v[0]) {
			return fmt.Errorf("%q is invalid: must be one of %s", v[0], strings.Join(allowed, ", "))
		}
		*field(c) = v[0]
		return nil
	}
	return s
}

// list returns a setting with several values.
func list[T any](key Key, flag, env string, parse func(string) (T, error),
	field func(*Config) *[]T) setting {
	return setting{
		key: key, flag: flag, env: env, list: true,
		set: func(c *Config, values []string) error {
			out := make([]T, len(values))
			for i, v := range values {
				var err error
				if out[i], err = parse(v); err != nil {
					return err
				}
			}
			*field(c) = out
			return nil
		},
		text: func(c *Config) string {
			var all []string
			for _, v := range *field(c) {
				all = append(all, fmt.Sprint(v))
			}
			return strings.Join(all, ",")
		},
	}
}

// assign sets a setting and its origin.
func (c *Config) assign(s setting, values []string, o origin) error {
	if err := s.set(c, values); err != nil {
		return err
	}
	c.origins[s.key] = o
	return nil
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
	if err := c.assign(s, values, origin{api.OriginFlag, "--" + s.flag}); err != nil {
		return api.Errorf(api.ExitUsage, "--%s: %w", s.flag, err)
	}
	return nil
}

func inbound(s string) (i api.Inbound, err error) { return i, i.UnmarshalText([]byte(s)) }

// prefix parses a CIDR or a single address.
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
