package osdns

import (
	"bytes"
	"net/netip"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
)

func addrs(list ...string) []netip.Addr {
	var out []netip.Addr
	for _, s := range list {
		out = append(out, netip.MustParseAddr(s))
	}
	return out
}

func addrStrings(list []netip.Addr) []string {
	var out []string
	for _, a := range list {
		out = append(out, a.String())
	}
	return out
}

func TestNameserversIgnoresOtherLines(t *testing.T) {
	tests := []struct {
		name, conf string
		want       []string
	}{
		{"empty", "", nil},
		{"one", "nameserver 192.0.2.1\n", []string{"192.0.2.1"}},
		{"no_newline_at_the_end", "nameserver 192.0.2.1", []string{"192.0.2.1"}},
		{"tabs_and_trailing_words", "nameserver\t\t192.0.2.1\t# home\n", []string{"192.0.2.1"}},
		{"crlf", "nameserver 192.0.2.1\r\nnameserver 192.0.2.2\r\n", []string{"192.0.2.1", "192.0.2.2"}},
		{"comments", "# nameserver 192.0.2.1\n; nameserver 192.0.2.2\n#nameserver 192.0.2.3\n;nameserver 192.0.2.4\n", nil},
		{"ipv6_and_zone", "nameserver 2001:db8::1\nnameserver fe80::1%eth0\n", []string{"2001:db8::1", "fe80::1%eth0"}},
		{"mapped_is_ipv4", "nameserver ::ffff:192.0.2.1\n", []string{"192.0.2.1"}},
		{"unspecified_is_this_host", "nameserver 0.0.0.0\nnameserver ::\n", []string{"127.0.0.1", "::1"}},
		{"twice", "nameserver 192.0.2.1\nnameserver 192.0.2.1\n", []string{"192.0.2.1"}},
		{"junk", "nameserver\nnameserver dns.example\nnameserver 1.2.3\nnameservers 192.0.2.1\nnameserver 224.0.0.251\n", nil},
		{"among_others", "domain a.example\nsearch b.example\tc.example\nsearch d.example\noptions ndots:5 edns0\nnameserver 192.0.2.1\n", []string{"192.0.2.1"}},
		{"more_than_three", "nameserver 192.0.2.1\nnameserver 192.0.2.2\nnameserver 192.0.2.3\nnameserver 192.0.2.4\n",
			[]string{"192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.4"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			if diff := cmp.Diff(tt.want, addrStrings(nameservers([]byte(tt.conf)))); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
		})
	}
}

func TestWithNameserversKeepsOtherLines(t *testing.T) {
	tests := []struct{ name, conf, want string }{
		{"empty", "", header + "\nnameserver 198.19.255.53\n"},
		{"keeps_the_rest",
			"# home\ndomain a.example\nnameserver 192.0.2.1\nnameserver 192.0.2.2\nsearch b.example\noptions ndots:2\n",
			header + "\n# home\ndomain a.example\nnameserver 198.19.255.53\nsearch b.example\noptions ndots:2\n"},
		{"no_newline_at_the_end", "search b.example", header + "\nsearch b.example\nnameserver 198.19.255.53\n"},
		{"commented_nameserver_stays", "#nameserver 192.0.2.1\n", header + "\n#nameserver 192.0.2.1\nnameserver 198.19.255.53\n"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := string(withNameservers([]byte(tt.conf), addrs("198.19.255.53")))
			if diff := cmp.Diff(tt.want, got); diff != "" {
				t.Errorf("-want +got\n%s", diff)
			}
			if again := string(withNameservers([]byte(got), addrs("198.19.255.53"))); again != got {
				t.Errorf("not stable:\n%s", cmp.Diff(got, again))
			}
		})
	}
}

func FuzzResolvConf(f *testing.F) {
	f.Add([]byte("nameserver 192.0.2.1\noptions ndots:2\n"))
	f.Add([]byte(";x\n#y\nsearch\ta b\r\nnameserver fe80::1%eth0"))
	f.Fuzz(func(t *testing.T, conf []byte) {
		for _, a := range nameservers(conf) {
			if !a.IsValid() || a.IsUnspecified() || a.Is4In6() {
				t.Errorf("nameserver %v", a)
			}
		}
		ours := addrs("198.19.255.53", "fd00::53")
		got := withNameservers(conf, ours)
		if ns := nameservers(got); !slices.Equal(ns, ours) {
			t.Errorf("nameservers %v of\n%q", ns, got)
		}
		kept := func(b []byte) (out []string) {
			for line := range strings.Lines(string(b)) {
				if f := strings.Fields(line); (len(f) == 0 || f[0] != "nameserver") && !strings.HasPrefix(line, header) {
					out = append(out, strings.TrimSuffix(line, "\n"))
				}
			}
			return out
		}
		if a, b := kept(conf), kept(got); !slices.Equal(a, b) {
			t.Errorf("other lines changed: %q became %q", a, b)
		}
		if !bytes.HasPrefix(got, []byte(header)) {
			t.Errorf("no header: %q", got)
		}
	})
}

func TestCheckDomainRejectsInvalidNames(t *testing.T) {
	tests := []struct{ domain, want string }{
		{"cluster.local", ""},
		{"svc.cluster.local", ""},
		{"web", ""},
		{"96.10.in-addr.arpa", ""},
		{"0.0.d.f.ip6.arpa", ""},
		{"_tcp.web.default.svc.cluster.local", ""},
		{"", `domain "" has 0 bytes, not 1 to 253`},
		{".", `domain "." has a label of 0 bytes, not 1 to 63`},
		{"cluster.local.", `domain "cluster.local." has a label of 0 bytes, not 1 to 63`},
		{"a..b", `domain "a..b" has a label of 0 bytes, not 1 to 63`},
		{"Cluster.local", `domain "Cluster.local" has 'C' in the wrong place`},
		{"-a.local", `domain "-a.local" has '-' in the wrong place`},
		{"a\nb.local", `domain "a\nb.local" has '\n' in the wrong place`},
		{"../etc/passwd", `domain "../etc/passwd" has a label of 0 bytes, not 1 to 63`},
		{"com", `domain "com" is a public suffix: names below it belong to others`},
		{"dev", `domain "dev" is a public suffix: names below it belong to others`},
		{"co.uk", `domain "co.uk" is a public suffix: names below it belong to others`},
		{"in-addr.arpa", `domain "in-addr.arpa" is a public suffix: names below it belong to others`},
		{"example.com", ""},
	}
	for _, tt := range tests {
		got := ""
		if err := CheckDomain(tt.domain); err != nil {
			got = err.Error()
		}
		if got != tt.want {
			t.Errorf("CheckDomain(%q) = %q, want %q", tt.domain, got, tt.want)
		}
	}
}
