package platform

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"kubevpn/internal/testenv"
)

// prepare moves the test into a network namespace. It returns false in the process whose child runs the test there.
func prepare(t *testing.T) bool {
	t.Helper()
	if !testenv.InNamespace(t, "nft", "curl", "ps") {
		return false
	}
	if err := os.MkdirAll("/var/lib/kubevpn", 0o700); err != nil {
		t.Fatal(err)
	}
	for _, line := range []string{
		"mount -t tmpfs tmpfs /run", "mount -t tmpfs tmpfs /var/lib/kubevpn", // for a separate daemon
		"ip addr add 192.0.2.10/32 dev lo",
		"ip route add default dev lo", // a query for the machine's nameserver needs a route before nftables redirects it
	} {
		testenv.Run(t, line)
	}
	return true
}

// changing matches what the system counts or updates at any time.
var changing = regexp.MustCompile(`\d+sec|# .*\n`)

// networkState describes the devices, addresses, routes and rules, and the resolver.
func networkState(t *testing.T) string {
	t.Helper()
	var out strings.Builder
	for _, line := range []string{"ip -o addr", "ip route show table all", "ip -6 route show table all", "ip rule", "nft list ruleset",
		"cat /etc/resolv.conf"} {
		out.WriteString("$ " + line + "\n" + testenv.Run(t, line))
	}
	return changing.ReplaceAllString(out.String(), "")
}
