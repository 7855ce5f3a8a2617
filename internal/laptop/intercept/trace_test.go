package intercept

import (
	"testing"

	"kubevpn/internal/api"
)

// The fake agent traces nothing, as agents of older versions.
func TestTraceTellsSilentAgentsFromMissingOnes(t *testing.T) {
	w := newWorld(t, "web-1")
	i, _, err := begin(t, w, api.InterceptSpec{})
	if err != nil {
		t.Fatal(err)
	}
	tr := i.Trace(t.Context(), api.AgentOrder{Trace: "0123456789abcdef0123456789abcdef"})
	if len(tr.Pods) != 1 || tr.Pods[0].Pod != "web-1" || tr.Pods[0].Error == "" || tr.Pods[0].Reason != "" {
		t.Errorf("trace %+v", tr)
	}
}
