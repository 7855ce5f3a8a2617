package intercept

import (
	"context"
	"crypto/ecdsa"
	"fmt"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/testenv"
)

// addLeftover adds the sidecar of a killed daemon with that key to the template.
func addLeftover(t *testing.T, w *world, key *ecdsa.PrivateKey) {
	t.Helper()
	template := w.objects["deployments/web"].Object["spec"].(map[string]any)["template"].(map[string]any)
	id, err := newIdentity(key)
	if err != nil {
		t.Fatal(err)
	}
	p, err := planSidecar(template, "app", w.workload.Ports()[:1], workloads.Agent{Image: "kubevpn:test", Owner: id.hash, OwnerName: "ann@laptop"})
	if err != nil {
		t.Fatal(err)
	}
	w.objects["deployments/web"].Object["spec"].(map[string]any)["template"] = p.template
}

func TestResetMineRemovesOnlyLeftoversOfTheKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		before := w.objects["deployments/web"].DeepCopy()
		key := newKey(t)
		addLeftover(t, w, key)
		resetMine := func(key *ecdsa.PrivateKey) error {
			return resetAll(t.Context(), ResetConfig{
				Namespace: "default", Workload: "deployment/web", Owner: "ann@laptop", Mine: true, Key: key, Logger: quiet(), Progress: func(api.Event) {},
			}, w, w.dynamic())
		}
		if e := api.AsError(resetMine(newKey(t))); e == nil || e.Code != api.ExitWorkload {
			t.Errorf("with another key: %v", e)
		}
		if cmp.Equal(before, w.objects["deployments/web"]) {
			t.Fatal("Reset with another key removed the sidecar")
		}
		if err := resetMine(key); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(before, w.objects["deployments/web"]); d != "" {
			t.Errorf("the template (-before +after):\n%s", d)
		}
		if e := api.AsError(resetMine(key)); e == nil || e.Code != api.ExitWorkload {
			t.Errorf("a second time: %v", e)
		}
	})
}

func TestSidecarReplacesLeftoverOfSameKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		before := w.objects["deployments/web"].DeepCopy()
		key := newKey(t)
		addLeftover(t, w, key)
		_, stop, err := beginAs(t, w, key, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := stop(); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(before, w.objects["deployments/web"]); d != "" {
			t.Errorf("the template (-before +after):\n%s", d)
		}
	})
}

func TestSidecarKeepsSidecarOfOtherKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		addLeftover(t, w, newKey(t))
		before := w.objects["deployments/web"].DeepCopy()
		i, err := newIntercept(Config{
			Session: w, Namespace: "default", Workload: "deployment/web", Spec: api.InterceptSpec{Ports: []api.PortMap{{Container: 8080}}},
			Owner: "ann@laptop", Key: newKey(t), Progress: func(api.Event) {}, Logger: quiet(),
		}, w, w.dynamic())
		if err != nil {
			t.Fatal(err)
		}
		if err := i.read(t.Context()); err != nil {
			t.Fatal(err)
		}
		i.update(nil, nil) // no pod
		if err := i.rollOut(t.Context()); err != nil {
			t.Fatal(err)
		}
		if err := i.rollout.undo(t.Context()); err != nil {
			t.Fatal(err)
		}
		if d := cmp.Diff(before, w.objects["deployments/web"]); d != "" {
			t.Errorf("the template (-before +after):\n%s", d)
		}
	})
}

func TestRemovedSidecarEndsTheIntercept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		i, stop, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
		if err != nil {
			t.Fatal(err)
		}
		time.Sleep(time.Second) // the name of an Event is its time
		cfg := ResetConfig{Namespace: "default", Workload: "deployment/web", Owner: "root@desk", Key: newKey(t), Logger: quiet(), Progress: func(api.Event) {}, Image: w.Image}
		if err := resetAll(context.WithoutCancel(t.Context()), cfg, w, w.dynamic()); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, 5*time.Second, func() error {
			if s := i.Status(); s.State != api.InterceptFailed || s.Error == nil || s.Error.Code != api.ExitIntercept {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		if err := stop(); err == nil {
			t.Error("Run returned nil")
		}
	})
}
