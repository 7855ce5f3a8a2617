package osdns

import (
	"net/netip"
	"os"
	"os/exec"
	"regexp"
	"testing"
)

func TestScopedResolversKeepTheContract(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can set resolvers")
	}
	cfg := Config{
		Listen4: netip.MustParseAddrPort("127.0.0.1:5300"),
		Links: []Link{{
			Name: "utun99", Resolver: netip.MustParseAddr("198.19.255.53"),
			MatchDomains: []string{"cluster.local", "96.10.in-addr.arpa"}, SearchDomains: []string{"default.svc.cluster.local"},
		}},
	}
	keepsTheContract(t, ModeDarwin, func(t *testing.T) machine { return machine{New(Options{}), cfg, dnsState(t)} })
}

// reach matches the lines that macOS changes by itself at any time.
var reach = regexp.MustCompile(`(?m)^ *(reach|order) .*\n`)

// dnsState returns a function that describes the resolvers of this machine.
func dnsState(t *testing.T) func() string {
	return func() string {
		out, err := exec.Command("/usr/sbin/scutil", "--dns").Output()
		if err != nil {
			t.Fatal(err)
		}
		return reach.ReplaceAllString(string(out), "")
	}
}
