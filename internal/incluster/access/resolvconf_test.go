package access

import (
	"net/netip"
	"slices"
	"strings"
	"testing"
)

func TestResolvConfDefinesClusterDNS(t *testing.T) {
	tests := []struct {
		name, text, domain string
		servers            []string
	}{
		{"kubelet", "search kubevpn.svc.cluster.local svc.cluster.local cluster.local lan\nnameserver 10.96.0.10\noptions ndots:5\n", "cluster.local", []string{"10.96.0.10"}},
		{"dual-stack", "nameserver 10.96.0.10\nnameserver fd00:96::a\nsearch kubevpn.svc.cluster.local\n", "cluster.local", []string{"10.96.0.10", "fd00:96::a"}},
		{"other-domain", "search kubevpn.svc.K8s.Example.Org. svc.k8s.example.org k8s.example.org\nnameserver 10.96.0.10", "k8s.example.org", []string{"10.96.0.10"}},
		{"another-namespace", "search team.svc.cluster.local svc.cluster.local cluster.local\nnameserver 10.96.0.10\n", "cluster.local", []string{"10.96.0.10"}},
		{"node-local-cache", "search kubevpn.svc.cluster.local\nnameserver 169.254.20.10\n", "cluster.local", []string{"169.254.20.10"}},
		{"last-search-counts", "search kubevpn.svc.a\nsearch kubevpn.svc.b\nnameserver 10.96.0.10\n", "b", []string{"10.96.0.10"}},
		{"node-dns", "search lan\nnameserver 192.168.1.1\n", "", []string{"192.168.1.1"}},
		{"comments-and-rubbish", "# nameserver 1.1.1.1\n; x\nnameserver\nnameserver localhost\nsearch kubevpn.svc.cluster.local\n\tnameserver   10.96.0.10  # x\n", "cluster.local", []string{"10.96.0.10"}},
		{"empty", "", "", nil},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			c, err := parseResolvConf(strings.NewReader(tt.text))
			if err != nil {
				t.Fatal(err)
			}
			var servers []string
			for _, s := range c.Servers {
				servers = append(servers, s.String())
			}
			if domain := c.Domain("kubevpn"); domain != tt.domain || !slices.Equal(servers, tt.servers) {
				t.Errorf("got %q and %v, want %q and %v", domain, servers, tt.domain, tt.servers)
			}
		})
	}
}

func TestResolvConfKeepsSearchListAndOptions(t *testing.T) {
	c, err := parseResolvConf(strings.NewReader("domain a\nsearch b c # d\noptions ndots:2 edns0\noptions use-vc\n"))
	if err != nil || !slices.Equal(c.Search, []string{"b", "c"}) ||
		!slices.Equal(c.Options, []string{"ndots:2", "edns0", "use-vc"}) {
		t.Errorf("got %v, %v", c, err)
	}
}

func FuzzResolvConf(f *testing.F) {
	f.Add("search kubevpn.svc.cluster.local\nnameserver 10.96.0.10\n", "kubevpn")
	f.Add("search . .. svc. .svc.\nnameserver ::ffff:1.2.3.4%x", "")
	f.Fuzz(func(t *testing.T, text, namespace string) {
		c, err := parseResolvConf(strings.NewReader(text))
		if err != nil {
			return
		}
		if d := c.Domain(namespace); strings.HasPrefix(d, ".") || strings.HasSuffix(d, ".") {
			t.Errorf("domain %q has dots at its ends", d)
		}
		for _, word := range slices.Concat(c.Search, c.Options) {
			if len(strings.Fields(word)) != 1 || strings.ContainsAny(word[:1], "#;") {
				t.Errorf("%q is not a word", word)
			}
		}
		for _, s := range c.Servers {
			if s.Is4In6() || s == (netip.Addr{}) {
				t.Errorf("server %v", s)
			}
		}
	})
}
