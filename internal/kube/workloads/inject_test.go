package workloads

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	dynamicfake "k8s.io/client-go/dynamic/fake"
	"k8s.io/client-go/kubernetes/fake"
	k8stesting "k8s.io/client-go/testing"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

var (
	running = corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}
	died    = corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{ExitCode: 137, Reason: "OOMKilled"}}
	me      = Agent{Image: "registry.example/kubevpn:1", Owner: "5e2f", OwnerName: "me@$(HOME)"}
	another = Agent{Image: me.Image, Owner: "77aa", OwnerName: "you@host"}
)

// holding is a pod with agents.
func holding(agents ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{ObjectMeta: metav1.ObjectMeta{Name: "web-1", Namespace: "ns", UID: "1"}}
	for _, add := range agents {
		add(p)
	}
	return p
}

func with(name string, a Agent, states ...corev1.ContainerState) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, a.container(name))
		for _, s := range states {
			p.Status.EphemeralContainerStatuses = append(p.Status.EphemeralContainerStatuses, corev1.ContainerStatus{Name: name, State: s})
		}
	}
}

// ephemeral makes the fake API server add ephemeral containers as the real one does, without changing any.
func ephemeral(t *testing.T, kube *fake.Clientset, refuse error) (added *[]string) {
	added = new([]string)
	kube.PrependReactor("patch", "pods", func(a k8stesting.Action) (bool, runtime.Object, error) {
		patch := a.(k8stesting.PatchActionImpl)
		if patch.GetSubresource() != "ephemeralcontainers" {
			t.Errorf("patches %s", patch.GetSubresource())
		}
		if refuse != nil {
			return true, nil, refuse
		}
		obj, err := kube.Tracker().Get(patch.GetResource(), patch.Namespace, patch.Name)
		if err != nil {
			return true, nil, err
		}
		p := obj.(*corev1.Pod).DeepCopy()
		var want corev1.Pod
		if err := json.Unmarshal(patch.Patch, &want); err != nil {
			return true, nil, err
		}
		if want.UID != p.UID {
			return true, nil, apierrors.NewConflict(corev1.Resource("pods"), p.Name, errors.New("UID"))
		}
		c := want.Spec.EphemeralContainers[0]
		if i := slices.IndexFunc(p.Spec.EphemeralContainers, func(o corev1.EphemeralContainer) bool { return o.Name == c.Name }); i >= 0 {
			if !cmp.Equal(p.Spec.EphemeralContainers[i], c) {
				return true, nil, apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, p.Name, nil)
			}
			return true, p, nil
		}
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, c)
		if len(patch.PatchOptions.DryRun) > 0 {
			return true, p, nil
		}
		*added = append(*added, c.Name)
		return true, p, kube.Tracker().Update(patch.GetResource(), p, p.Namespace)
	})
	return added
}

func TestInjectAddsAnAgentOnce(t *testing.T) {
	hostNetwork := func(p *corev1.Pod) { p.Spec.HostNetwork = true }
	old := Agent{Image: "registry.example/kubevpn:0", Owner: me.Owner}
	debugger := func(p *corev1.Pod) {
		p.Spec.EphemeralContainers = append(p.Spec.EphemeralContainers, corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{Name: "kubevpn-agent-x"}})
	}
	rbac := apierrors.NewForbidden(corev1.Resource("pods"), "web-1", errors.New(`User "dev" cannot patch resource "pods/ephemeralcontainers" in API group "" in the namespace "ns"`))
	security := apierrors.NewForbidden(corev1.Resource("pods"), "web-1", errors.New(`violates PodSecurity "baseline:latest": non-default capabilities`))
	webhook := &apierrors.StatusError{ErrStatus: metav1.Status{Code: 400, Message: `admission webhook "policy.example" denied the request: no debugging`}}
	noDryRun := apierrors.NewBadRequest(`admission webhook "x" does not support dry run`)
	noAPI := &apierrors.StatusError{ErrStatus: metav1.Status{Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound,
		Message: "the server could not find the requested resource", Details: &metav1.StatusDetails{}}}
	for _, tt := range []struct {
		name   string
		seen   *corev1.Pod // the laptop's outdated copy; nil: pod
		pod    *corev1.Pod // in the cluster; nil: none
		refuse error
		want   string
		added  bool
		same   bool // the patch adds a container that is there already
		may    bool // MayInject succeeds although the cluster rejects the patch
		code   api.ExitCode
		err    string
		hint   string
		gone   bool
	}{
		{name: "first", pod: holding(), want: "kubevpn-agent-1", added: true},
		{name: "second", pod: holding(with("kubevpn-agent-1", another, running), debugger), want: "kubevpn-agent-2", added: true},
		{name: "there", pod: holding(with("kubevpn-agent-1", another, running), with("kubevpn-agent-2", me, running)), want: "kubevpn-agent-2"},
		{name: "there_and_not_started", pod: holding(with("kubevpn-agent-3", me)), want: "kubevpn-agent-3"},
		{name: "there_and_old", pod: holding(with("kubevpn-agent-1", old, running)), want: "kubevpn-agent-2", added: true},
		{name: "died", pod: holding(with("kubevpn-agent-9", me, died)), want: "kubevpn-agent-10", added: true},
		{name: "name_taken_meanwhile", seen: holding(), pod: holding(with("kubevpn-agent-1", another, running)), want: "kubevpn-agent-2", added: true},
		{name: "there_meanwhile", seen: holding(), pod: holding(with("kubevpn-agent-1", another, running), with("kubevpn-agent-2", me)), want: "kubevpn-agent-2"},
		{name: "died_unseen", seen: holding(), pod: holding(with("kubevpn-agent-1", me, died)), want: "kubevpn-agent-2", added: true},
		{name: "there_unseen", same: true, seen: holding(), pod: holding(with("kubevpn-agent-1", me, running)), want: "kubevpn-agent-1"},
		{name: "gone", seen: holding(), code: api.ExitInject, err: "the pod ns/web-1 has gone", hint: "get pods", gone: true},
		{name: "going", pod: holding(func(p *corev1.Pod) { p.DeletionTimestamp = new(metav1.Now()); p.Finalizers = []string{"x"} }), code: api.ExitInject, err: "has gone", gone: true},
		{name: "finished", pod: holding(func(p *corev1.Pod) { p.Status.Phase = corev1.PodFailed }), code: api.ExitInject, err: "has gone", gone: true},
		{name: "host_network", pod: holding(hostNetwork), code: api.ExitWorkload, err: "hostNetwork", hint: "of their own"},
		{name: "sidecar", pod: holding(func(p *corev1.Pod) { p.Spec.Containers = []corev1.Container{{Name: "app"}, {Name: "kubevpn-agent-1"}} }),
			code: api.ExitInject, err: "the pod web-1 has an agent as a sidecar", hint: "--mode sidecar"},
		{name: "rbac", pod: holding(), refuse: rbac, code: api.ExitPermission, err: "this requires the right to patch pods/ephemeralcontainers in namespace ns",
			hint: "kubectl create role kubevpn-patch-pods-ephemeralcontainers --namespace=ns --verb=patch --resource=pods/ephemeralcontainers\nkubectl create rolebinding"},
		{name: "pod_security", pod: holding(), refuse: security, code: api.ExitInject, err: `pod security does not admit the traffic agent in the namespace ns: violates PodSecurity "baseline:latest": non-default`,
			hint: "kubectl label namespace ns pod-security.kubernetes.io/enforce=privileged --overwrite"},
		{name: "webhook", pod: holding(), refuse: webhook, code: api.ExitInject, err: "no debugging", hint: "--mode sidecar"},
		{name: "quota", pod: holding(), refuse: apierrors.NewForbidden(corev1.Resource("pods"), "web-1", errors.New("exceeded quota")), code: api.ExitInject, err: "exceeded quota", hint: "admin"},
		{name: "invalid", pod: holding(), refuse: apierrors.NewInvalid(schema.GroupKind{Kind: "Pod"}, "web-1", nil), code: api.ExitInject, err: "is invalid", hint: "--mode sidecar"},
		{name: "no_ephemeral_containers", pod: holding(), refuse: noAPI, code: api.ExitInject, err: "no ephemeral containers", hint: "--mode sidecar"},
		{name: "webhook_without_dry_run", pod: holding(), refuse: noDryRun, may: true, code: api.ExitInject, err: "does not support dry run"},
		{name: "overloaded", pod: holding(), refuse: apierrors.NewTooManyRequestsError("wait"), code: api.ExitUnreachable, err: "is busy"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			kube := fake.NewClientset()
			if tt.pod != nil {
				if err := kube.Tracker().Add(tt.pod); err != nil {
					t.Fatal(err)
				}
			}
			added := ephemeral(t, kube, tt.refuse)
			r, seen := Client{fakeAPI{kube: kube}}, tt.seen
			if seen == nil {
				seen = tt.pod
			}
			check := func(name string, err error) {
				t.Helper()
				if tt.err == "" {
					if err != nil || name != tt.want {
						t.Errorf("got %q, %v, want %q", name, err, tt.want)
					}
					return
				}
				e := explain(t, err)
				if e == nil || e.Code != tt.code || !strings.Contains(e.Message, tt.err) || !strings.Contains(e.Hint, tt.hint) || e.Hint == "" {
					t.Errorf("got %+v, want code %d, %q, hint %q", e, tt.code, tt.err, tt.hint)
				}
				if errors.Is(err, client.ErrPodGone) != tt.gone {
					t.Errorf("the pod has gone: want %v, by %v", tt.gone, err)
				}
			}
			name, _, err := r.inject(t.Context(), seen, me, true)
			if tt.may {
				if err != nil {
					t.Errorf("may not: %v", err)
				}
			} else {
				check(name, err)
			}
			if len(*added) > 0 {
				t.Fatalf("asking whether one may has added %q", *added)
			}
			name, fresh, err := r.inject(t.Context(), seen, me, false)
			check(name, err)
			if err == nil && fresh != (tt.added || tt.same) {
				t.Errorf("says that it was added: %v", fresh)
			}
			if got := fmt.Sprint(*added); got != "[]" != tt.added || tt.added && got != "["+tt.want+"]" {
				t.Errorf("added %s", got)
			}
		})
	}
}

// Another writer wins each time.
func TestInjectGivesUpAfterConflicts(t *testing.T) {
	p := holding()
	kube := fake.NewClientset(p.DeepCopy())
	kube.PrependReactor("patch", "pods", func(k8stesting.Action) (bool, runtime.Object, error) {
		with(me.ephemeral().next(p), another, running)(p)
		if err := kube.Tracker().Update(corev1.SchemeGroupVersion.WithResource("pods"), p.DeepCopy(), "ns"); err != nil {
			t.Error(err)
		}
		return true, nil, apierrors.NewConflict(corev1.Resource("pods"), p.Name, errors.New("changed"))
	})
	_, _, err := Client{fakeAPI{kube: kube}}.inject(t.Context(), holding(), me, false)
	if e := explain(t, err); e == nil || e.Code != api.ExitInject || !strings.Contains(e.Message, "others keep adding containers") {
		t.Errorf("got %v", err)
	}
}

func TestMayPatchNamesTheRefusal(t *testing.T) {
	group := schema.GroupResource{Group: "apps", Resource: "deployments"}
	for _, tt := range []struct {
		name   string
		refuse error
		code   api.ExitCode
		err    string
		hint   string
	}{
		{name: "yes"},
		{name: "webhook_without_dry_run", refuse: apierrors.NewBadRequest(`admission webhook "x" does not support dry run`)},
		{name: "rbac", refuse: apierrors.NewForbidden(group, "web", errors.New(`User "dev" cannot patch resource "deployments" in API group "apps" in the namespace "ns"`)),
			code: api.ExitPermission, err: "you may not intercept deployment/web: this requires the right to patch deployments in namespace ns", hint: "--verb=patch --resource=deployments.apps"},
		{name: "gone", refuse: apierrors.NewNotFound(group, "web"), code: api.ExitWorkload, err: "there is no longer a deployment/web in the namespace ns", hint: "get deployment"},
		{name: "policy", refuse: apierrors.NewForbidden(group, "web", errors.New("locked")), code: api.ExitPermission, err: "locked"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			r, _ := worldOf(t, "", aWorld)
			d := r.Dynamic().(*dynamicfake.FakeDynamicClient)
			d.PrependReactor("patch", "deployments", func(a k8stesting.Action) (bool, runtime.Object, error) {
				patch := a.(k8stesting.PatchActionImpl)
				if string(patch.Patch) != "{}" || !slices.Equal(patch.PatchOptions.DryRun, []string{"All"}) {
					t.Errorf("patches %s, dry run %v", patch.Patch, patch.PatchOptions.DryRun)
				}
				return tt.refuse != nil, nil, tt.refuse
			})
			w, err := r.read(t.Context(), "ns", "deploy/web")
			if err != nil {
				t.Fatal(err)
			}
			err = r.mayPatch(t.Context(), w)
			if tt.err == "" {
				if err != nil {
					t.Error(err)
				}
				return
			}
			e := explain(t, err)
			if e == nil || e.Code != tt.code || !strings.Contains(e.Message, tt.err) || !strings.Contains(e.Hint, tt.hint) {
				t.Errorf("got %+v, want code %d, %q, hint %q", e, tt.code, tt.err, tt.hint)
			}
		})
	}
}

func TestAgentContainerHasOneCapability(t *testing.T) {
	c := me.container("kubevpn-agent-1")
	if v := c.Env[1].Value; v != "me@$$(HOME)" {
		t.Errorf("the owner's name is %q, in which the kubelet would replace a variable", v)
	}
	s := c.SecurityContext
	if s.Privileged != nil || *s.AllowPrivilegeEscalation || *s.RunAsUser != 0 || *s.RunAsNonRoot || !*s.ReadOnlyRootFilesystem ||
		!slices.Equal(s.Capabilities.Drop, []corev1.Capability{"ALL"}) || !slices.Equal(s.Capabilities.Add, []corev1.Capability{"NET_ADMIN"}) ||
		s.SeccompProfile.Type != corev1.SeccompProfileTypeRuntimeDefault {
		t.Errorf("security context %+v", s)
	}
}

// Where pod security admits no capability, an agent that only dials is admitted without one. Such an agent serves no
// intercept.
func TestAgentThatDialsNeedsNoCapability(t *testing.T) {
	kube := fake.NewClientset(holding())
	added := ephemeral(t, kube, nil)
	kube.PrependReactor("patch", "pods", func(a k8stesting.Action) (bool, runtime.Object, error) {
		if strings.Contains(string(a.(k8stesting.PatchActionImpl).Patch), "NET_ADMIN") {
			return true, nil, apierrors.NewForbidden(corev1.Resource("pods"), "web-1",
				errors.New(`violates PodSecurity "restricted:latest": unrestricted capabilities`))
		}
		return false, nil, nil
	})
	r, dials := Client{fakeAPI{kube: kube}}, me
	dials.Dials = true
	for range 2 { // the second time it is there
		pod, err := kube.CoreV1().Pods("ns").Get(t.Context(), "web-1", metav1.GetOptions{})
		if err != nil {
			t.Fatal(err)
		}
		if name, _, err := r.inject(t.Context(), pod, dials, false); err != nil || name != "kubevpn-agent-1" {
			t.Errorf("added %q, %v", name, err)
		}
		if _, _, err := r.inject(t.Context(), pod, me, false); api.AsError(err) == nil || api.AsError(err).Code != api.ExitInject {
			t.Errorf("an agent that redirects: %v", err)
		}
	}
	if len(*added) != 1 {
		t.Errorf("added %v", *added)
	}
}
