//go:build e2e && linux

package e2e

import (
	"encoding/json"
	"slices"
	"testing"

	"kubevpn/internal/api"
)

// listed checks that `kubevpn list` shows the workload with the owner of the laptop's intercept in both pods.
func (l *laptop) listed(t *testing.T, s *shop) {
	t.Helper()
	var list api.WorkloadList
	if err := json.Unmarshal([]byte(l.must(t, "kubevpn", "list", "-n", s.namespace, "-o", "json")), &list); err != nil {
		t.Fatal(err)
	}
	owner := l.status(t).Intercepts[0].Owner
	n := slices.IndexFunc(list.Items, func(w api.Workload) bool { return w.Workload == s.workload })
	if n < 0 || list.Kind != api.KindWorkloadList {
		t.Fatalf("%+v", list)
	}
	w := list.Items[n]
	held := slices.ContainsFunc(w.Intercepts, func(h api.Holder) bool {
		return h.Owner == owner && h.Mode == api.ModeEphemeral && h.Pods == w.Pods && h.Match != ""
	})
	if !held || w.Pods != 2 || !slices.Contains(w.Modes, api.ModeSidecar) || len(list.Warnings) > 0 {
		t.Errorf("%s is listed as %+v, and the owner is %s; warnings: %q", s.workload, w, owner, list.Warnings)
	}
}
