package install

import (
	"cmp"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podstatus"
)

// snapshot is the state of the watched objects at one moment.
type snapshot struct {
	namespace  string
	generation int64              // the least that the Deployment's controller must have observed; 0: any
	deployment *appsv1.Deployment // nil: none, or the user may not watch it
	sets       []*appsv1.ReplicaSet
	pods       []*corev1.Pod
}

// verdict is the result of judge. At most one of pod and problem is set.
type verdict struct {
	pod     *corev1.Pod // the manager's container runs in it
	ready   bool        // and its readiness probe succeeds
	problem *problem
	detail  string // what is happening, for progress
}

// problem is a reason to give up if it lasts. Each can end by itself.
type problem struct {
	grace time.Duration
	err   *api.Error
}

// How long a problem may last.
const (
	graceNone   = time.Duration(0)
	graceRetry  = 4 * time.Second  // controllers and the kubelet retry within this time
	graceRoom   = 15 * time.Second // a node may join or become free
	graceUnsure = 10 * time.Second
)

// judge decides whether a pod of the traffic manager can be used, or why there is none.
func judge(s snapshot) verdict {
	hash, current := s.newest()
	if !current {
		return verdict{detail: "the Deployment is being rolled out"}
	}
	if d := s.deployment; d != nil && d.Spec.Replicas != nil && *d.Spec.Replicas == 0 {
		return verdict{problem: &problem{graceNone,
			api.Errorf(api.ExitNotReady, "the traffic manager in %s is scaled to zero", s.namespace).
				WithHint("Somebody may have done this on purpose. To start it: kubectl -n %s scale deployment %s "+
					"--replicas=1", s.namespace, ManagerName)}}
	}
	var pods []*corev1.Pod
	for _, p := range s.pods {
		if p.DeletionTimestamp == nil && (hash == "" || p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] == hash) {
			pods = append(pods, p)
		}
	}
	if len(pods) == 0 {
		return s.noPod()
	}
	p := slices.MaxFunc(pods, func(a, b *corev1.Pod) int { // of several of the highest rank, the newest
		return cmp.Or(cmp.Compare(rank(a), rank(b)), a.CreationTimestamp.Compare(b.CreationTimestamp.Time))
	})
	switch rank(p) {
	case 2:
		return verdict{pod: p, ready: true}
	case 1:
		return verdict{pod: p, detail: "the pod " + p.Name + " runs and is not ready yet"}
	}
	return judgePod(p)
}

// newest returns the template hash of the pods of the Deployment's current generation; "" accepts any pod. current is
// false while the controller has not seen the change.
func (s snapshot) newest() (hash string, current bool) {
	d := s.deployment
	if s.generation == 0 {
		return "", true
	}
	if d == nil || d.Generation < s.generation || d.Status.ObservedGeneration < d.Generation {
		return "", false
	}
	const revision = "deployment.kubernetes.io/revision"
	for _, rs := range s.sets {
		if rs.Annotations[revision] == d.Annotations[revision] && d.Annotations[revision] != "" {
			return rs.Labels[appsv1.DefaultDeploymentUniqueLabelKey], true
		}
	}
	return "", false
}

// rank returns 2 for a ready pod, 1 for one in which the manager's container runs, and 0 otherwise.
func rank(p *corev1.Pod) int {
	running := slices.ContainsFunc(p.Status.ContainerStatuses, func(c corev1.ContainerStatus) bool {
		return c.Name == containerName && c.State.Running != nil
	})
	switch {
	case !running:
		return 0
	case podutils.IsPodReady(p):
		return 2
	}
	return 1
}

// noPod finds out why there is no pod: a quota, pod security or a webhook.
func (s snapshot) noPod() verdict {
	message := ""
	if s.deployment != nil {
		for _, c := range s.deployment.Status.Conditions {
			if c.Type == appsv1.DeploymentReplicaFailure && c.Status == corev1.ConditionTrue {
				message = c.Message
			}
		}
	}
	for _, rs := range s.sets {
		for _, c := range rs.Status.Conditions {
			if c.Type == appsv1.ReplicaSetReplicaFailure && c.Status == corev1.ConditionTrue {
				message = c.Message
			}
		}
	}
	if message == "" {
		return verdict{detail: "waiting for a pod"}
	}
	e := api.Errorf(api.ExitInstall, "the namespace %s does not admit the traffic manager's pod: %s", s.namespace,
		message)
	grace := graceRetry
	switch {
	case client.PodSecurityViolation(message) != "":
		e = e.WithHint("A cluster admin can install it where \"restricted\" pods are admitted: `kubevpn install`.")
	case strings.Contains(message, "exceeded quota"), strings.Contains(message, "failed quota"):
		e = e.WithHint("It requests 50m CPU and 32Mi of memory, with a limit of 1Gi. Free something in %s, or ask "+
			"for a larger quota or for `kubevpn install` by an admin. %s", s.namespace, client.PolicyHint)
	case strings.Contains(message, "service account"):
		e, grace = e.WithHint("Restore it with `kubevpn install --manager-namespace %s`.", s.namespace), graceUnsure
	default:
		e = e.WithHint("`kubectl -n %s describe replicaset -l %s=kubevpn` shows the cause. %s", s.namespace, labelName,
			client.PolicyHint)
	}
	return verdict{problem: &problem{grace, e}, detail: message}
}

// judgePod finds out why a pod does not run.
func judgePod(p *corev1.Pod) verdict {
	s := podstatus.Of(p, containerName)
	v := verdict{detail: s.Text}
	e := s.Error("the traffic manager", api.ExitNotReady)
	if e == nil {
		return v
	}
	grace := graceNone
	if s.Retrying {
		grace = graceRetry
	}
	switch s.Problem {
	case podstatus.Unscheduled:
		grace, v.detail = graceRoom, "no node can run the pod: "+s.Text
		e = e.WithHint("It requests 50m CPU and 32Mi of memory on a Linux node. If nodes are being added, connect " +
			"again in a minute.")
	case podstatus.Image:
		e = e.WithHint("%s", imageHint)
	case podstatus.Ended:
		if s.Retrying {
			grace = graceUnsure
		}
		e = e.WithHint("Check that the image belongs to this kubevpn and supports the nodes' architecture. %s", e.Hint)
	}
	v.problem = &problem{grace, e}
	return v
}

// imageHint is for images that the cluster cannot pull.
const imageHint = "Name one that the nodes can pull with --image REF (or KUBEVPN_IMAGE). To make one:\n" +
	"`make push-image IMAGE=REF`, or without a registry `make image IMAGE=REF` and\n" +
	"`ctr -n k8s.io images import bin/kubevpn-image.tar` on every node."
