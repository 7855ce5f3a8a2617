package osdns

import (
	"errors"
	"net/netip"
	"testing"

	"github.com/google/go-cmp/cmp"
	"github.com/google/go-cmp/cmp/cmpopts"
)

func TestPlanChoosesTheMethod(t *testing.T) {
	listen4, listen6 := netip.MustParseAddrPort("127.0.0.1:5399"), netip.MustParseAddrPort("[::1]:5399")
	link := Link{Name: "kubevpn0", Resolver: netip.MustParseAddr("198.19.255.53")}
	noTable, noBus := errors.New("operation not supported"), errors.New("it does not run")
	ports := func(list ...string) []netip.AddrPort { return port53(addrs(list...)) }

	tests := []struct {
		name string
		env  env
		want decision
		err  string
	}{
		{
			name: "stub_and_resolved",
			env: env{
				ResolvConf: []byte("nameserver 127.0.0.53\noptions edns0 trust-ad\nsearch .\n"), ResolvConfPath: "/run/systemd/resolve/stub-resolv.conf",
				ResolvedUplinks: addrs("192.0.2.1", "198.19.255.53"),
				Config:          Config{Listen4: listen4, Links: []Link{link}},
			},
			want: decision{Mode: ModeResolved, Upstreams: ports("192.0.2.1"), PerLink: true},
		},
		{
			name: "stub_without_resolved",
			env: env{
				ResolvConf: []byte("nameserver 127.0.0.53\n"), Resolved: noBus,
				Config: Config{Listen4: listen4, Links: []Link{link}},
			},
			want: decision{
				Mode: ModeNFTables, Upstreams: ports("127.0.0.53"), Redirect: addrs("127.0.0.53"),
				Warnings: []string{"resolv.conf points to systemd-resolved, which cannot be used: it does not run"},
			},
		},
		{
			name: "stub_but_no_address_in_the_tunnel",
			env:  env{ResolvConf: []byte("nameserver 127.0.0.53\n"), Config: Config{Listen4: listen4, Listen6: listen6}},
			err:  "systemd-resolved answers this machine's queries, and no link has a resolver for it",
		},
		{
			name: "domains_only_stub_and_resolved",
			env: env{
				ResolvConf: []byte("nameserver 127.0.0.53\n"), ResolvedUplinks: addrs("192.0.2.1"),
				Config: Config{Listen4: listen4, Links: []Link{link}, DomainsOnly: true},
			},
			want: decision{Mode: ModeResolved, Upstreams: ports("192.0.2.1"), PerLink: true},
		},
		{
			name: "domains_only_stub_without_resolved",
			env: env{
				ResolvConf: []byte("nameserver 127.0.0.53\n"), Resolved: noBus,
				Config: Config{Listen4: listen4, Links: []Link{link}, DomainsOnly: true},
			},
			err: "all DNS queries of this machine would go to the resolver, because systemd-resolved does not answer them: it does not run",
		},
		{
			name: "domains_only_resolved_is_not_asked",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\nnameserver 2001:db8::1\n"), ResolvConfPath: "/etc/resolv.conf",
				Config: Config{Listen4: listen4, Listen6: listen6, Links: []Link{link}, DomainsOnly: true},
			},
			err: "all DNS queries of this machine would go to the resolver, because systemd-resolved does not answer them: /etc/resolv.conf does not lead to it",
		},
		{
			name: "domains_only_no_link_and_no_nftables",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\n"), Resolved: noBus, NFTables: noTable,
				Config: Config{Listen6: netip.MustParseAddrPort("[::1]:53"), DomainsOnly: true},
			},
			err: "all DNS queries of this machine would go to the resolver, because systemd-resolved does not answer them: it does not run",
		},
		{
			name: "domains_only_resolved_bypassed",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\n"), ResolvConfPath: "/run/systemd/resolve/resolv.conf",
				Config: Config{Listen4: listen4, Links: []Link{link}, DomainsOnly: true},
			},
			want: decision{
				Mode: ModeResolved, Upstreams: ports("192.0.2.1"), PerLink: true,
				Warnings: []string{
					"resolv.conf bypasses systemd-resolved: programs that read it themselves do not find cluster names; link it to /run/systemd/resolve/stub-resolv.conf",
				},
			},
		},
		{
			name: "resolved_runs_but_is_not_asked",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\n"),
				Config:     Config{Listen4: listen4, Links: []Link{link}},
			},
			want: decision{Mode: ModeNFTables, Upstreams: ports("192.0.2.1"), Redirect: addrs("192.0.2.1"), PerLink: true},
		},
		{
			name: "resolved_lists_our_own_address_in_resolv_conf",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\nnameserver 198.19.255.53\n"), ResolvConfPath: "/run/systemd/resolve/resolv.conf",
				Config: Config{Listen4: listen4, Links: []Link{link}},
			},
			want: decision{Mode: ModeNFTables, Upstreams: ports("192.0.2.1"), Redirect: addrs("192.0.2.1"), PerLink: true},
		},
		{
			name: "plain_both_families",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\nnameserver 2001:db8::1\nnameserver fe80::1%eth0\n"), Resolved: noBus,
				Config: Config{Listen4: listen4, Listen6: listen6},
			},
			want: decision{
				Mode: ModeNFTables, Upstreams: ports("192.0.2.1", "2001:db8::1", "fe80::1%eth0"),
				Redirect: addrs("192.0.2.1", "2001:db8::1", "fe80::1"),
			},
		},
		{
			name: "no_ipv6_listener",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\nnameserver 2001:db8::1\n"), Resolved: noBus,
				Config: Config{Listen4: listen4},
			},
			want: decision{
				Mode: ModeNFTables, Upstreams: ports("192.0.2.1", "2001:db8::1"), Redirect: addrs("192.0.2.1"),
				Warnings: []string{"nameserver 2001:db8::1 cannot be redirected, because the resolver does not listen on IPv6"},
			},
		},
		{
			name: "dnsmasq_and_what_it_asks",
			env: env{
				ResolvConf: []byte("nameserver 127.0.0.1\nnameserver 192.0.2.1\n"), Resolved: noBus,
				Config: Config{Listen4: listen4},
			},
			want: decision{
				Mode: ModeNFTables, Upstreams: ports("127.0.0.1", "192.0.2.1"), Redirect: addrs("127.0.0.1"),
				Warnings: []string{"nameserver 192.0.2.1 is not redirected, because the one on this machine may ask it: programs that query both may miss cluster names"},
			},
		},
		{
			name: "no_nameserver_is_this_host",
			env:  env{Resolved: noBus, Config: Config{Listen4: listen4, Listen6: listen6}},
			want: decision{Mode: ModeNFTables, Upstreams: ports("127.0.0.1"), Redirect: addrs("127.0.0.1", "::1")},
		},
		{
			name: "no_nftables",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\n"), ResolvConfPath: "/etc/resolv.conf", Resolved: noBus, NFTables: noTable,
				Config: Config{Listen4: listen4, Links: []Link{link}},
			},
			want: decision{
				Mode: ModeFile, Upstreams: ports("192.0.2.1"), Nameservers: addrs("198.19.255.53"),
				Warnings: []string{"nftables cannot redirect DNS: operation not supported", "editing /etc/resolv.conf, until kubevpn ends"},
			},
		},
		{
			name: "no_nftables_and_a_listener_on_53",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\n"), ResolvConfPath: "/etc/resolv.conf", Resolved: noBus, NFTables: noTable,
				Config: Config{Listen4: netip.MustParseAddrPort("127.0.0.77:53"), Links: []Link{link}},
			},
			want: decision{
				Mode: ModeFile, Upstreams: ports("192.0.2.1"), Nameservers: addrs("127.0.0.77", "198.19.255.53"),
				Warnings: []string{"nftables cannot redirect DNS: operation not supported", "editing /etc/resolv.conf, until kubevpn ends"},
			},
		},
		{
			name: "resolved_bypassed_and_no_nftables",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\n"), ResolvConfPath: "/run/systemd/resolve/resolv.conf", NFTables: noTable,
				Config: Config{Listen4: listen4, Links: []Link{link}},
			},
			want: decision{
				Mode: ModeResolved, Upstreams: ports("192.0.2.1"), PerLink: true,
				Warnings: []string{
					"nftables cannot redirect DNS: operation not supported",
					"resolv.conf bypasses systemd-resolved: programs that read it themselves do not find cluster names; link it to /run/systemd/resolve/stub-resolv.conf",
				},
			},
		},
		{
			name: "only_ipv6_nameservers_and_no_ipv6_listener",
			env: env{
				ResolvConf: []byte("nameserver 2001:db8::1\n"), ResolvConfPath: "/etc/resolv.conf", Resolved: noBus,
				Config: Config{Listen4: listen4, Links: []Link{link}},
			},
			want: decision{
				Mode: ModeFile, Upstreams: ports("2001:db8::1"), Nameservers: addrs("198.19.255.53"),
				Warnings: []string{
					"nameserver 2001:db8::1 cannot be redirected, because the resolver does not listen on IPv6",
					"editing /etc/resolv.conf, until kubevpn ends",
				},
			},
		},
		{
			name: "nothing_fits",
			env: env{
				ResolvConf: []byte("nameserver 192.0.2.1\n"), Resolved: noBus, NFTables: noTable,
				Config: Config{Listen4: listen4},
			},
			err: "cannot put the resolver into the path of DNS queries: nftables cannot redirect DNS: operation not supported",
		},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := plan(tt.env)
			if msg := errorText(err); msg != tt.err {
				t.Fatalf("error %q, want %q", msg, tt.err)
			}
			if err != nil && errors.Is(err, ErrAllQueries) != tt.env.Config.DomainsOnly {
				t.Errorf("error %v: the kind is wrong", err)
			}
			if diff := cmp.Diff(tt.want, got, cmpopts.EquateComparable(netip.Addr{}, netip.AddrPort{}), cmpopts.EquateEmpty()); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func errorText(err error) string {
	if err == nil {
		return ""
	}
	return err.Error()
}

func TestValidateRejectsInvalidConfigs(t *testing.T) {
	tests := []struct {
		name string
		cfg  Config
		want string
	}{
		{"zero", Config{}, ""},
		{"plain", Config{Listen4: netip.MustParseAddrPort("127.0.0.1:53"), Listen6: netip.MustParseAddrPort("[::1]:53")}, ""},
		{"not_loopback", Config{Listen4: netip.MustParseAddrPort("192.0.2.1:53")}, "resolver address 192.0.2.1:53 is not a port on IPv4 loopback"},
		{"no_port", Config{Listen4: netip.MustParseAddrPort("127.0.0.1:0")}, "resolver address 127.0.0.1:0 is not a port on IPv4 loopback"},
		{"families_swapped", Config{Listen6: netip.MustParseAddrPort("127.0.0.1:53")}, "resolver address 127.0.0.1:53 is not a port on IPv6 loopback"},
		{"mapped", Config{Listen6: netip.MustParseAddrPort("[::ffff:127.0.0.1]:53")}, "resolver address [::ffff:127.0.0.1]:53 is not a port on IPv6 loopback"},
		{"domain", Config{Links: []Link{{Name: "kubevpn0", MatchDomains: []string{"com"}}}}, `link kubevpn0: domain "com" is a public suffix: names below it belong to others`},
		{"wildcard_suffix", Config{Links: []Link{{Name: "kubevpn0", SearchDomains: []string{"kawasaki.jp"}}}}, `link kubevpn0: domain "kawasaki.jp" is a public suffix: names below it belong to others`},
		{"wildcard_top_level", Config{Links: []Link{{Name: "kubevpn0", MatchDomains: []string{"ck"}}}}, `link kubevpn0: domain "ck" is a public suffix: names below it belong to others`},
		{"no_name", Config{Links: []Link{{}}}, "a link has no name"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if got := errorText(tt.cfg.validate()); got != tt.want {
				t.Errorf("got %q, want %q", got, tt.want)
			}
		})
	}
}
