package install

import (
	"strings"
	"testing"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

// aPod builds a pod of the manager in one state.
func aPod(name string, edit ...func(*corev1.Pod)) *corev1.Pod {
	p := &corev1.Pod{
		ObjectMeta: metav1.ObjectMeta{Name: name, Namespace: "kubevpn", Labels: selectorLabels()},
		Spec: corev1.PodSpec{
			NodeName:   "node1",
			Containers: []corev1.Container{{Name: containerName, Image: "registry.example/kubevpn:1"}},
		},
		Status: corev1.PodStatus{Phase: corev1.PodPending},
	}
	for _, f := range edit {
		f(p)
	}
	return p
}

func hashed(hash string) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		p.Labels = selectorLabels()
		p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] = hash
	}
}

func container(s corev1.ContainerStatus) func(*corev1.Pod) {
	return func(p *corev1.Pod) {
		s.Name, s.Image = containerName, "registry.example/kubevpn:1"
		p.Status.ContainerStatuses = []corev1.ContainerStatus{s}
	}
}

func running(p *corev1.Pod) {
	p.Status.Phase = corev1.PodRunning
	container(corev1.ContainerStatus{State: corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}})(p)
}

func ready(p *corev1.Pod) {
	running(p)
	p.Status.Conditions = append(p.Status.Conditions, corev1.PodCondition{Type: corev1.PodReady, Status: corev1.ConditionTrue})
}

func going(p *corev1.Pod) { p.DeletionTimestamp = &metav1.Time{Time: time.Now()} }

func waiting(reason, message string) func(*corev1.Pod) {
	return container(corev1.ContainerStatus{State: corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: message}}})
}

func aDeployment(generation, seen int64, replicas int32) *appsv1.Deployment {
	d := deployment(Options{Image: "registry.example/kubevpn:1"})
	d.Generation, d.Status.ObservedGeneration, d.Spec.Replicas = generation, seen, &replicas
	d.Annotations = map[string]string{"deployment.kubernetes.io/revision": "2"}
	return d
}

func aSet(revision, hash, failure string) *appsv1.ReplicaSet {
	rs := &appsv1.ReplicaSet{ObjectMeta: metav1.ObjectMeta{
		Name: "rs" + revision, Annotations: map[string]string{"deployment.kubernetes.io/revision": revision},
		Labels: map[string]string{appsv1.DefaultDeploymentUniqueLabelKey: hash},
	}}
	if failure != "" {
		rs.Status.Conditions = []appsv1.ReplicaSetCondition{{Type: appsv1.ReplicaSetReplicaFailure, Status: corev1.ConditionTrue, Reason: "FailedCreate", Message: failure}}
	}
	return rs
}

func TestJudgeNamesTheProblemOfAPod(t *testing.T) {
	pods := func(p ...*corev1.Pod) snapshot { return snapshot{namespace: "kubevpn", pods: p} }
	crashed := corev1.ContainerStatus{
		RestartCount: 1,
		State:        corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "CrashLoopBackOff", Message: "back-off 10s"}},
		LastTerminationState: corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{
			ExitCode: 1, Reason: "Error", Message: "one\ntwo\nthree\ntraffic: listening: address in use\n",
		}},
	}
	unschedulable := func(p *corev1.Pod) {
		p.Spec.NodeName = ""
		p.Status.Conditions = []corev1.PodCondition{{Type: corev1.PodScheduled, Status: corev1.ConditionFalse, Reason: corev1.PodReasonUnschedulable, Message: "0/2 nodes are available: 2 Insufficient cpu."}}
	}
	tests := []struct {
		name     string
		snapshot snapshot
		pod      string
		ready    bool
		detail   string
		code     api.ExitCode // of the problem; 0: none
		message  string
		grace    time.Duration
	}{
		{name: "nothing", snapshot: pods(), detail: "waiting for a pod"},
		{name: "ready", snapshot: pods(aPod("a", ready)), pod: "a", ready: true},
		{name: "running", snapshot: pods(aPod("a", running)), pod: "a", detail: "the pod a runs and is not ready yet"},
		{name: "ready before running", snapshot: pods(aPod("a", running), aPod("b", ready)), pod: "b", ready: true},
		{name: "going", snapshot: pods(aPod("a", ready, going)), detail: "waiting for a pod"},
		{name: "broken beside ready", snapshot: pods(aPod("a", waiting("ImagePullBackOff", "no")), aPod("b", ready)), pod: "b", ready: true},
		{name: "no node yet", snapshot: pods(aPod("a", func(p *corev1.Pod) { p.Spec.NodeName = "" })), detail: "waiting for a node"},
		{name: "starting", snapshot: pods(aPod("a")), detail: "the node node1 is starting the pod"},
		{name: "creating", snapshot: pods(aPod("a", waiting("ContainerCreating", ""))), detail: "the node node1 is pulling the image and starting the container"},
		{name: "unschedulable", snapshot: pods(aPod("a", unschedulable)), detail: "no node can run the pod: 0/2 nodes are available: 2 Insufficient cpu",
			code: api.ExitNotReady, message: "no node can run the pod a of the traffic manager: 0/2 nodes are available: 2 Insufficient cpu", grace: graceRoom},
		{name: "image, first", snapshot: pods(aPod("a", waiting("ErrImagePull", "not found"))), detail: "ErrImagePull: not found",
			code: api.ExitImagePull, message: "the node node1 cannot pull the image registry.example/kubevpn:1: ErrImagePull: not found", grace: graceRetry},
		{name: "image, again", snapshot: pods(aPod("a", waiting("ImagePullBackOff", `Back-off pulling image "x": ErrImagePull: not found`))), detail: `ImagePullBackOff: not found`,
			code: api.ExitImagePull, message: "the node node1 cannot pull the image registry.example/kubevpn:1: ImagePullBackOff: not found"},
		{name: "image, never", snapshot: pods(aPod("a", waiting("ErrImageNeverPull", "is not present"))), detail: "ErrImageNeverPull: is not present",
			code: api.ExitImagePull, message: "the node node1 cannot pull the image registry.example/kubevpn:1: ErrImageNeverPull: is not present"},
		{name: "crash loop", snapshot: pods(aPod("a", container(crashed))), detail: "two; three; traffic: listening: address in use",
			code: api.ExitNotReady, message: "the traffic manager has ended with exit code 1: two; three; traffic: listening: address in use"},
		{name: "root image", snapshot: pods(aPod("a", waiting("CreateContainerConfigError", "container has runAsNonRoot and image will run as root"))),
			detail: "CreateContainerConfigError: container has runAsNonRoot and image will run as root", code: api.ExitNotReady, grace: graceRetry,
			message: "the node node1 cannot start the traffic manager: CreateContainerConfigError: container has runAsNonRoot and image will run as root"},
		{name: "sysctl", snapshot: pods(aPod("a", func(p *corev1.Pod) {
			p.Status.Phase, p.Status.Reason, p.Status.Message = corev1.PodFailed, "SysctlForbidden", "forbidden sysctl"
		})), detail: "SysctlForbidden: forbidden sysctl", code: api.ExitNotReady, message: "the pod a of the traffic manager failed: SysctlForbidden: forbidden sysctl", grace: graceRetry},
		{name: "scaled to zero", snapshot: snapshot{namespace: "kubevpn", deployment: aDeployment(1, 1, 0)}, code: api.ExitNotReady, message: "the traffic manager in kubevpn is scaled to zero"},
		{name: "quota", snapshot: snapshot{namespace: "kubevpn", sets: []*appsv1.ReplicaSet{aSet("1", "h", "pods is forbidden: exceeded quota: q")}},
			detail: "pods is forbidden: exceeded quota: q", code: api.ExitInstall, message: "the namespace kubevpn does not admit the traffic manager's pod: pods is forbidden: exceeded quota: q", grace: graceRetry},
		{name: "pod security", snapshot: snapshot{namespace: "kubevpn", sets: []*appsv1.ReplicaSet{aSet("1", "h", `violates PodSecurity "restricted:latest"`)}},
			detail: `violates PodSecurity "restricted:latest"`, code: api.ExitInstall, message: `the namespace kubevpn does not admit the traffic manager's pod: violates PodSecurity "restricted:latest"`, grace: graceRetry},
		{name: "no service account", snapshot: snapshot{namespace: "kubevpn", sets: []*appsv1.ReplicaSet{aSet("1", "h", "error looking up service account")}},
			detail: "error looking up service account", code: api.ExitInstall, message: "the namespace kubevpn does not admit the traffic manager's pod: error looking up service account", grace: graceUnsure},
		{name: "rollout unseen", snapshot: snapshot{generation: 3, deployment: aDeployment(3, 2, 1), pods: []*corev1.Pod{aPod("old", ready)}}, detail: "the Deployment is being rolled out"},
		{name: "rollout, cache behind", snapshot: snapshot{generation: 3, deployment: aDeployment(2, 2, 1), pods: []*corev1.Pod{aPod("old", ready)}}, detail: "the Deployment is being rolled out"},
		{name: "rollout, old pod only", snapshot: snapshot{generation: 3, deployment: aDeployment(3, 3, 1), sets: []*appsv1.ReplicaSet{aSet("1", "old", ""), aSet("2", "new", "")},
			pods: []*corev1.Pod{aPod("a", ready, hashed("old"))}}, detail: "waiting for a pod"},
		{name: "rollout done", snapshot: snapshot{generation: 3, deployment: aDeployment(3, 3, 1), sets: []*appsv1.ReplicaSet{aSet("1", "old", ""), aSet("2", "new", "")},
			pods: []*corev1.Pod{aPod("a", ready, hashed("old")), aPod("b", ready, hashed("new"))}}, pod: "b", ready: true},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			v := judge(tt.snapshot)
			pod := ""
			if v.pod != nil {
				pod = v.pod.Name
			}
			if pod != tt.pod || v.ready != tt.ready || v.detail != tt.detail {
				t.Errorf("pod %q, ready %t, detail %q; want %q, %t, %q", pod, v.ready, v.detail, tt.pod, tt.ready, tt.detail)
			}
			if v.problem == nil {
				if tt.code != 0 {
					t.Errorf("no problem, want %q", tt.message)
				}
				return
			}
			e := v.problem.err
			if e.Code != tt.code || e.Message != tt.message || v.problem.grace != tt.grace {
				t.Errorf("problem %d %q after %v; want %d %q after %v", e.Code, e.Message, v.problem.grace, tt.code, tt.message, tt.grace)
			}
			if e.Hint == "" || strings.Contains(e.Message, "\n") {
				t.Errorf("hint %q, message %q", e.Hint, e.Message)
			}
		})
	}
}

// A problem ends the wait only after its grace; a change of state restarts the grace.
func TestWeighReportsOnlyLastingProblems(t *testing.T) {
	w := &waiter{}
	now := time.Now()
	image := verdict{problem: &problem{graceRetry, api.Errorf(api.ExitImagePull, "first words")}}
	reworded := verdict{problem: &problem{graceNone, api.Errorf(api.ExitImagePull, "back-off")}}
	if _, again, err := w.weigh(image, now); err != nil || again != graceRetry {
		t.Fatal(again, err)
	}
	if _, again, err := w.weigh(image, now.Add(time.Second)); err != nil || again != graceRetry-time.Second {
		t.Fatal(again, err)
	}
	if _, _, err := w.weigh(verdict{detail: "starting"}, now.Add(2*time.Second)); err != nil {
		t.Fatal(err)
	}
	if _, again, err := w.weigh(image, now.Add(3*time.Second)); err != nil || again != graceRetry {
		t.Fatal("the grace did not restart", again, err)
	}
	if _, _, err := w.weigh(reworded, now.Add(4*time.Second)); err == nil || err.Error() != "back-off" {
		t.Fatal(err)
	}
	p := aPod("a", running)
	if got, again, err := w.weigh(verdict{pod: p}, now); got != nil || err != nil || again != readyGrace {
		t.Fatal(got, again, err)
	}
	if got, _, _ := w.weigh(verdict{pod: p}, now.Add(readyGrace)); got != p {
		t.Fatal("a pod that runs and is not ready is not used after a while")
	}
	if got, _, _ := w.weigh(verdict{pod: p, ready: true}, now); got != p {
		t.Fatal("a ready pod is not used at once")
	}
}
