// Package config resolves the settings of a user (config.go, file.go, defaults.go) and locates the files of kubevpn
// (paths.go). It also stores the key of the user (key.go) and the trusted clusters (trust.go). For each setting, a flag
// takes precedence over the environment, the environment over the user's file, the file over the client defaults of the
// cluster, and these over the built-in default.
package config

import (
	"cmp"
	"fmt"
	"net/http"
	"net/netip"
	"regexp"
	"slices"
	"strconv"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"
	"k8s.io/apimachinery/pkg/util/validation"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/datapath/routable"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wire/sshjump"
)

// Config contains the settings of commands such as `connect`, `proxy` and `install`. Copies share slices and maps.
type Config struct {
	api.ConnectSettings
	Mode          string        // ModeAuto, ModeEphemeral or ModeSidecar of package api
	Yes           bool          // give consent to clusters without a question
	RequireMatch  MatchRule     // where an intercept must select requests
	SSHJump       sshjump.Hosts // before the API server
	MetricsListen string        // loopback address and port for /metrics; empty: none
	Redact        []string      // more headers whose values `kubevpn requests` does not show: see api.Secrets

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
		ConnectSettings: api.ConnectSettings{
			Image:     version.Image(),
			Scheduler: "rr",
			Netstack:  api.NetstackAuto,
			Transport: api.TransportAuto,
		},
		Mode:    api.ModeAuto,
		origins: map[Key]origin{},
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
	if s := find(key); s != nil {
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

// Key is the name of a setting in the file.
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
	KeyMap              Key = "map"
	KeyNoMap            Key = "noMap"
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
	flag    string   // without "--"
	usage   string   // of the flag
	env     string   // KUBEVPN_ and the key: KUBEVPN_EXTRA_CIDRS for extraCIDRs
	choices []string // the valid values, if not nil; the first is the default
	list    bool     // accepts several values, separated by commas in the environment
	cluster bool     // the client defaults of the cluster may set it
	// a connection has it from its beginning to its end: another request cannot change it
	connection bool
	set        func(c *Config, values []string) error
	text       func(c *Config) string
}

func settings() []setting {
	return []setting{
		value(KeyImage, "image", "image of the traffic manager, if this command installs it", anything,
			func(c *Config) *string { return &c.Image }),
		value(KeyManagerNamespace, "manager-namespace",
			"namespace of the traffic manager (default: \"kubevpn\", else the current namespace)", anything,
			func(c *Config) *string { return &c.ManagerNamespace }).ofConnection(),
		choice(KeyScheduler, "scheduler", "how the traffic manager chooses an endpoint of a Service",
			[]string{"rr", "lc", "sh", "random"}, // their names in IPVS
			func(c *Config) *string { return &c.Scheduler }).ofConnection(),
		choice(KeyNetstack, "netstack", "how packets reach the cluster",
			[]string{api.NetstackAuto, api.NetstackGVisor, api.NetstackSystem},
			func(c *Config) *string { return &c.Netstack }).ofConnection().fromCluster(),
		choice(KeyTransport, "transport", "transport to the traffic manager",
			[]string{api.TransportAuto, api.TransportPortForward, api.TransportAPIProxy, api.TransportDirect},
			func(c *Config) *string { return &c.Transport }).ofConnection().fromCluster(),
		choice(KeyMode, "mode", "how the traffic agent is added to the pods",
			[]string{api.ModeAuto, api.ModeEphemeral, api.ModeSidecar},
			func(c *Config) *string { return &c.Mode }).fromCluster(),
		list(KeyExtraCIDRs, "extra-cidr", "additional network to route into the cluster", prefix,
			func(c *Config) *[]netip.Prefix { return &c.ExtraCIDRs }).ofConnection().fromCluster(),
		list(KeyExcludeCIDRs, "exclude-cidr", "network that is not routed into the cluster", prefix,
			func(c *Config) *[]netip.Prefix { return &c.ExcludeCIDRs }).ofConnection().fromCluster(),
		list(KeyMap, "map", "network of the cluster that programs of this machine reach at other addresses, "+
			"CLUSTER=LOCAL, of the same size", networkMapping,
			func(c *Config) *[]packet.Mapping { return &c.Map }).ofConnection(),
		value(KeyNoMap, "no-map", "fail if a network of the cluster overlaps a local one, instead of mapping it",
			yesOrNo,
			func(c *Config) *bool { return &c.NoMap }).ofConnection(),
		list(KeyExtraDomains, "extra-domain",
			"domain whose names cluster DNS answers and whose addresses are routed into the cluster", extraDomain,
			func(c *Config) *[]string { return &c.ExtraDomains }).ofConnection().fromCluster(),
		list(KeyExcludeDomains, "exclude-domain", "domain whose names cluster DNS never answers", domain,
			func(c *Config) *[]string { return &c.ExcludeDomains }).ofConnection().fromCluster(),
		list(KeyAllowInbound, "allow-inbound",
			"port of this machine that other laptops may connect to: 8080, 8080/udp or all", inbound,
			func(c *Config) *[]api.Inbound { return &c.AllowInbound }).ofConnection(),
		value(KeyYes, "yes",
			"give your consent without a question, for example to a traffic manager that another user installed",
			yesOrNo, func(c *Config) *bool { return &c.Yes }),
		values(KeyRequireMatch, "require-match", "reject an intercept without a match, such as --headers: "+
			"true, false, NAMESPACE or NAMESPACE=false", parseMatchRule,
			func(c *Config) *MatchRule { return &c.RequireMatch }).fromCluster(),
		values(KeySSHJump, "ssh-jump", "SSH jump host before the API server, [USER@]HOST[:PORT]",
			func(v []string) (sshjump.Hosts, error) { return sshjump.Parse(strings.Join(v, ",")) },
			func(c *Config) *sshjump.Hosts { return &c.SSHJump }),
		list(KeyRedact, "redact",
			"header whose values kubevpn hides, in addition to secrets that it recognizes; none: hide nothing",
			headerName, func(c *Config) *[]string { return &c.Redact }),
		list(KeyLabels, "labels", "label NAME=VALUE of the objects that kubevpn creates, if a policy demands it",
			label, func(c *Config) *[]string { return &c.Objects.Labels }).fromCluster(),
		list(KeyAnnotations, "annotations", "annotation NAME=VALUE of the objects that kubevpn creates", annotation,
			func(c *Config) *[]string { return &c.Objects.Annotations }).fromCluster(),
		list(KeyResources, "resources", "limits.NAME=QUANTITY or requests.NAME=QUANTITY of the traffic manager, if "+
			"this command installs it, and of agents in sidecar mode, such as limits.cpu=500m", quantity,
			func(c *Config) *[]string { return &c.Objects.Resources }).fromCluster(),
		value(KeyMetricsListen, "metrics-listen",
			"loopback address and port at which the daemon serves /metrics, for Prometheus, until 'kubevpn quit'",
			metricsListen, func(c *Config) *string { return &c.MetricsListen }),
	}
}

// ParseLoopback parses an address and a port of this machine. what names what other machines could read at another
// address.
func ParseLoopback(s, what string) (netip.AddrPort, error) {
	at, err := netip.ParseAddrPort(s)
	switch {
	case err != nil:
		return at, fmt.Errorf("%q is not IP:PORT", s)
	case !at.Addr().IsLoopback():
		return at, fmt.Errorf("%s is not a loopback address: other machines could read %s", at.Addr(), what)
	}
	return at, nil
}

// metricsListen parses the address and port for metrics. Empty means none.
func metricsListen(s string) (string, error) {
	if s == "" {
		return "", nil
	}
	at, err := ParseLoopback(s, "the metrics")
	if err != nil || at.Port() == 0 {
		return "", cmp.Or(err, fmt.Errorf("%q is not IP:PORT, such as 127.0.0.1:9464", s))
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
	if _, err := httpmatch.New(httpmatch.Spec{Headers: []httpmatch.Named{{Name: s, Value: "x"}}}); err != nil {
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

// value returns a setting with one value.
func value[T any](key Key, flag, usage string, parse func(string) (T, error), field func(*Config) *T) setting {
	s := values(key, flag, usage, func(v []string) (T, error) { return parse(v[0]) }, field)
	s.list = false
	return s
}

// choice returns a setting whose value is one of allowed.
func choice(key Key, flag, usage string, allowed []string, field func(*Config) *string) setting {
	s := value(key, flag, usage+": "+strings.Join(allowed, ", "), func(v string) (string, error) {
		if !slices.Contains(allowed, v) {
			return "", fmt.Errorf("%q is invalid: must be one of %s", v, strings.Join(allowed, ", "))
		}
		return v, nil
	}, field)
	s.choices = allowed
	return s
}

// list returns a setting with several values, each of which parse parses.
func list[T any](key Key, flag, usage string, parse func(string) (T, error), field func(*Config) *[]T) setting {
	s := values(key, flag, usage, func(values []string) ([]T, error) {
		out := make([]T, len(values))
		for i, v := range values {
			var err error
			if out[i], err = parse(v); err != nil {
				return nil, err
			}
		}
		return out, nil
	}, field)
	s.text = func(c *Config) string {
		return strings.Join(api.Texts(*field(c), func(v T) string { return fmt.Sprint(v) }), ",")
	}
	return s
}

// values returns a setting with several values, which parse parses together.
func values[T any](key Key, flag, usage string, parse func([]string) (T, error), field func(*Config) *T) setting {
	return setting{
		key: key, flag: flag, usage: usage, list: true,
		env: "KUBEVPN_" + strings.ToUpper(words.ReplaceAllString(string(key), "${1}_${2}")),
		set: func(c *Config, values []string) error {
			v, err := parse(values)
			if err == nil {
				*field(c) = v
			}
			return err
		},
		text: func(c *Config) string { return fmt.Sprint(*field(c)) },
	}
}

// words matches where a word of a key begins.
var words = regexp.MustCompile("([a-z])([A-Z])")

// assign sets a setting and its origin.
func (c *Config) assign(s *setting, values []string, o origin) error {
	if err := s.set(c, values); err != nil {
		return err
	}
	c.origins[s.key] = o
	return nil
}

// find returns the setting of a key, or nil.
func find(key Key) *setting {
	return api.Find(settings(), func(s setting) bool { return s.key == key })
}

// FlagName returns the name of the flag that sets k, without dashes.
func (k Key) FlagName() string {
	return find(k).flag
}

// flagAnnotation is the annotation of the flags that AddFlags defines. It has the Key.
const flagAnnotation = "kubevpn_setting"

// AddFlags defines the flags of settings, with their completion.
func AddFlags(cmd *cobra.Command, keys ...Key) {
	flags, defaults := cmd.Flags(), Default()
	for _, key := range keys {
		s := find(key)
		switch {
		case s.list:
			flags.StringSlice(s.flag, nil, s.usage+"; may be repeated")
		case key == KeyYes:
			flags.BoolP(s.flag, "y", false, s.usage)
		case key == KeyNoMap:
			flags.Bool(s.flag, false, s.usage)
		default:
			flags.String(s.flag, s.text(&defaults), s.usage)
		}
		flag := flags.Lookup(s.flag)
		flag.Annotations = map[string][]string{flagAnnotation: {string(key)}}
		if key == KeyRequireMatch {
			flag.NoOptDefVal = "true"
		}
		if s.choices != nil {
			_ = cmd.RegisterFlagCompletionFunc(s.flag, // the flag exists
				cobra.FixedCompletions(s.choices, cobra.ShellCompDirectiveNoFileComp))
		}
	}
}

// ApplyFlags sets the settings whose flags are set on the command line. If a value is invalid, it returns an *api.Error
// that names the flag.
func (c *Config) ApplyFlags(flags *pflag.FlagSet) (err error) {
	flags.Visit(func(f *pflag.Flag) {
		key := f.Annotations[flagAnnotation]
		if key == nil || err != nil {
			return
		}
		values := []string{f.Value.String()}
		if list, ok := f.Value.(pflag.SliceValue); ok {
			values = list.GetSlice()
		}
		s := find(Key(key[0]))
		if invalid := c.assign(s, values, origin{api.OriginFlag, "--" + f.Name}); invalid != nil {
			err = api.Errorf(api.ExitUsage, "--%s: %w", f.Name, invalid)
		}
	})
	return err
}

func anything(s string) (string, error) { return s, nil }

func yesOrNo(s string) (bool, error) {
	yes, err := strconv.ParseBool(s)
	if err != nil {
		return false, fmt.Errorf("%q is invalid: must be true or false", s)
	}
	return yes, nil
}

// networkMapping parses CLUSTER=LOCAL.
func networkMapping(s string) (m packet.Mapping, err error) {
	cluster, local, found := strings.Cut(s, "=")
	if !found {
		return m, fmt.Errorf("%q is not CLUSTER=LOCAL; write it like 10.20.0.0/16=198.18.0.0/16", s)
	}
	if m.Cluster, err = prefix(cluster); err != nil {
		return m, err
	}
	if m.Local, err = prefix(local); err != nil {
		return m, err
	}
	if m.Cluster.Bits() != m.Local.Bits() || m.Cluster.Addr().Is4() != m.Local.Addr().Is4() {
		return m, fmt.Errorf("%v and %v are not of the same size", m.Cluster, m.Local)
	}
	if !routable.Space().ContainsPrefix(m.Local) {
		return m, fmt.Errorf("%v is outside of private address space", m.Local)
	}
	return m, nil
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
