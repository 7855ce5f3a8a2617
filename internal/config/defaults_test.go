package config

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
)

const configMap = "ConfigMap kubevpn/kubevpn-client-defaults"

// load returns the settings of a file and an environment.
func load(t *testing.T, file string, env map[string]string) Config {
	t.Helper()
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, file)
	c, err := Load(path, func(name string) (string, bool) { v, ok := env[name]; return v, ok })
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestFlagThenEnvironmentThenFileThenClusterThenDefault(t *testing.T) {
	const cluster = "netstack: gvisor\nextraCIDRs: [10.1.0.0/16]\nmode: sidecar\ntransport: api-proxy\nrequireMatch: true\n"
	tests := []struct {
		name       string
		file       string
		env        map[string]string
		flag       string // of netstack
		value      string
		origin     api.Origin
		sourceEnds string
	}{
		{name: "cluster", value: "gvisor", origin: api.OriginCluster, sourceEnds: configMap},
		{name: "file", file: "netstack: system\n", value: "system", origin: api.OriginFile, sourceEnds: "config.yaml"},
		{name: "file-with-the-default", file: "netstack: auto\n", value: "auto", origin: api.OriginFile, sourceEnds: "config.yaml"},
		{name: "environment", file: "netstack: system\n", env: map[string]string{"KUBEVPN_NETSTACK": "auto"},
			value: "auto", origin: api.OriginEnvironment, sourceEnds: "KUBEVPN_NETSTACK"},
		{name: "flag", file: "netstack: gvisor\n", env: map[string]string{"KUBEVPN_NETSTACK": "auto"}, flag: "system",
			value: "system", origin: api.OriginFlag, sourceEnds: "--netstack"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := load(t, tt.file, tt.env)
			if tt.flag != "" {
				if err := applyFlags(&c, "--netstack="+tt.flag); err != nil {
					t.Fatal(err)
				}
			}
			if warnings := c.ApplyDefaults(configMap, map[string]string{DefaultsKey: cluster}); len(warnings) > 0 {
				t.Error(warnings)
			}
			got := c.Setting(KeyNetstack)
			if got.Value != tt.value || got.Origin != tt.origin || !strings.HasSuffix(got.Source, tt.sourceEnds) || c.Netstack != tt.value {
				t.Errorf("netstack is %+v (%s), want %+v", got, c.Netstack, tt)
			}
			if got := c.Setting(KeyExtraCIDRs); got.Value != "10.1.0.0/16" || got.Origin != api.OriginCluster {
				t.Errorf("extraCIDRs is %+v", got)
			}
			if got := c.Setting(KeyScheduler); got != (api.Setting{Key: "scheduler", Value: "rr", Origin: api.OriginDefault}) {
				t.Errorf("scheduler is %+v", got)
			}
		})
	}
}

func TestEmptyListOfTheUserReplacesTheCluster(t *testing.T) {
	c := load(t, "extraCIDRs: []\n", nil)
	c.ApplyDefaults(configMap, map[string]string{DefaultsKey: "extraCIDRs: [10.1.0.0/16]\n"})
	if got := c.Setting(KeyExtraCIDRs); got.Value != "" || got.Origin != api.OriginFile {
		t.Errorf("extraCIDRs is %+v", got)
	}
}

// row matches a row of the table of settings: flag, environment, key, and whether the cluster may set it.
var row = regexp.MustCompile("(?m)^\\| .*`--([a-z-]+).*?\\| `(KUBEVPN_[A-Z_]+)` \\| `([A-Za-z]+)` \\| (no|yes|after you allow it) \\|")

func TestSettingsAreThoseOfTheDocumentation(t *testing.T) {
	text, err := os.ReadFile("../../docs/connect.md")
	if err != nil {
		t.Fatal(err)
	}
	var documented, have []string
	for _, m := range row.FindAllStringSubmatch(string(text), -1) {
		documented = append(documented, fmt.Sprint(m[1:4], m[4] != "no"))
	}
	for _, s := range settings() {
		have = append(have, fmt.Sprint([]string{s.flag, s.env, string(s.key)}, s.cluster))
	}
	if d := cmp.Diff(have, documented); d != "" {
		t.Errorf("the table of docs/connect.md (-settings +documented):\n%s", d)
	}
}

func TestDefaultsThatCannotBeUsedAreWarnings(t *testing.T) {
	tests := []struct {
		name string
		text string
		want []string // parts of the warnings
		keep map[Key]string
	}{
		{name: "nothing"},
		{name: "comment", text: "# later\n"},
		{name: "unknown-key", text: "netstak: gvisor\nmode: sidecar\n", want: []string{`unknown key "netstak": ignored`},
			keep: map[Key]string{KeyMode: "sidecar"}},
		{name: "settings-of-users", text: "image: evil\nyes: true\nallowInbound: all\nmanagerNamespace: x\nscheduler: lc\n",
			want: []string{"image is ignored: only users set it", "yes is", "allowInbound is", "managerNamespace is", "scheduler is"}},
		{name: "bad-value", text: "netstack: kernel\nmode: sidecar\n", want: []string{`netstack: ignored: "kernel" is invalid: must be one of`},
			keep: map[Key]string{KeyMode: "sidecar"}},
		{name: "one-bad-network", text: "extraCIDRs: [10.1.0.0/16, 10.0.0.0/33, 192.0.2.7]\n", want: []string{`extraCIDRs: ignored: "10.0.0.0/33" is not a network`},
			keep: map[Key]string{KeyExtraCIDRs: "10.1.0.0/16,192.0.2.7/32"}},
		{name: "networks-that-are-never-routed", text: "extraCIDRs: [0.0.0.0/1, '::/0', 127.0.0.0/8, 169.254.0.0/16, 224.0.0.0/4]\n",
			want: []string{"0.0.0.0/1 is ignored: it is too wide", "whole Internet", "loopback", "link-local", "too wide"}},
		{name: "excluded-networks", text: "excludeCIDRs: [10.2.0.0/16, 0.0.0.0/1]\n", want: []string{"excludeCIDRs: 0.0.0.0/1 is ignored: it is too wide"},
			keep: map[Key]string{KeyExcludeCIDRs: "10.2.0.0/16"}},
		{name: "set-twice", text: "mode: sidecar\nmode: auto\n", want: []string{"mode is already set on line 1: ignored"}, keep: map[Key]string{KeyMode: "sidecar"}},
		{name: "not-yaml", text: "mode: [\n", want: []string{"config.yaml is ignored: config.yaml: yaml: line"}},
		{name: "no-mapping", text: "- mode\n", want: []string{"config.yaml is ignored: config.yaml:1: expected"}},
		{name: "map-for-a-list", text: "extraCIDRs: {a: b}\n", want: []string{"extraCIDRs: must be a list: ignored"}},
		{name: "list-for-a-value", text: "mode: [auto]\n", want: []string{"mode: must be a single value: ignored"}},
		{name: "long-value", text: "mode: " + strings.Repeat("x", 1000), want: []string{"mode: a value of 1000 bytes is ignored"}},
		{name: "many-values", text: "extraCIDRs: [" + strings.Repeat("10.1.0.0/16,", 300) + "]\n", want: []string{"extraCIDRs is ignored: it has 300 values, and may have 256"}},
		{name: "long-text", text: strings.Repeat("#", 65<<10), want: []string{"config.yaml is ignored: it has 66560 bytes"}},
		{name: "many-problems", text: strings.Repeat("a: b\n", 30),
			want: append(slices.Repeat([]string{`"a"`}, 10), "and 20 more problems")},
		{name: "escape-sequences", text: "\"\\e[2J\\u202e\": x\n", want: []string{`unknown key "\x1b[2J\u202e": ignored`}},
		{name: "match", text: "requireMatch: [prod, 'dev=false', 'Shop', 'x=y', shop]\n", want: []string{`"Shop" is invalid`, `"x=y" is invalid: must be true, false, NAMESPACE or NAMESPACE=false`},
			keep: map[Key]string{KeyRequireMatch: "false,dev=false,prod=true,shop=true"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c := Default()
			warnings := c.ApplyDefaults(configMap, map[string]string{DefaultsKey: tt.text})
			if len(warnings) != len(tt.want) {
				t.Fatalf("warnings = %q, want %q", warnings, tt.want)
			}
			for i, w := range warnings {
				if !strings.HasPrefix(w, configMap+": ") || !strings.Contains(w, tt.want[i]) {
					t.Errorf("warning %q, want %q", w, tt.want[i])
				}
			}
			for _, s := range c.Settings() {
				if value, kept := tt.keep[Key(s.Key)]; kept != (s.Origin == api.OriginCluster) || kept && value != s.Value {
					t.Errorf("%+v, want %q", s, value)
				}
			}
		})
	}
}

func TestOtherKeysOfTheConfigMapAreWarnings(t *testing.T) {
	c := Default()
	got := c.ApplyDefaults(configMap, map[string]string{"config.yml": "mode: sidecar\n", DefaultsKey: "mode: ephemeral\n"})
	want := []string{configMap + `: "config.yml": unknown key of the ConfigMap: only config.yaml is used`}
	if d := cmp.Diff(want, got); d != "" || c.Mode != "ephemeral" {
		t.Errorf("mode is %s; %s", c.Mode, d)
	}
}

func TestMatchIsRequiredInNamespaces(t *testing.T) {
	tests := []struct {
		values string
		in     []string
		out    []string
	}{
		{"", nil, []string{"shop"}},
		{"true", []string{"shop", "dev"}, nil},
		{"true,dev=false", []string{"shop"}, []string{"dev"}},
		{"prod,shop=true", []string{"prod", "shop"}, []string{"dev"}},
		{"false", nil, []string{"shop"}},
	}
	for _, tt := range tests {
		r, err := parseMatchRule(fields(tt.values))
		if err != nil {
			t.Fatal(err)
		}
		for _, namespace := range slices.Concat(tt.in, tt.out) {
			if got, want := r.Requires(namespace), slices.Contains(tt.in, namespace); got != want {
				t.Errorf("%q: Requires(%q) = %v", tt.values, namespace, got)
			}
		}
		again, err := parseMatchRule(fields(r.String()))
		if d := cmp.Diff(r, again); err != nil || d != "" {
			t.Errorf("%q becomes %q: %v %s", tt.values, r.String(), err, d)
		}
	}
}

func FuzzApplyDefaults(f *testing.F) {
	f.Add("config.yaml", "extraCIDRs: [10.1.0.0/16, fd00::/64]\nmode: sidecar\nrequireMatch: [prod, dev=false]\n")
	f.Add("config.yaml", "? a\n: b\n<<: *x")
	f.Add("x", "- &a [*a]")
	f.Fuzz(func(t *testing.T, key, text string) {
		c := Default()
		warnings := c.ApplyDefaults(configMap, map[string]string{key: text})
		if len(warnings) > maxWarnings+1 {
			t.Errorf("%d warnings", len(warnings))
		}
		for _, w := range warnings {
			if len(w) > 4096 || strings.ContainsFunc(w, unicode.IsControl) {
				t.Errorf("warning %q", w)
			}
		}
		if len(c.ExtraCIDRs)+len(c.ExcludeCIDRs) > 2*maxValues || c.Yes || c.Image != Default().Image {
			t.Errorf("%+v", c)
		}
		for _, s := range []struct {
			value   string
			allowed []string
		}{{c.Netstack, find(KeyNetstack).choices}, {c.Transport, find(KeyTransport).choices}, {c.Mode, find(KeyMode).choices}} {
			if !slices.Contains(s.allowed, s.value) {
				t.Errorf("%q is not in %q", s.value, s.allowed)
			}
		}
	})
}
