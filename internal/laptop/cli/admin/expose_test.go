package admin

import (
	"io"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

// A load balancer is often open to the Internet, so it takes networks or a consent.
func TestInstallExposeLoadBalancerNeedsRangesOrConsent(t *testing.T) {
	for line, refused := range map[string]bool{
		"--expose loadbalancer": true, "--expose nodeport": false, "--expose loadbalancer --yes": false,
		"--expose loadbalancer --expose-source-ranges 203.0.113.0/24": false,
	} {
		f := &command.Factory{Streams: term.Streams{Out: io.Discard, Errout: io.Discard}, Lookup: func(string) (string, bool) { return "", false }}
		cmd := newInstall(f)
		cmd.SetArgs(append(strings.Fields(line), "--dry-run", "--image", "registry.example/kubevpn:1"))
		err := cmd.ExecuteContext(t.Context())
		if refused != (err != nil && api.AsError(err).Code == api.ExitUsage && strings.Contains(err.Error(), "--expose-source-ranges")) ||
			!refused && err != nil {
			t.Errorf("%s: %v", line, err)
		}
	}
}
