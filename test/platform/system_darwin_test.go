package platform

import (
	"os"
	"regexp"
	"strings"
	"testing"

	"kubevpn/internal/testenv"
)

// prepare skips the test unless it may change the network of this machine: macOS has no namespaces.
func prepare(t *testing.T) bool {
	t.Helper()
	if os.Geteuid() != 0 {
		t.Skip("NOT TESTED: only root can change the network")
	}
	testenv.NeedPrograms(t, "curl")
	return true
}

// changing matches what the system updates at any time.
var changing = regexp.MustCompile(`(?m)^ *(reach|order) .*\n`)

// networkState describes the devices, the route to the ClusterIPs and the resolvers.
func networkState(t *testing.T) string {
	t.Helper()
	out := testenv.Run(t, "ifconfig -l")
	for line := range strings.Lines(testenv.Run(t, "route -n get "+webIP)) {
		if strings.Contains(line, "interface:") {
			out += line
		}
	}
	return out + changing.ReplaceAllString(testenv.Run(t, "scutil --dns"), "")
}
