package config

import (
	"errors"
	"net/netip"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/pkg/datapath/packet"
	"kubevpn/pkg/wire/sshjump"
)

func TestLoadReadsFileAndEnvironment(t *testing.T) {
	defaults := Config{ConnectSettings: api.ConnectSettings{Scheduler: "rr", Netstack: "auto", Transport: "auto"}, Mode: "auto"}
	with := func(change func(*Config)) Config {
		c := defaults
		change(&c)
		return c
	}
	tests := []struct {
		name string
		file string
		env  map[string]string
		want Config
		err  string // a part of it
	}{
		{name: "nothing", want: defaults},
		{name: "comments-only", file: "# later\n", want: defaults},
		{name: "empty-values", file: "image:\nextraCIDRs:\nscheduler: \"\"\n", env: map[string]string{"KUBEVPN_IMAGE": ""}, want: defaults},
		{
			name: "file",
			file: "image: r.example/k:1\nmanagerNamespace: tools\nscheduler: lc\nnetstack: gvisor\ntransport: api-proxy\nmode: sidecar\nextraCIDRs: [10.20.0.1/16, 192.0.2.7]\nexcludeCIDRs:\n- fd00::/64\nextraDomains: [Corp.Test., git.example.com]\nexcludeDomains: .com\nallowInbound: [8080, 53/udp]\nredact: [x-token]\n",
			want: Config{ConnectSettings: api.ConnectSettings{Image: "r.example/k:1", ManagerNamespace: "tools", Scheduler: "lc", Netstack: "gvisor", Transport: "api-proxy",
				ExtraCIDRs:   []netip.Prefix{netip.MustParsePrefix("10.20.0.0/16"), netip.MustParsePrefix("192.0.2.7/32")},
				ExcludeCIDRs: []netip.Prefix{netip.MustParsePrefix("fd00::/64")},
				ExtraDomains: []string{"corp.test", "git.example.com"}, ExcludeDomains: []string{"com"},
				AllowInbound: []api.Inbound{{Port: 8080}, {Port: 53, UDP: true}}}, Mode: "sidecar", Redact: []string{"X-Token"}},
		},
		{
			name: "environment-beats-file",
			file: "image: a\nscheduler: lc\nextraCIDRs: [10.20.0.0/16]\n",
			env:  map[string]string{"KUBEVPN_IMAGE": "b", "KUBEVPN_EXTRA_CIDRS": "10.1.0.0/16, 10.2.0.0/16"},
			want: with(func(c *Config) {
				c.Image, c.Scheduler = "b", "lc"
				c.ExtraCIDRs = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16"), netip.MustParsePrefix("10.2.0.0/16")}
			}),
		},
		{name: "one-value-for-a-list", file: "extraCIDRs: 10.1.0.0/16\n", want: with(func(c *Config) {
			c.ExtraCIDRs = []netip.Prefix{netip.MustParsePrefix("10.1.0.0/16")}
		})},
		{name: "map", file: "map: [10.20.0.7/16=198.18.0.0/16]\nnoMap: true\n", want: with(func(c *Config) {
			c.NoMap = true
			c.Map = []packet.Mapping{{Cluster: netip.MustParsePrefix("10.20.0.0/16"), Local: netip.MustParsePrefix("198.18.0.0/16")}}
		})},
		{name: "map-to-nothing", env: map[string]string{"KUBEVPN_MAP": "10.20.0.0/16"}, err: `KUBEVPN_MAP: "10.20.0.0/16" is not CLUSTER=LOCAL; write it like 10.20.0.0/16=198.18.0.0/16`},
		{name: "map-to-a-smaller-network", env: map[string]string{"KUBEVPN_MAP": "10.20.0.0/16=198.18.0.0/24"}, err: `KUBEVPN_MAP: 10.20.0.0/16 and 198.18.0.0/24 are not of the same size`},
		{name: "map-to-the-other-family", env: map[string]string{"KUBEVPN_MAP": "10.20.0.0/16=fd00::/16"}, err: `KUBEVPN_MAP: 10.20.0.0/16 and fd00::/16 are not of the same size`},
		{name: "map-to-public-addresses", env: map[string]string{"KUBEVPN_MAP": "10.20.0.0/16=8.8.0.0/16"}, err: `KUBEVPN_MAP: 8.8.0.0/16 is outside of private address space`},
		{name: "yes", file: "yes: true\n", want: with(func(c *Config) { c.Yes = true })},
		{name: "no-beats-yes", file: "yes: true\n", env: map[string]string{"KUBEVPN_YES": "0"}, want: defaults},
		{
			name: "jump-hosts",
			file: "sshJump: [dev@one:22, two]\n",
			want: with(func(c *Config) { c.SSHJump = sshjump.Hosts{{User: "dev", Name: "one", Port: 22}, {Name: "two"}} }),
		},
		{name: "bad-jump-host", env: map[string]string{"KUBEVPN_SSH_JUMP": "one,-v"}, err: `KUBEVPN_SSH_JUMP: "-v" is not a jump host`},
		{name: "perhaps", env: map[string]string{"KUBEVPN_YES": "perhaps"}, err: `KUBEVPN_YES: "perhaps" is invalid: must be true or false`},
		{name: "unknown-key", file: "image: a\n\nimagge: b\n", err: `config.yaml:3: unknown key "imagge": must be one of image, managerNamespace, scheduler, netstack, transport, mode, extraCIDRs, excludeCIDRs, map, noMap, extraDomains, excludeDomains, allowInbound, yes, requireMatch, sshJump, redact, labels, annotations, resources, metricsListen`},
		{name: "twice", file: "image: a\nimage: b\n", err: "config.yaml:2: image is already set on line 1"},
		{name: "not-a-mapping", file: "- image\n", err: "config.yaml:1: expected a list of `key: value` lines"},
		{name: "list-for-a-value", file: "image: [a]\n", err: "config.yaml:1: image: must be a single value"},
		{name: "map-for-a-list", file: "extraCIDRs: {a: b}\n", err: "config.yaml:1: extraCIDRs: must be a list"},
		{name: "nested-list", file: "extraCIDRs:\n- [a]\n", err: "config.yaml:1: extraCIDRs: line 2 must be a single value"},
		{name: "not-yaml", file: "image: [\n", err: "config.yaml: yaml: line"},
		{name: "bad-scheduler", file: "\nscheduler: wrr\n", err: `config.yaml:2: scheduler: "wrr" is invalid: must be one of rr, lc, sh, random`},
		{name: "bad-variable", env: map[string]string{"KUBEVPN_NETSTACK": "kernel"}, err: `KUBEVPN_NETSTACK: "kernel" is invalid: must be one of auto, gvisor, system`},
		{name: "bad-mode", env: map[string]string{"KUBEVPN_MODE": "daemonset"}, err: `KUBEVPN_MODE: "daemonset" is invalid: must be one of auto, ephemeral, sidecar`},
		{name: "bad-network", env: map[string]string{"KUBEVPN_EXTRA_CIDRS": "10.0.0.0/33"}, err: `KUBEVPN_EXTRA_CIDRS: "10.0.0.0/33" is not a network; write it like 10.20.0.0/16`},
		{name: "everything", env: map[string]string{"KUBEVPN_EXTRA_CIDRS": "::/0"}, err: `"::/0" is the whole Internet`},
		{name: "bad-port", env: map[string]string{"KUBEVPN_ALLOW_INBOUND": "8080,http"}, err: `KUBEVPN_ALLOW_INBOUND: "http" is not a port; write it like 8080, 8080/udp or all`},
		{name: "bad-header", env: map[string]string{"KUBEVPN_REDACT": "a:b"}, err: `KUBEVPN_REDACT: "a:b" is not the name of a header`},
		{name: "mapped", env: map[string]string{"KUBEVPN_EXTRA_CIDRS": "::ffff:10.0.0.0/104"}, err: `is an IPv4 network in IPv6 form`},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			path := filepath.Join(t.TempDir(), "config.yaml")
			if tt.file != "" {
				write(t, path, tt.file)
			}
			got, err := Load(path, func(name string) (string, bool) { v, ok := tt.env[name]; return v, ok })
			if tt.err != "" {
				wantUsage(t, err, tt.err)
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateComparable(netip.Prefix{}), cmpopts.EquateEmpty(), cmpopts.IgnoreUnexported(Config{})); diff != "" {
				t.Errorf("Load (-want +got):\n%s", diff)
			}
		})
	}
}

// applyFlags applies flags of a command line.
func applyFlags(c *Config, args ...string) error {
	cmd := &cobra.Command{}
	AddFlags(cmd, KeyExtraCIDRs, KeyNetstack, KeyYes)
	if err := cmd.ParseFlags(args); err != nil {
		return err
	}
	return c.ApplyFlags(cmd.Flags())
}

func TestFlagTakesPrecedence(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.yaml")
	write(t, path, "extraCIDRs: [10.1.0.0/16]\n")
	c, err := Load(path, func(string) (string, bool) { return "", false })
	if err != nil {
		t.Fatal(err)
	}
	if err := applyFlags(&c, "--extra-cidr=10.9.0.0/16", "--yes=false"); err != nil {
		t.Fatal(err)
	}
	if want := netip.MustParsePrefix("10.9.0.0/16"); len(c.ExtraCIDRs) != 1 || c.ExtraCIDRs[0] != want {
		t.Errorf("ExtraCIDRs = %v, want only %v", c.ExtraCIDRs, want)
	}
	wantUsage(t, applyFlags(&c, "--netstack=kernel"), `--netstack: "kernel" is invalid: must be one of auto, gvisor, system`)
}

func TestLoadFailsForAnUnreadableFile(t *testing.T) {
	_, err := Load(t.TempDir(), os.LookupEnv) // a directory
	wantUsage(t, err, "cannot read the configuration: ")
}

func FuzzApply(f *testing.F) {
	f.Add("image: a\nextraCIDRs: [10.1.0.0/16]\n")
	f.Add("? a\n: b\n<<: *x")
	f.Add("- &a [*a]")
	f.Fuzz(func(t *testing.T, text string) {
		c := Default()
		if err := c.apply("config.yaml", []byte(text)); err != nil && !strings.HasPrefix(err.Error(), "config.yaml:") {
			t.Errorf("the error does not name the file: %v", err)
		}
	})
}

func wantUsage(t *testing.T, err error, part string) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.ExitUsage || !strings.Contains(e.Message, part) {
		t.Errorf("error = %v, want one with exit code %d and %q", err, api.ExitUsage, part)
	}
}

func write(t *testing.T, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
}
