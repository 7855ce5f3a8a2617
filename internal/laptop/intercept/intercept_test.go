package intercept

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"regexp"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/intstr"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wakeup"
)

// all returns an error unless there are n pods, all of them intercepted.
func all(i *Intercept, n int) func() error {
	return func() error {
		s := i.Status()
		for _, p := range s.Pods {
			if !p.Intercepted {
				return fmt.Errorf("%s is not intercepted: %s", p.Name, p.Reason)
			}
		}
		if len(s.Pods) != n {
			return fmt.Errorf("%d pods, want %d", len(s.Pods), n)
		}
		return nil
	}
}

func TestEveryPodIsIntercepted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-b", "web-a", "web-c")
		i, stop, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		s := i.Status()
		if s.State != api.InterceptActive || s.Mode != api.ModeEphemeral || s.Match != "everything" || s.LastError != "" || len(s.Warnings) > 0 {
			t.Errorf("%+v", s)
		}
		if err := all(i, 3)(); err != nil {
			t.Error(err)
		}
		want := []api.PortMap{{Protocol: "udp", Container: 53, Name: "dns", Local: 53}, {Protocol: "tcp", Container: 8080, Name: "http", Local: 8080}}
		if !slices.Equal(s.Ports, want) {
			t.Errorf("ports %v, want %v", s.Ports, want)
		}
		if len(s.Checks) != 7 || slices.ContainsFunc(s.Checks, func(c api.Check) bool { return !c.OK }) {
			t.Errorf("checks %+v", s.Checks)
		}
		if w.injected[0] != "web-a" {
			t.Errorf("the first pod was %s", w.injected[0])
		}

		later := w.addPod("web-0")
		testenv.Eventually(t, 2*time.Second, all(i, 4))
		w.removePod("web-b")
		testenv.Eventually(t, 2*time.Second, all(i, 3))

		began := time.Now()
		if err := stop(); err != nil {
			t.Error(err)
		}
		if d := time.Since(began); d > 5*time.Second {
			t.Errorf("leaving took %v", d)
		}
		if s := i.Status(); s.State != api.InterceptLeaving {
			t.Errorf("%+v", s)
		}
		for uid, a := range w.agents {
			if a.held() != 0 {
				t.Errorf("%s still has %+v (the later one is %s)", uid, a.claims, later.UID)
			}
		}
	})
}

func TestConflictChangesOnlyTheFirstPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		w.claims[w.list[0].UID] = []api.Claim{{ID: "x", Owner: "bob@desk"}}
		i, _, err := begin(t, w, api.InterceptSpec{})
		if e := api.AsError(err); e == nil || e.Code != api.ExitConflict || !strings.Contains(e.Message, "bob@desk") {
			t.Fatalf("got %v", err)
		}
		if !slices.Equal(w.injected, []string{"web-a"}) {
			t.Errorf("agents were added to %v", w.injected)
		}
		if s := i.Status(); s.State != api.InterceptFailed || s.Error == nil {
			t.Errorf("%+v", s)
		}
	})
}

func TestConflictOnNewPodLeavesOthersIntercepted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		w.claims["uid-2"] = []api.Claim{{ID: "x", Owner: "bob@desk"}}
		p := w.addPod("web-b")
		testenv.Eventually(t, 5*time.Second, func() error {
			s := i.Status()
			if len(s.Pods) != 2 || s.Pods[1].Intercepted || !strings.Contains(s.Pods[1].Reason, "bob@desk") || len(s.Others) != 1 || s.State != api.InterceptActive {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		w.mu.Lock()
		a := w.agents[p.UID]
		w.mu.Unlock()
		a.change(func() { a.claims = nil })
		testenv.Eventually(t, 5*time.Second, all(i, 2))
	})
}

func TestInterceptWaitsForClaimOfKilledDaemon(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		uid := w.list[0].UID
		w.claims[uid] = []api.Claim{{ID: "x", Owner: "ann@laptop", Mine: true}}
		released := make(chan struct{})
		go func() {
			defer close(released)
			err := testenv.Poll(10*time.Second, func() error {
				w.mu.Lock()
				defer w.mu.Unlock()
				if a := w.agents[uid]; a == nil || a.rejections() < 2 {
					return errors.New("the intercept has not claimed again")
				}
				return nil
			})
			if err != nil {
				t.Error(err)
				return
			}
			w.agents[uid].change(func() { w.agents[uid].claims = nil })
		}()
		i, _, err := begin(t, w, api.InterceptSpec{})
		<-released
		if err != nil {
			t.Fatal(err)
		}
		if s := i.Status(); len(s.Warnings) != 1 || !strings.Contains(s.Warnings[0], "your other intercept already receives") {
			t.Errorf("%+v", s.Warnings)
		}
	})
}

func TestRunNamesTheFailure(t *testing.T) {
	for _, tt := range []struct {
		name  string
		world func(*world)
		code  api.ExitCode
		want  string // regular expression of message or hint
	}{
		{"no_permission", func(w *world) { w.denied = api.Errorf(api.ExitPermission, "you may not patch deployments") }, api.ExitPermission, "may not patch"},
		{"agent_rejected", func(w *world) {
			w.refused = func(*corev1.Pod) error { return api.Errorf(api.ExitInject, "pod security forbids it") }
			w.workload.Object = &unstructured.Unstructured{Object: map[string]any{}} // a Service, say: no sidecar
		}, api.ExitInject, "pod security forbids it"},
		{"no_pull_secret", func(w *world) {
			w.private = true
			w.adding = func() { w.t.Error("the intercept changed a pod that cannot pull the agent's image") }
		}, api.ExitImagePull, "needs a pull secret for the registry"},
		{"bypassed", func(w *world) { w.bypass = true }, api.ExitIntercept, "bypass the agent's netfilter rules"},
		{"mesh", func(w *world) {
			w.bypass = true
			w.list[0].Spec.InitContainers = []corev1.Container{{Name: "istio-proxy"}}
		}, api.ExitIntercept, "service mesh"},
		{"cilium", func(w *world) {
			w.bypass = true
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cilium-config"}, Data: map[string]string{"kube-proxy-replacement": "true"}}
			if _, err := w.kube.CoreV1().ConfigMaps("kube-system").Create(w.t.Context(), cm, metav1.CreateOptions{}); err != nil {
				w.t.Fatal(err)
			}
		}, api.ExitIntercept, "Cilium with eBPF host routing"},
		{"mesh_and_cilium", func(w *world) {
			w.bypass = true
			w.list[0].Spec.Containers = []corev1.Container{{Name: "app"}, {Name: "linkerd-proxy"}}
			cm := &corev1.ConfigMap{ObjectMeta: metav1.ObjectMeta{Name: "cilium-config"}, Data: map[string]string{"kube-proxy-replacement": "true"}}
			if _, err := w.kube.CoreV1().ConfigMaps("kube-system").Create(w.t.Context(), cm, metav1.CreateOptions{}); err != nil {
				w.t.Fatal(err)
			}
		}, api.ExitIntercept, "(?s)Linkerd.*Cilium"},
		{"ambient_mesh", func(w *world) {
			w.bypass = true
			w.list[0].Annotations = map[string]string{"ambient.istio.io/redirection": "enabled"}
		}, api.ExitIntercept, "ambient"},
		{"pod_with_hostNetwork", func(w *world) { w.list[0].Spec.HostNetwork = true }, api.ExitWorkload, "hostNetwork"},
		{"udp_bypassed", func(w *world) {
			w.bypass = true
			w.workload.Template.Spec.Containers[0].Ports = []corev1.ContainerPort{{Name: "dns", ContainerPort: 53, Protocol: corev1.ProtocolUDP}}
			w.workload.Services = nil
		}, api.ExitIntercept, "udp 10.244.0.1:53"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a")
				tt.world(w)
				i, _, err := begin(t, w, api.InterceptSpec{})
				e := api.AsError(err)
				if e == nil || e.Code != tt.code || !regexp.MustCompile(tt.want).MatchString(e.Message+e.Hint) {
					t.Fatalf("got %+v", e)
				}
				if e.Code == api.ExitWorkload && len(w.injected) > 0 {
					t.Errorf("agents were added to %v", w.injected)
				}
				if s := i.Status(); s.State != api.InterceptFailed || s.Error.Code != tt.code {
					t.Errorf("%+v", s)
				}
				for _, a := range w.agents {
					if a.held() != 0 {
						t.Errorf("claims after the failure: %+v", a.claims)
					}
				}
			})
		})
	}
}

func TestFailureOfOnePodLeavesOthersIntercepted(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		w.refused = func(p *corev1.Pod) error {
			if p.Name == "web-a" {
				return api.Errorf(api.ExitInject, "no")
			}
			return nil
		}
		i, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeEphemeral})
		if err != nil {
			t.Fatal(err)
		}
		s := i.Status()
		if s.State != api.InterceptActive || s.Pods[0].Intercepted || s.Pods[0].Reason != "no" || !s.Pods[1].Intercepted || s.LastError != "web-a: no" {
			t.Errorf("%+v", s)
		}
	})
}

func TestInterceptBeginsAfterTheSecondAttempt(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		var once sync.Once
		w.refused = func(p *corev1.Pod) (err error) {
			if p.Name == "web-b" {
				once.Do(func() { err = errors.New("the kubelet restarts") })
			}
			return err
		}
		i, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeEphemeral})
		if err != nil {
			t.Fatal(err)
		}
		if err := all(i, 2)(); err != nil {
			t.Error(err)
		}
	})
}

// An agent that fails tells why, and its container ends.
func TestAgentThatFailsAndEndsIsOneFailure(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		var once sync.Once
		w.says = func(_ string, info *api.AgentInfo) {
			once.Do(func() {
				*info = api.AgentInfo{Error: api.Errorf(api.ExitInject, "the port is in use")}
				w.endAgent("web-a")
			})
		}
		i, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeEphemeral})
		if err != nil {
			t.Fatal(err)
		}
		if err := all(i, 1)(); err != nil {
			t.Error(err)
		}
	})
}

// A clone whose pod was ready for a moment receives nothing: its intercept has not begun.
func TestInterceptBeginsOnceTheCloneReceives(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		cfg := w.config(newKey(t), api.InterceptSpec{Mode: api.ModeEphemeral})
		cfg.Clone = true
		i, err := newIntercept(cfg, w, w.dynamic())
		if err != nil {
			t.Fatal(err)
		}
		defer wakeup.Go(t.Context(), func(ctx context.Context) {
			if err := i.Run(ctx); err != nil {
				t.Error(err)
			}
		})()
		time.Sleep(5 * time.Second)
		select {
		case <-i.Begun():
			t.Error("it has begun without a pod of the clone")
		default:
		}
		if p := i.Status().Pods[0]; p.Intercepted || p.Reason != "no pod of the clone is ready" {
			t.Errorf("%+v", p)
		}
		i.SetClone([]netip.Addr{netip.MustParseAddr("10.244.1.9")})
		<-i.Begun()
		if err := all(i, 1)(); err != nil {
			t.Error(err)
		}
	})
}

func TestInterceptFailsIfTheCloneDoesNotStayReady(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		cfg := w.config(newKey(t), api.InterceptSpec{Mode: api.ModeEphemeral})
		cfg.Clone = true
		i, err := newIntercept(cfg, w, w.dynamic())
		if err != nil {
			t.Fatal(err)
		}
		if e := api.AsError(i.Run(t.Context())); e == nil || e.Code != api.ExitNotReady || e.Message != "no pod of the clone stays ready" {
			t.Errorf("%+v", e)
		}
	})
}

func TestInterceptWaitsForFirstPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		if s := i.Status(); s.State != api.InterceptWaiting || s.LastError != "deployment/web has no pods" {
			t.Errorf("%+v", s)
		}
		w.addPod("web-a")
		testenv.Eventually(t, 2*time.Second, all(i, 1))
		if s := i.Status(); s.State != api.InterceptActive || s.LastError != "" {
			t.Errorf("%+v", s)
		}
	})
}

func TestFirstPodIsAloneThenEightAtATime(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		var names []string
		for n := range 30 {
			names = append(names, fmt.Sprintf("web-%02d", n))
		}
		w := newWorld(t, names...)
		var calls, adding, most atomic.Int32
		full := make(chan struct{}) // closed when maxAdding agents are being added
		fill := sync.OnceFunc(func() { close(full) })
		w.adding = func() {
			n := adding.Add(1)
			defer adding.Add(-1)
			for m := most.Load(); n > m && !most.CompareAndSwap(m, n); m = most.Load() {
			}
			switch {
			case calls.Add(1) == 1: // the first pod
			case n == maxAdding:
				fill()
			case n < maxAdding:
				<-full
			}
		}
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		if err := all(i, 30)(); err != nil {
			t.Error(err)
		}
		if most.Load() != maxAdding || w.injected[0] != "web-00" {
			t.Errorf("%d pods at a time, %s first", most.Load(), w.injected[0])
		}
	})
}

func TestKilledAgentIsReplaced(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		uid := w.list[0].UID
		old := w.agents[uid]
		old.change(func() { old.claims[0].Requests = 7 })
		testenv.Eventually(t, 2*time.Second, func() error {
			if n := i.Status().Requests; n != 7 {
				return fmt.Errorf("%d requests", n)
			}
			return nil
		})
		w.endAgent("web-a")
		testenv.Eventually(t, 10*time.Second, func() error {
			w.mu.Lock()
			defer w.mu.Unlock()
			if a := w.agents[uid]; a == nil || a == old || a.held() != 1 {
				return errors.New("no new agent has the claim")
			}
			return nil
		})
		testenv.Eventually(t, 5*time.Second, all(i, 1))
		if !slices.Equal(w.injected, []string{"web-a", "web-a"}) || i.Status().Requests != 7 {
			t.Errorf("added to %v; %d requests", w.injected, i.Status().Requests)
		}
	})
}

// An agent releases the claim of a laptop that did not answer for long.
func TestReleasedClaimIsClaimedAgain(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		a := w.agents[w.list[0].UID]
		a.change(func() { a.claims = nil })
		testenv.Eventually(t, 5*time.Second, func() error {
			if a.held() != 1 {
				return errors.New("not claimed")
			}
			return all(i, 1)()
		})
	})
}

func TestResetByOthersEndsTheIntercept(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		i, stop, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		a := w.agents[w.list[1].UID]
		a.mu.Lock()
		for e := range a.conversations {
			e.Encode(api.AgentReport{Error: api.Errorf(api.ExitIntercept, "root@desk has removed all intercepts of this pod")})
		}
		a.mu.Unlock()
		testenv.Eventually(t, 5*time.Second, func() error {
			if s := i.Status(); s.State != api.InterceptFailed || !strings.Contains(s.Error.Message, "root@desk") {
				return fmt.Errorf("%+v", s)
			}
			return nil
		})
		if err := stop(); err == nil {
			t.Error("Run returned nil")
		}
		if len(w.injected) != 2 {
			t.Errorf("agents were added to %v", w.injected)
		}
	})
}

func TestSidecarIsAddedAndUndone(t *testing.T) {
	for _, tt := range []struct {
		name, mode, reason string
		end                func(t *testing.T, w *world, stop func() error)
	}{
		{"auto_leave", api.ModeAuto, "pod security forbids it", func(t *testing.T, _ *world, stop func() error) {
			if err := stop(); err != nil {
				t.Error(err)
			}
		}},
		{"asked_reset", api.ModeSidecar, "requested with --mode", func(t *testing.T, w *world, _ func() error) {
			cfg := ResetConfig{Namespace: "default", Workload: "deployment/web", Key: newKey(t), Logger: quiet(), Progress: func(api.Event) {}, Image: w.Image}
			if err := resetAll(t.Context(), cfg, w, w.dynamic()); err != nil {
				t.Error(err)
			}
		}},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a", "web-b")
				w.refused = func(*corev1.Pod) error { return api.Errorf(api.ExitInject, "pod security forbids it") }
				w.conflicts = 2
				// The target port of this Service is a number.
				port := w.objects["services/web"].Object["spec"].(map[string]any)["ports"].([]any)[0].(map[string]any)
				port["targetPort"] = int64(8080)
				w.workload.Services[0].Spec.Ports[0].TargetPort = intstr.FromInt32(8080)
				template, service := w.objects["deployments/web"].DeepCopy(), w.objects["services/web"].DeepCopy()
				i, stop, err := begin(t, w, api.InterceptSpec{Mode: tt.mode, Ports: []api.PortMap{{Container: 8080}}})
				if err != nil {
					t.Fatal(err)
				}
				s := i.Status()
				if s.Mode != api.ModeSidecar || s.ModeReason != tt.reason || s.State != api.InterceptActive || len(s.Warnings) > 0 {
					t.Errorf("%+v", s)
				}
				if err := all(i, 2)(); err != nil {
					t.Error(err)
				}
				if cmp.Equal(template, w.objects["deployments/web"]) || cmp.Equal(service, w.objects["services/web"]) {
					t.Error("the template or the Service has not changed")
				}
				if a := w.agents[w.list[0].UID]; a == nil || a.held() != 1 || a.claims[0].Ports[0].Listen == 0 {
					t.Errorf("the agent has %+v", a)
				}
				tt.end(t, w, stop)
				if d := cmp.Diff(template, w.objects["deployments/web"]); d != "" {
					t.Errorf("the template (-before +after):\n%s", d)
				}
				if d := cmp.Diff(service, w.objects["services/web"]); d != "" {
					t.Errorf("the Service (-before +after):\n%s", d)
				}
				if len(w.injected) > 0 {
					t.Errorf("agents were added to %v", w.injected)
				}
			})
		})
	}
}

// With the strategy Recreate, no old pod runs while the last new one starts.
func TestRolloutWaitsForThePodsThatStart(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		start := func(p *corev1.Pod) {
			agent := p.Spec.Containers[slices.IndexFunc(p.Spec.Containers, func(c corev1.Container) bool { return api.IsAgent(c.Name) })]
			w.agents[p.UID] = startAgent(t, nil)
			w.agents[p.UID].admit(agent.Env[0].Value, agent.Env[1].Value)
			close(w.logged[p.UID])
			w.logged[p.UID] = make(chan struct{})
		}
		w.admit = func(p *corev1.Pod) {
			w.list = slices.DeleteFunc(w.list, func(p *corev1.Pod) bool { return strings.HasPrefix(p.Name, "web-") })
			if p.Name == "new-2-0" {
				start(p)
				return
			}
			later := p.DeepCopy()
			p.Status.PodIP = ""
			time.AfterFunc(10*time.Second, func() {
				w.mu.Lock()
				defer w.mu.Unlock()
				w.list[slices.Index(w.list, p)] = later
				start(later)
				w.notify()
			})
		}
		i, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
		if err != nil {
			t.Fatal(err)
		}
		if err := all(i, 2)(); err != nil {
			t.Error(err)
		}
	})
}

// waits lets a container of the new pods wait.
func waits(container, reason, message string) func(*world, map[string]any) {
	return func(w *world, _ map[string]any) {
		w.admit = func(p *corev1.Pod) {
			p.Status.ContainerStatuses = []corev1.ContainerStatus{{Name: container, State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}}}
		}
	}
}

// condition gives the workload a condition when it changes.
func condition(kind, status, reason, message string) func(*world, map[string]any) {
	return func(w *world, _ map[string]any) {
		w.admit = func(p *corev1.Pod) {
			w.list = w.list[:len(w.list)-1]
			_ = unstructured.SetNestedSlice(w.objects["deployments/web"].Object, []any{map[string]any{"type": kind, "status": status, "reason": reason, "message": message}}, "status", "conditions")
		}
	}
}

// event creates a warning about an object.
func (w *world) event(of types.UID, reason, message string, at time.Time) {
	e := &corev1.Event{ObjectMeta: metav1.ObjectMeta{Name: string(of) + message, Namespace: "default"}, InvolvedObject: corev1.ObjectReference{UID: of},
		Type: corev1.EventTypeWarning, Reason: reason, Message: message, LastTimestamp: metav1.NewTime(at)}
	if _, err := w.kube.CoreV1().Events("default").Create(context.Background(), e, metav1.CreateOptions{}); err != nil && !apierrors.IsAlreadyExists(err) {
		w.t.Error(err)
	}
}

// A rollout that the spec rules out fails at once, and one that the cluster does not carry out soon, with its reason.
// The template is as before.
func TestRolloutThatCannotHappenFails(t *testing.T) {
	for _, tt := range []struct {
		name, mode string
		plant      func(w *world, spec map[string]any)
		want       string
		within     time.Duration
	}{
		{"paused", api.ModeSidecar, func(_ *world, spec map[string]any) { spec["paused"] = true }, "it is paused", 0},
		{"paused_auto", api.ModeAuto, func(_ *world, spec map[string]any) { spec["paused"] = true }, "(?s)pod security forbids it.*A sidecar is no way either.*it is paused", 0},
		{"on_delete", api.ModeSidecar, func(_ *world, spec map[string]any) {
			spec["updateStrategy"] = map[string]any{"type": "OnDelete"}
		}, "its updateStrategy is OnDelete", 0},
		{"partition", api.ModeSidecar, func(_ *world, spec map[string]any) {
			spec["updateStrategy"] = map[string]any{"type": "RollingUpdate", "rollingUpdate": map[string]any{"partition": int64(1)}}
		}, "the partition of its updateStrategy is 1", 0},
		{"quota", api.ModeAuto, func(w *world, _ map[string]any) {
			w.obstacle = "exceeded quota: must specify limits.cpu for: kubevpn-agent-1"
		}, "creates no pod of deployment/web with the agent: exceeded quota: must specify limits.cpu", 30 * time.Second},
		{"quota_in_the_second_in_which_the_pods_began", api.ModeSidecar, func(w *world, _ map[string]any) {
			for _, p := range w.list {
				p.CreationTimestamp = metav1.Now()
			}
			w.obstacle = "exceeded quota: must specify limits.cpu for: kubevpn-agent-1"
		}, "creates no pod of deployment/web with the agent: exceeded quota: must specify limits.cpu", 30 * time.Second},
		{"slow_by_the_spec", api.ModeSidecar, func(_ *world, spec map[string]any) { spec["minReadySeconds"] = int64(600) }, "only after 600 s \\(minReadySeconds\\)", 0},
		{"template_refused", api.ModeSidecar, func(w *world, _ map[string]any) {
			w.refuses = apierrors.NewForbidden(schema.GroupResource{Resource: "deployments"}, "web", errors.New("admission webhook \"p\" denied the request:\n only approved containers"))
		}, "does not admit the change of deployments web: .* denied the request: only approved containers", 0},
		{"agent_removed_from_pods", api.ModeSidecar, func(w *world, _ map[string]any) {
			w.admit = func(p *corev1.Pod) { p.Spec.Containers = p.Spec.Containers[1:] }
		}, "the pod new-2-0 was created without the agent, which the template of deployment/web has: an admission webhook", 30 * time.Second},
		{"agent_renamed", api.ModeSidecar, func(w *world, _ map[string]any) {
			w.ahead = -time.Hour // the laptop's clock is ahead
			w.admit = func(p *corev1.Pod) { p.Spec.Containers[0].Name = "x" }
		}, "was created without the agent", 30 * time.Second},
		{"agent_cannot_start", api.ModeSidecar, waits("kubevpn-agent-1", "CreateContainerConfigError", "container has runAsNonRoot and image will run as root"),
			"cannot start the container kubevpn-agent-1 of pod new-2-0: CreateContainerConfigError: container has runAsNonRoot", 30 * time.Second},
		{"application_cannot_start", api.ModeSidecar, waits("app", "CreateContainerConfigError", "secret \"x\" not found"), "cannot start the container app .*secret \"x\" not found", 30 * time.Second},
		{"volume", api.ModeSidecar, func(w *world, _ map[string]any) {
			w.admit = func(p *corev1.Pod) {
				p.Status.Phase = corev1.PodPending
				w.event(p.UID, "FailedAttachVolume", "Multi-Attach error for volume \"pvc-1\"", time.Now())
			}
		}, "the pod new-2-0 is not ready: Multi-Attach error", 30 * time.Second},
		{"argo_step", api.ModeSidecar, condition("Paused", "True", "CanaryPauseStep", "Rollout is paused"), "Paused, True: CanaryPauseStep: Rollout is paused", 30 * time.Second},
		{"deadline", api.ModeSidecar, condition("Progressing", "False", "ProgressDeadlineExceeded", "has timed out progressing"), "ProgressDeadlineExceeded: has timed out", 30 * time.Second},
		{"never_ready", api.ModeSidecar, func(w *world, _ map[string]any) {
			w.admit = func(p *corev1.Pod) {
				p.Status.PodIP = ""
				w.event(p.UID, "Unhealthy", "Readiness probe failed: HTTP probe failed with statuscode: 503", time.Now())
			}
		}, "did not finish within 3m0s: the pod new-2-. is not ready: Readiness probe failed", rolloutTimeout},
		{"failed_create_of_another_clock", api.ModeSidecar, func(w *world, _ map[string]any) {
			w.ahead = -time.Hour // the laptop's clock is ahead
			w.admit = func(p *corev1.Pod) { w.list = w.list[:len(w.list)-1] }
			w.event("", "FailedCreate", "an old warning", time.Now().Add(-2*time.Hour))
			w.event("", "FailedCreate", "admission webhook denied the request: no sidecars", time.Now().Add(w.ahead+time.Second))
		}, "the cluster creates no pod of deployment/web with the agent: admission webhook denied the request: no sidecars", 30 * time.Second},
		{"statefulset_waits", api.ModeSidecar, func(w *world, _ map[string]any) {
			w.workload.Kind = "StatefulSet"
			w.admit = func(p *corev1.Pod) { w.list = w.list[:len(w.list)-1] }
			w.list[1].Status.ContainerStatuses = []corev1.ContainerStatus{{Name: "app", State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ImagePullBackOff"}}}}
			w.list[0].Status.Conditions = []corev1.PodCondition{{Type: corev1.PodReady, Status: corev1.ConditionTrue}}
		}, "deployment/web replaces no pod before its pod web-b is ready: .*ImagePullBackOff", 30 * time.Second},
		{"restored_at_once", api.ModeSidecar, func(w *world, _ map[string]any) {
			before := runtime.DeepCopyJSON(w.objects["deployments/web"].Object)
			w.admit = func(*corev1.Pod) { w.objects["deployments/web"].Object = runtime.DeepCopyJSON(before) }
		}, "somebody has removed the agent from the template of deployment/web", 30 * time.Second},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a", "web-b")
				w.refused = func(*corev1.Pod) error { return api.Errorf(api.ExitInject, "pod security forbids it") }
				tt.plant(w, w.objects["deployments/web"].Object["spec"].(map[string]any))
				template := w.objects["deployments/web"].DeepCopy().Object["spec"]
				began := time.Now()
				_, _, err := begin(t, w, api.InterceptSpec{Mode: tt.mode, Ports: []api.PortMap{{Container: 8080}}})
				e := api.AsError(err)
				if e == nil || e.Code != api.ExitInject && tt.name != "restored_at_once" || !regexp.MustCompile(tt.want).MatchString(e.Message+e.Hint) || e.Hint == "" {
					t.Errorf("got %+v", e)
				}
				if took := time.Since(began); took > tt.within {
					t.Errorf("after %v", took)
				}
				if d := cmp.Diff(template, w.objects["deployments/web"].Object["spec"]); d != "" {
					t.Errorf("the template (-before +after):\n%s", d)
				}
			})
		})
	}
}

func TestUnreadableTemplateIsLogged(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		var log logBuffer
		w.logger = slog.New(slog.NewTextHandler(&log, nil))
		if _, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}}); err != nil {
			t.Fatal(err)
		}
		w.set("deployments", "x", "{}", func(o map[string]any) map[string]any {
			unstructured.RemoveNestedField(o, "spec", "template", "spec", "containers")
			return o
		})
		testenv.Eventually(t, 5*time.Second, func() error {
			if text := log.String(); !strings.Contains(text, "cannot read the template") ||
				!strings.Contains(text, "it has no containers") {
				return errors.New(text)
			}
			return nil
		})
	})
}

// logBuffer is a log that a test reads while others write.
type logBuffer struct {
	mu sync.Mutex
	b  strings.Builder
}

func (l *logBuffer) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *logBuffer) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

func TestBypassedSidecarHasCausesOfItsOwn(t *testing.T) {
	for name, tt := range map[string]struct {
		annotations map[string]string
		want        string
	}{
		"no_mesh": {nil, "has restored the Service's target port"},
		"mesh":    {map[string]string{"ambient.istio.io/redirection": "enabled"}, "Istio in ambient mode, which receives"},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a")
				w.bypass, w.annotations = true, tt.annotations
				_, _, err := begin(t, w, api.InterceptSpec{Mode: api.ModeSidecar, Ports: []api.PortMap{{Container: 8080}}})
				e := api.AsError(err)
				if e == nil || e.Code != api.ExitIntercept || !strings.Contains(e.Hint, tt.want) {
					t.Fatalf("got %+v", e)
				}
				if strings.Contains(e.Hint, "--mode sidecar") || strings.Contains(e.Hint, "netfilter") {
					t.Errorf("the hint is for an ephemeral agent: %s", e.Hint)
				}
			})
		})
	}
}

// TestModeIsChosenByAnotherPod has a pod that a rollout deletes while the intercept asks about it. The list of pods
// shows that, and the next pod, later.
func TestModeIsChosenByAnotherPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		var changing sync.WaitGroup
		w.refused = func(p *corev1.Pod) error {
			if p.Name != "web-a" {
				return api.Errorf(api.ExitInject, "pod security forbids it")
			}
			changing.Go(func() {
				time.Sleep(time.Second)
				w.addPod("web-b")
				w.removePod("web-a")
			})
			return client.PodGone(p.Namespace, p.Name)
		}
		i, _, err := begin(t, w, api.InterceptSpec{Ports: []api.PortMap{{Container: 8080}}})
		changing.Wait()
		if err != nil {
			t.Fatal(err)
		}
		if s := i.Status(); s.Mode != api.ModeSidecar || s.ModeReason != "pod security forbids it" {
			t.Errorf("mode %s: %s", s.Mode, s.ModeReason)
		}
	})
}

func TestModeIsNotChosenWhenEachPodIsGone(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-0", "web-1", "web-2", "web-3", "web-4", "web-5", "web-6", "web-7")
		asked := 0
		w.refused = func(p *corev1.Pod) error {
			asked++
			return client.PodGone(p.Namespace, p.Name)
		}
		if _, _, err := begin(t, w, api.InterceptSpec{}); !errors.Is(err, client.ErrPodGone) || asked != maxGonePods+1 {
			t.Errorf("asked about %d pods: %v", asked, err)
		}
	})
}

// If the traffic manager does not reach pods, the probes fail, and their result is unknown.
func TestPortForwardToAgentWarnsOfUnknownProbes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		w.noRoute = true
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		s := i.Status()
		if s.State != api.InterceptActive || len(s.Warnings) == 0 || !strings.Contains(s.Warnings[0], "no answer") {
			t.Errorf("%+v", s)
		}
	})
}

func TestNextInterceptUsesRunningAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		key := newKey(t)
		for n := range 2 {
			i, err := newIntercept(Config{
				Session: w, Namespace: "default", Workload: "deployment/web", Owner: "ann@laptop", Key: key, Progress: func(api.Event) {}, Logger: quiet(),
			}, w, w.dynamic())
			if err != nil {
				t.Fatal(err)
			}
			done := make(chan error, 1)
			ctx, cancel := context.WithCancel(t.Context())
			go func() { done <- i.Run(ctx) }()
			select {
			case <-i.Begun():
			case err := <-done:
				t.Fatal(n, err)
			}
			cancel()
			if err := <-done; err != nil {
				t.Error(n, err)
			}
		}
		if len(w.injected) != 1 {
			t.Errorf("agents were added to %v", w.injected)
		}
	})
}

func TestDialAgentRejectsOtherKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a := startAgent(t, nil)
		defer a.end()
		mine, err := newIdentity(newKey(t))
		if err != nil {
			t.Fatal(err)
		}
		a.admit(mine.hash, "ann@laptop")
		if _, err := dialAgent(t.Context(), mine.tlsConfig(mine.hash), a.listener.Dial, a.listener.Dial); !errors.Is(err, errOtherAgent) {
			t.Errorf("got %v", err)
		}
		conn, err := dialAgent(t.Context(), mine.tlsConfig(a.info.Key), a.listener.Dial, a.listener.Dial)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	})
}

func TestResetEndsAllInterceptsAndSkipsPodsWithoutAgent(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		i, stop, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		w.place = "" // web-c has no node, so no agent
		w.addPod("web-c")
		var mu sync.Mutex
		var events []api.Event
		cfg := ResetConfig{
			Namespace: "default", Workload: "deployment/web", Owner: "root@desk", Key: newKey(t), Logger: quiet(), Image: w.Image,
			Progress: func(e api.Event) {
				mu.Lock()
				defer mu.Unlock()
				events = append(events, e)
			},
		}
		if err := resetAll(t.Context(), cfg, w, w.dynamic()); err != nil {
			t.Fatal(err)
		}
		if last := events[len(events)-1]; !last.Done || last.Detail != "ann@laptop: everything" {
			t.Errorf("%+v", last)
		}
		if err := stop(); api.AsError(err) == nil || api.AsError(err).Code != api.ExitIntercept || i.Status().State != api.InterceptFailed {
			t.Errorf("the intercept ended with %v: %+v", err, i.Status())
		}
		slices.Sort(w.injected)
		if want := []string{"web-a", "web-a", "web-b", "web-b"}; !slices.Equal(w.injected, want) {
			t.Errorf("agents were added to %v", w.injected)
		}
		w.denied = api.Errorf(api.ExitPermission, "you may not patch deployments")
		if err := resetAll(t.Context(), cfg, w, w.dynamic()); api.AsError(err).Code != api.ExitPermission {
			t.Errorf("without permission: %v", err)
		}
	})
}

// A dial reports its deadline, or that of its context: whichever timer fires first.
func TestProbeWithoutAnAnswer(t *testing.T) {
	to := target{"tcp", netip.MustParseAddrPort("10.96.0.1:80")}
	for _, silence := range []error{os.ErrDeadlineExceeded, context.DeadlineExceeded} {
		dials := 0
		pr := prober{dial: func(context.Context, string, netip.AddrPort) (net.Conn, error) {
			dials++
			return nil, &net.OpError{Op: "dial", Err: silence}
		}}
		c, v := pr.untilReached(t.Context(), "pod", to, 3, func() []*agentSession { return nil })
		if v != probeTimedOut || c.Seen != "no answer" || dials != 1 {
			t.Errorf("%v: verdict %v after %d dials, %+v", silence, v, dials, c)
		}
	}
}
