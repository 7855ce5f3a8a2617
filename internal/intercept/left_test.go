package intercept

import (
	"context"
	"fmt"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// orphan has an agent of ann@laptop's in the template, whose key nobody has any more: its daemon was killed.
func orphan(t *testing.T, w *world) {
	t.Helper()
	template := w.objects["deployments/web"].Object["spec"].(map[string]any)["template"].(map[string]any)
	p, err := planSidecar(template, "app", w.workload.Ports()[:1], sidecarAgent{image: "kubevpn:test", owner: "a key that is lost", ownerName: "ann@laptop"})
	if err != nil {
		t.Fatal(err)
	}
	w.objects["deployments/web"].Object["spec"].(map[string]any)["template"] = p.template
}

// What a killed daemon left is removed by who has its name, and by nobody else.
func TestLeaveWhatIsLeft(t *testing.T) {
	w := newWorld(t, "web-a")
	before := w.objects["deployments/web"].DeepCopy()
	orphan(t, w)
	leave := func(owner string) error {
		return resetAll(t.Context(), ResetConfig{
			Namespace: "default", Workload: "deployment/web", Owner: owner, Mine: true, Key: newKey(t), Logger: quiet(), Progress: func(api.Event) {},
		}, w, w)
	}
	if e := api.AsError(leave("bob@desk")); e == nil || e.Code != api.ExitWorkload {
		t.Errorf("bob: %v", e)
	}
	if cmp.Equal(before, w.objects["deployments/web"]) {
		t.Fatal("bob has removed it")
	}
	if err := leave("ann@laptop"); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, w.objects["deployments/web"]); d != "" {
		t.Errorf("the template (-before +after):\n%s", d)
	}
	if e := api.AsError(leave("ann@laptop")); e == nil || e.Code != api.ExitWorkload {
		t.Errorf("a second time: %v", e)
	}
}

// An intercept takes the place of what a killed daemon of the same user left.
func TestSidecarReplacesWhatIsLeft(t *testing.T) {
	w := newWorld(t, "web-a")
	before := w.objects["deployments/web"].DeepCopy()
	orphan(t, w)
	_, stop, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
	if err != nil {
		t.Fatal(err)
	}
	if err := stop(); err != nil {
		t.Fatal(err)
	}
	if d := cmp.Diff(before, w.objects["deployments/web"]); d != "" {
		t.Errorf("the template (-before +after):\n%s", d)
	}
}

// Who has a sidecar is told when somebody removes it.
func TestSidecarOthersReset(t *testing.T) {
	w := newWorld(t, "web-a")
	i, stop, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
	if err != nil {
		t.Fatal(err)
	}
	cfg := ResetConfig{Namespace: "default", Workload: "deployment/web", Owner: "root@desk", Key: newKey(t), Logger: quiet(), Progress: func(api.Event) {}}
	if err := resetAll(context.WithoutCancel(t.Context()), cfg, w, w); err != nil {
		t.Fatal(err)
	}
	testenv.Eventually(t, 5*time.Second, func() error {
		if s := i.Status(); s.State != api.InterceptFailed || s.Error == nil || s.Error.Code != api.ExitIntercept {
			return fmt.Errorf("%+v", s)
		}
		return nil
	})
	if err := stop(); err == nil {
		t.Error("Run gave no error")
	}
}
