package osdns

import (
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func domainList(n, length int) (out []string) {
	for i := range n {
		out = append(out, fmt.Sprintf("%0*d.test", length-len(".test"), i))
	}
	return out
}

func TestStoreKeys(t *testing.T) {
	resolver := netip.MustParseAddr("198.19.255.53")
	for _, tt := range []struct {
		name     string
		link     Link
		keys     []int // domains of each
		warnings int
	}{
		{name: "no_resolver", link: Link{MatchDomains: domainList(3, 10)}},
		{name: "no_domains", link: Link{Resolver: resolver}},
		{name: "match", link: Link{Resolver: resolver, MatchDomains: domainList(3, 10)}, keys: []int{3}},
		{name: "search", link: Link{Resolver: resolver, SearchDomains: domainList(2, 10)}, keys: []int{2}},
		{name: "both", link: Link{Resolver: resolver, MatchDomains: domainList(1, 10), SearchDomains: domainList(2, 10)}, keys: []int{2, 1}},
		{name: "many_domains", link: Link{Resolver: resolver, MatchDomains: domainList(120, 10)}, keys: []int{50, 50, 20}},
		{name: "long_domains", link: Link{Resolver: resolver, MatchDomains: domainList(20, 149)}, keys: []int{10, 10}},
		{name: "many_search_domains", link: Link{Resolver: resolver, SearchDomains: domainList(9, 10)}, keys: []int{6}, warnings: 1},
	} {
		t.Run(tt.name, func(t *testing.T) {
			tt.link.Name = "utun7"
			keys, warnings := storeKeys(Config{Links: []Link{tt.link}}, "kubevpn-42")
			var sizes []int
			var all []string
			names := map[string]bool{}
			for _, k := range keys {
				sizes, names[k.Name] = append(sizes, len(k.Domains)), true
				if !k.Search {
					all = append(all, k.Domains...)
				}
				if n := len(strings.Join(k.Domains, " ")); n > maxKeyBytes {
					t.Errorf("%s has %d bytes", k.Name, n)
				}
			}
			if !slices.Equal(sizes, tt.keys) || len(names) != len(keys) || len(warnings) != tt.warnings {
				t.Errorf("keys of %v domains, named %v, warnings %q", sizes, names, warnings)
			}
			if len(tt.keys) > 0 && len(all) > 0 && !slices.Equal(all, tt.link.MatchDomains) {
				t.Errorf("the keys have the domains %v", all)
			}
			for line := range strings.Lines(script(nil, keys)) {
				if len(line) >= 2048 {
					t.Errorf("scutil ignores the end of a line of %d bytes", len(line))
				}
			}
		})
	}
}

func TestScriptAddsChangesAndRemovesKeys(t *testing.T) {
	a := netip.MustParseAddr("198.19.255.53")
	match := storeKey{Name: "State:/a", Resolver: a, Domains: []string{"cluster.local", "svc"}}
	search := storeKey{Name: "State:/b", Resolver: a, Domains: []string{"default.svc.cluster.local"}, Search: true}
	moved := match
	moved.Resolver = netip.MustParseAddr("198.19.255.54")
	const addMatch = "d.init\nd.add ServerAddresses * 198.19.255.53\nd.add SupplementalMatchDomains * cluster.local svc\n" +
		"d.add SupplementalMatchDomainsNoSearch # 1\nadd State:/a temporary\n"
	const addSearch = "d.init\nd.add ServerAddresses * 198.19.255.53\nd.add SupplementalMatchDomains * default.svc.cluster.local\n" +
		"d.add SupplementalMatchDomainsNoSearch # 0\nadd State:/b temporary\n"
	for name, tt := range map[string]struct {
		from, to []storeKey
		want     string
	}{
		"nothing":   {},
		"add":       {nil, []storeKey{match, search}, addMatch + addSearch},
		"no_change": {[]storeKey{match, search}, []storeKey{match, search}, ""},
		"remove":    {[]storeKey{match, search}, []storeKey{search}, "remove State:/a\n"},
		"replace":   {[]storeKey{moved, search}, []storeKey{match, search}, "remove State:/a\n" + addMatch},
	} {
		if diff := cmp.Diff(tt.want, script(tt.from, tt.to)); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func TestDefaultNameservers(t *testing.T) {
	for name, want := range map[string][]string{
		"home":       {"192.168.1.1:53", "[fe80::1%en0]:53"},
		"vpn":        {"10.8.0.1:53", "10.8.0.2:53"},
		"no_network": nil,
		"port":       {"127.0.0.1:5354"},
	} {
		out, err := os.ReadFile(filepath.Join("testdata", "scutil-dns", name))
		if err != nil {
			t.Fatal(err)
		}
		var ports []netip.AddrPort
		for _, s := range want {
			ports = append(ports, netip.MustParseAddrPort(s))
		}
		if diff := cmp.Diff(ports, defaultNameservers(string(out)), cmpopts.EquateComparable(netip.AddrPort{})); diff != "" {
			t.Errorf("%s (-want +got):\n%s", name, diff)
		}
	}
}

func FuzzDefaultNameservers(f *testing.F) {
	files, err := filepath.Glob("testdata/scutil-dns/*")
	if err != nil || len(files) == 0 {
		f.Fatal(files, err)
	}
	for _, file := range files {
		b, err := os.ReadFile(file)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(string(b))
	}
	f.Fuzz(func(t *testing.T, output string) {
		for _, a := range defaultNameservers(output) {
			if !a.IsValid() || a.Port() == 0 {
				t.Errorf("nameserver %v", a)
			}
		}
	})
}
