package sandbox

import (
	"net/netip"
	"strings"
	"testing"
)

func TestConfigIsChecked(t *testing.T) {
	good := func() Config {
		return Config{Init: []string{"init"}, Args: []string{"true"}, Dir: "/"}
	}
	c := good()
	if err := c.check(); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct {
		name  string
		spoil func(*Config)
		want  string
	}{
		{"no-init", func(c *Config) { c.Init = nil }, "init"},
		{"no-program", func(c *Config) { c.Args = nil }, "program"},
		{"nul", func(c *Config) { c.Env = []string{"A=\x00"} }, "NUL"},
		{"relative-dir", func(c *Config) { c.Dir = "x" }, "absolute"},
		{"relative-path", func(c *Config) { c.Mounts = []Mount{{Path: "x", Source: "/x"}} }, "absolute"},
		{"relative-source", func(c *Config) { c.Mounts = []Mount{{Path: "/x", Source: "x"}} }, "absolute"},
		{"unclean", func(c *Config) { c.Mounts = []Mount{{Path: "/x/../y", Source: "/x"}} }, "shortest"},
		{"root", func(c *Config) { c.Mounts = []Mount{{Path: "/", Source: "/x"}} }, "nothing can be mounted"},
		{"proc", func(c *Config) { c.Mounts = []Mount{{Path: "/proc/1/x", Source: "/x"}} }, "nothing can be mounted"},
		{"twice", func(c *Config) { c.Mounts = []Mount{{Path: "/x", Source: "/x"}, {Path: "/x", Source: "/y"}} }, "two mounts"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			c := good()
			tt.spoil(&c)
			if err := c.check(); err == nil || !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestNetworkIsChecked(t *testing.T) {
	for _, tt := range []struct {
		name  string
		spoil func(*Network)
		want  string
	}{
		{"good", func(n *Network) {}, ""},
		{"bad-address", func(n *Network) { n.Addresses = []netip.Prefix{{}} }, "address"},
		{"mtu", func(n *Network) { n.MTU = 100 }, "MTU"},
		{"dns", func(n *Network) { n.DNS = []netip.Addr{{}} }, "nameserver"},
		{"search", func(n *Network) { n.Search = []string{"a\nnameserver 1.1.1.1"} }, "resolv.conf"},
		{"option", func(n *Network) { n.Options = []string{""} }, "resolv.conf"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			n := Network{Addresses: []netip.Prefix{netip.MustParsePrefix("10.0.0.1/32")}, MTU: 1500, Search: []string{"svc.cluster.local"}}
			tt.spoil(&n)
			err := n.check()
			if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
				t.Errorf("error %v, want one with %q", err, tt.want)
			}
		})
	}
}

func TestHostsByDNS(t *testing.T) {
	for conf, want := range map[string]string{
		"":                                     "hosts: files dns\n",
		"passwd: files\nhosts: resolve dns\n":  "passwd: files\nhosts: files dns\n",
		" hosts : a\nhosts: b # c\n# hosts: d": "hosts: files dns\n# hosts: d\n",
		"passwd: files":                        "passwd: files\nhosts: files dns\n",
	} {
		if got := hostsByDNS(conf); got != want {
			t.Errorf("%q gives %q, want %q", conf, got, want)
		}
	}
}

func FuzzHostsByDNS(f *testing.F) {
	f.Add("passwd: files\nhosts: files mdns4_minimal [NOTFOUND=return] dns\n")
	f.Fuzz(func(t *testing.T, conf string) {
		got := hostsByDNS(conf)
		hosts := 0
		for line := range strings.Lines(got) {
			if database, _, found := strings.Cut(line, ":"); found && strings.TrimSpace(database) == "hosts" {
				hosts++
			}
		}
		if hosts != 1 || hostsByDNS(got) != got {
			t.Errorf("%q gives %q", conf, got)
		}
	})
}
