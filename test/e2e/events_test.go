//go:build e2e && linux

package e2e

import (
	"fmt"
	"strings"
	"testing"

	"kubevpn/internal/testenv"
)

// recorded checks that kubectl shows Events of the workload with these reasons, and that they name the owner.
func (s *shop) recorded(t *testing.T, owner string, reasons ...string) {
	t.Helper()
	testenv.Eventually(t, soon, func() error {
		for _, args := range [][]string{{"events", "--for", s.workload}, {"describe", s.workload}} {
			out := s.kubectl(t, append([]string{"-n", s.namespace}, args...)...)
			for _, want := range append(reasons, owner+" (self-asserted)") {
				if !strings.Contains(out, want) {
					return fmt.Errorf("kubectl %v does not show %s: %s", args, want, out)
				}
			}
		}
		return nil
	})
}
