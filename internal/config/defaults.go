package config

import (
	"fmt"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/routable"
)

// DefaultsKey is the key of the client defaults in the ConfigMap of the cluster. The value has the format of the user's
// file.
const DefaultsKey = "config.yaml"

// The limits of client defaults, whose author the user need not know.
const (
	maxDefaults = 64 << 10 // bytes of the text
	maxValues   = 256      // of one setting
	maxValue    = 128      // bytes of one value, and of the name of a key
	maxWarnings = 10
)

// ApplyDefaults sets what the client defaults of a cluster set, unless the user has set it. data is the content of the
// ConfigMap, and source names it. ApplyDefaults never fails: it ignores what it cannot use, and returns warnings about
// that.
func (c *Config) ApplyDefaults(source string, data map[string]string) []string {
	d := defaults{config: c, source: source}
	for key := range data {
		if key != DefaultsKey {
			d.warn("%.*q: unknown key of the ConfigMap: only %s is used", maxValue, key, DefaultsKey)
		}
	}
	slices.Sort(d.warnings)
	d.apply(data[DefaultsKey])
	c.yieldDomains()
	if more := len(d.warnings) - maxWarnings; more > 0 {
		d.warnings = append(d.warnings[:maxWarnings], fmt.Sprintf("%s: and %d more problems", source, more))
	}
	return d.warnings
}

// defaults applies client defaults to config.
type defaults struct {
	config   *Config
	source   string
	warnings []string
}

func (d *defaults) warn(format string, args ...any) {
	text := api.CleanLine(fmt.Sprintf(format, args...))
	d.warnings = append(d.warnings, d.source+": "+text)
}

func (d *defaults) apply(text string) {
	if len(text) > maxDefaults {
		d.warn("%s is ignored: it has %d bytes, and may have %d", DefaultsKey, len(text), maxDefaults)
		return
	}
	entries, err := mapping([]byte(text))
	if err != nil {
		d.warn("%s is ignored: %.500s", DefaultsKey, DefaultsKey+err.Error())
		return
	}
	for _, e := range entries {
		if e.err != nil {
			d.warn("%v: ignored", e.err)
			continue
		}
		d.assign(e.setting, e.values)
	}
}

func (d *defaults) assign(s *setting, values []string) {
	switch _, set := d.config.origins[s.key]; {
	case !s.cluster:
		d.warn("%s is ignored: only users set it", s.key)
		return
	case len(values) > maxValues:
		d.warn("%s is ignored: it has %d values, and may have %d", s.key, len(values), maxValues)
		return
	case set, values == nil:
		return
	}
	usable := slices.DeleteFunc(slices.Clone(values), func(v string) bool { return d.rejects(s, v) })
	if len(usable) == 0 && len(values) > 0 {
		return
	}
	if err := d.config.assign(s, usable, origin{api.OriginCluster, d.source}); err != nil {
		d.warn("%s is ignored: %v", s.key, err)
	}
}

// rejects reports whether one value of a setting is unusable, and warns.
func (d *defaults) rejects(s *setting, value string) bool {
	if len(value) > maxValue {
		d.warn("%s: a value of %d bytes is ignored", s.key, len(value))
		return true
	}
	if err := s.set(new(Config), []string{value}); err != nil {
		d.warn("%s: ignored: %v", s.key, err)
		return true
	}
	if s.key != KeyExtraCIDRs && s.key != KeyExcludeCIDRs {
		return false
	}
	if p, err := prefix(value); err != nil || routable.Refuse(p) != "" {
		d.warn("%s: %s is ignored: %s", s.key, strings.TrimSpace(value), routable.Refuse(p))
		return true
	}
	return false
}
