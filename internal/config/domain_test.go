package config

import (
	"strings"
	"testing"

	"kubevpn/internal/api"
)

func TestExtraDomainsAreThoseOfNameservers(t *testing.T) {
	for in, want := range map[string]string{
		"corp.test": "corp.test", ".Corp.Test.": "corp.test", "corp": "corp", "corp.local": "corp.local", "github.com": "github.com",
		"1.20.10.in-addr.arpa": "1.20.10.in-addr.arpa", "_tcp.corp.test": "_tcp.corp.test",
		"": "not a domain", ".": "not a domain", "*.corp.test": "not a domain", "corp test": "not a domain", "corp..test": "not a domain",
		"b\xc3\xbccher.test": "not a domain", strings.Repeat("x", 64) + ".test": "not a domain", strings.Repeat("x.", 130): "not a domain",
		"com": "public suffix", "co.uk": "public suffix", "in-addr.arpa": "public suffix",
		"localhost": "do not answer", "x.onion": "do not answer", "x.invalid": "do not answer", "local": "names of this network", "svc": "of every cluster",
	} {
		got, err := extraDomain(in)
		if err != nil {
			got = err.Error()
		}
		if got != want && (err == nil || !strings.Contains(got, want)) {
			t.Errorf("%q: %q, want %q", in, got, want)
		}
	}
	for in, want := range map[string]string{"com": "com", "Mail.Corp.Test": "mail.corp.test", "localhost": "localhost"} {
		if got, err := domain(in); got != want || err != nil {
			t.Errorf("an excluded %q: %q, %v", in, got, err)
		}
	}
}

func TestExcludedDomainsTakePrecedence(t *testing.T) {
	for name, tt := range map[string]struct {
		file, cluster  string
		extra, exclude string
		rejected       bool
	}{
		"a part is excluded":      {file: "extraDomains: corp.test\nexcludeDomains: mail.corp.test\n", extra: "corp.test", exclude: "mail.corp.test"},
		"the same":                {file: "extraDomains: corp.test\nexcludeDomains: corp.test\n", rejected: true},
		"all of it is excluded":   {file: "extraDomains: db.corp.test\nexcludeDomains: [x, test]\n", rejected: true},
		"the cluster's domain":    {file: "excludeDomains: corp.test\n", cluster: "extraDomains: [db.corp.test, lab.test]\n", extra: "lab.test", exclude: "corp.test"},
		"excluded by the cluster": {file: "extraDomains: db.corp.test\n", cluster: "excludeDomains: [corp.test, x.db.corp.test]\n", extra: "db.corp.test", exclude: "x.db.corp.test"},
		"both of the cluster":     {cluster: "extraDomains: corp.test\nexcludeDomains: corp.test\n", exclude: "corp.test"},
		"a bad one":               {cluster: "extraDomains: [corp.test, com]\n", extra: "corp.test"},
	} {
		t.Run(name, func(t *testing.T) {
			c := load(t, tt.file, nil)
			err := c.CheckDomains()
			if e := api.AsError(err); tt.rejected {
				if e == nil || e.Code != api.ExitUsage || !strings.Contains(e.Hint, "config.yaml") {
					t.Errorf("%+v", e)
				}
				return
			}
			if err != nil {
				t.Fatal(err)
			}
			c.ApplyDefaults(configMap, map[string]string{DefaultsKey: tt.cluster})
			if extra, exclude := strings.Join(c.ExtraDomains, ","), strings.Join(c.ExcludeDomains, ","); extra != tt.extra || exclude != tt.exclude {
				t.Errorf("extra %q and excluded %q, want %q and %q", extra, exclude, tt.extra, tt.exclude)
			}
			if err := c.CheckDomains(); err != nil {
				t.Error(err)
			}
		})
	}
}
