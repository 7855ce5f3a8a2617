package intercept

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// beginVia runs a Via until the test ends. It returns once flows can leave, or with Run's error.
func beginVia(t *testing.T, w *world, cfg ViaConfig) (*Via, error) {
	t.Helper()
	i, err := newIntercept(w.config(newKey(t), api.InterceptSpec{}), w, w.dynamic())
	if err != nil {
		t.Fatal(err)
	}
	v := newVia(i, cfg)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- v.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		<-done
	})
	select {
	case <-v.Begun():
		return v, nil
	case err := <-done:
		done <- nil
		return v, err
	}
}

// allowExec decides whether the user may exec in pods.
func (w *world) allowExec(may bool) {
	w.kube.(*fake.Clientset).PrependReactor("create", "selfsubjectaccessreviews",
		func(k8stesting.Action) (bool, runtime.Object, error) {
			answer := new(authorizationv1.SelfSubjectAccessReview)
			answer.Status.Allowed = may
			return true, answer, nil
		})
}

// from returns an error unless flows leave from the pod, over a session with its agent.
func (w *world) from(v *Via, pod string) func() error {
	return func() error {
		if s := v.Status(); s.Pod != pod || s.Error != "" {
			return fmt.Errorf("%+v", s)
		}
		ctx, cancel := context.WithTimeout(context.Background(), time.Second)
		defer cancel()
		s, err := v.Session(ctx)
		if err != nil {
			return err
		}
		a := w.agent(pod)
		if names, _ := v.Names(); names == nil || names.Search[0] != a.info.Key {
			return fmt.Errorf("the names are %v", names)
		}
		a.mu.Lock()
		defer a.mu.Unlock()
		for theirs := range a.sessions {
			if theirs.ID() == s.ID() {
				return nil
			}
		}
		return fmt.Errorf("the session is not with the agent of %s", pod)
	}
}

func TestFlowsLeaveFromOnePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		ready := func(p *corev1.Pod) {
			p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}
		w.addPodWithSpec("web-b", corev1.PodSpec{}, ready)
		w.addPodWithSpec("web-c", corev1.PodSpec{}, ready)
		v, err := beginVia(t, w, ViaConfig{})
		if err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, within, w.from(v, "web-b")) // a ready one
		time.Sleep(time.Minute)
		if !slices.Equal(w.injected, []string{"web-b"}) {
			t.Errorf("agents were added to %v", w.injected)
		}
		w.change("web-b", func(p *corev1.Pod) { p.DeletionTimestamp = new(p.CreationTimestamp) })
		testenv.Eventually(t, 2*time.Second, w.from(v, "web-c"))
		w.endAgent("web-c")
		testenv.Eventually(t, within, w.from(v, "web-a"))
		w.removePod("web-b")
		w.removePod("web-a")
		testenv.Eventually(t, within, w.from(v, "web-c")) // with another agent
		w.removePod("web-c")
		testenv.Until(t, "no pod is left", func() bool { s := v.Status(); return s.Pod == "" && s.Error == "no pod runs" })
		w.addPod("web-d")
		testenv.Eventually(t, within, w.from(v, "web-d"))
	})
}

// A reset removes the agents of all owners. Flows do not depend on the intercepts that it is about.
func TestViaOutlivesAReset(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		v, err := beginVia(t, w, ViaConfig{})
		if err != nil {
			t.Fatal(err)
		}
		a := w.agent("web-a")
		a.mu.Lock()
		for e := range a.conversations {
			e.Encode(api.AgentReport{Error: api.Errorf(api.ExitIntercept, "ann has removed all intercepts of this pod")})
		}
		a.mu.Unlock()
		w.endAgent("web-a")
		testenv.Eventually(t, within, func() error {
			if w.agent("web-a") == a {
				return errors.New("it has the agent that was removed")
			}
			return w.from(v, "web-a")()
		})
	})
}

func TestViaNeedsNoCapability(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		w.refused = func(*corev1.Pod) error { return api.Errorf(api.ExitInject, "pod security does not admit NET_ADMIN") }
		w.dials = true
		v, err := beginVia(t, w, ViaConfig{})
		if err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, within, w.from(v, "web-a"))
	})
}

func TestEverythingLeavesFromAPodOnlyForThoseWhoMayExec(t *testing.T) {
	for _, mayExec := range []bool{true, false} {
		synctest.Test(t, func(t *testing.T) {
			w := newWorld(t, "web-a")
			w.allowExec(mayExec)
			_, err := beginVia(t, w, ViaConfig{Egress: api.EgressAll})
			if e := api.AsError(err); mayExec && e != nil || !mayExec && (e == nil || e.Code != api.ExitPermission) {
				t.Errorf("may exec: %v, got %v", mayExec, err)
			}
		})
	}
}

func TestViaThatCannotBeginSaysWhy(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		w.refused = func(*corev1.Pod) error { return api.Errorf(api.ExitInject, "policy says no") }
		if _, err := beginVia(t, w, ViaConfig{}); api.AsError(err) == nil || api.AsError(err).Code != api.ExitInject {
			t.Errorf("got %v", err)
		}
		w = newWorld(t)
		if _, err := beginVia(t, w, ViaConfig{}); api.AsError(err) == nil || api.AsError(err).Code != api.ExitWorkload {
			t.Errorf("got %v", err)
		}
	})
}
