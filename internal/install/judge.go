package install

import (
	"cmp"
	"fmt"
	"slices"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/api"
)

// scene is what the watches show at one moment.
type scene struct {
	namespace  string
	generation int64              // the Deployment must be at least this, seen by its controller; 0: any
	deployment *appsv1.Deployment // nil: none, or the user may not watch it
	sets       []*appsv1.ReplicaSet
	pods       []*corev1.Pod
}

// verdict is what a scene means. At most one of pod and problem is set.
type verdict struct {
	pod     *corev1.Pod // the manager's container runs in it
	ready   bool        // and its readiness probe succeeds
	problem *problem
	detail  string // what is happening, for progress
}

// problem is a reason to give up, if it lasts: every one of them can heal by itself.
type problem struct {
	grace time.Duration
	err   *api.Error
}

// How long a problem may last.
const (
	graceNone   = 0
	graceRetry  = 4 * time.Second  // controllers and the kubelet try again within
	graceRoom   = 15 * time.Second // a node may come or get room
	graceUnsure = 10 * time.Second
)

// judge decides from one scene whether a pod of the traffic manager can be used, or why there is none.
func judge(s scene) verdict {
	hash, current := s.newest()
	if !current {
		return verdict{detail: "the Deployment is being rolled out"}
	}
	if d := s.deployment; d != nil && d.Spec.Replicas != nil && *d.Spec.Replicas == 0 {
		return verdict{problem: &problem{graceNone, api.Errorf(api.ExitNotReady, "the traffic manager in %s is scaled to zero", s.namespace).
			WithHint("Whoever did that may have had a reason. To start it: kubectl -n %s scale deployment %s --replicas=1", s.namespace, ManagerName)}}
	}
	var pods []*corev1.Pod
	for _, p := range s.pods {
		if p.DeletionTimestamp == nil && (hash == "" || p.Labels[appsv1.DefaultDeploymentUniqueLabelKey] == hash) {
			pods = append(pods, p)
		}
	}
	// Newest first; of several that run, a ready one.
	slices.SortFunc(pods, func(a, b *corev1.Pod) int { return b.CreationTimestamp.Compare(a.CreationTimestamp.Time) })
	slices.SortStableFunc(pods, func(a, b *corev1.Pod) int { return cmp.Compare(rank(b), rank(a)) })
	if len(pods) == 0 {
		return s.noPod()
	}
	p := pods[0]
	switch rank(p) {
	case 2:
		return verdict{pod: p, ready: true}
	case 1:
		return verdict{pod: p, detail: "the pod " + p.Name + " runs and is not ready yet"}
	}
	return judgePod(p)
}

// newest returns the hash of the pods that belong to the Deployment as it is now, "" if any will do.
// current is false as long as its controller has not seen our change.
func (s scene) newest() (hash string, current bool) {
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

// rank is 2 for a ready pod, 1 for one whose container runs, else 0.
func rank(p *corev1.Pod) int {
	running := false
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == containerName && c.State.Running != nil {
			running = true
		}
	}
	if !running {
		return 0
	}
	if podutils.IsPodReady(p) {
		return 2
	}
	return 1
}

// noPod looks for what keeps a pod from being created: a quota, pod security, a webhook.
func (s scene) noPod() verdict {
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
	e := api.Errorf(api.ExitInstall, "the namespace %s does not admit the traffic manager's pod: %s", s.namespace, message)
	grace := graceRetry
	switch {
	case strings.Contains(message, "violates PodSecurity"):
		e = e.WithHint("A cluster admin can install it where \"restricted\" pods are admitted: `kubevpn install`.")
	case strings.Contains(message, "exceeded quota"), strings.Contains(message, "failed quota"):
		e = e.WithHint("It asks for 50m CPU and 32Mi of memory. Free something in %s, or ask for a larger quota or for `kubevpn install` by an admin.", s.namespace)
	case strings.Contains(message, "service account"):
		e, grace = e.WithHint("Put it back with `kubevpn install --manager-namespace %s`.", s.namespace), graceUnsure
	default:
		e = e.WithHint("`kubectl -n %s describe replicaset -l %s=kubevpn` says more. The cluster's policy may want something that an admin knows.", s.namespace, labelName)
	}
	return verdict{problem: &problem{grace, e}, detail: message}
}

// judgePod says why a pod does not run.
func judgePod(p *corev1.Pod) verdict {
	if p.Status.Phase == corev1.PodFailed {
		return verdict{problem: &problem{graceRetry, api.Errorf(api.ExitNotReady, "the traffic manager's pod %s failed: %s", p.Name, joined(p.Status.Reason, p.Status.Message)).
			WithHint("`kubectl -n %s describe pod %s` says more.", p.Namespace, p.Name)}}
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse && c.Reason == corev1.PodReasonUnschedulable {
			return verdict{
				detail: "no node takes the pod: " + c.Message,
				problem: &problem{graceRoom, api.Errorf(api.ExitNotReady, "no node takes the traffic manager's pod: %s", c.Message).
					WithHint("It asks for 50m CPU and 32Mi of memory on a Linux node. If nodes are being added, connect again in a minute.")},
			}
		}
	}
	for _, c := range p.Status.ContainerStatuses {
		if c.Name == containerName {
			return judgeContainer(p, c)
		}
	}
	if p.Spec.NodeName == "" {
		return verdict{detail: "waiting for a node"}
	}
	return verdict{detail: "the node " + p.Spec.NodeName + " starts the pod"}
}

func judgeContainer(p *corev1.Pod, c corev1.ContainerStatus) verdict {
	describe := fmt.Sprintf("`kubectl -n %s describe pod %s` says more.", p.Namespace, p.Name)
	if end := terminated(c); end != nil {
		words := joined(end.Reason, lastLines(end.Message))
		e := api.Errorf(api.ExitNotReady, "the traffic manager ends as soon as it starts, with exit code %d: %s", end.ExitCode, words).
			WithHint("Is %s the image of this kubevpn, and made for the nodes' architecture? %s", c.Image, describe)
		grace := graceUnsure
		if c.RestartCount > 0 {
			grace = graceNone
		}
		return verdict{problem: &problem{grace, e}, detail: words}
	}
	wait := c.State.Waiting
	if wait == nil {
		return verdict{detail: "the node starts the container"}
	}
	detail := joined(wait.Reason, wait.Message)
	switch wait.Reason {
	case "ErrImagePull":
		return verdict{problem: &problem{graceRetry, imageError(p, c, wait.Message)}, detail: detail}
	case "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable":
		return verdict{problem: &problem{graceNone, imageError(p, c, wait.Message)}, detail: detail}
	case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
		return verdict{detail: detail, problem: &problem{graceRetry, api.Errorf(api.ExitNotReady, "the node cannot start the traffic manager: %s", detail).
			WithHint("%s", describe)}}
	case "ContainerCreating", "PodInitializing":
		return verdict{detail: "the node " + p.Spec.NodeName + " pulls the image and starts the container"}
	}
	return verdict{detail: detail}
}

// terminated is the end of a container that is not running now.
func terminated(c corev1.ContainerStatus) *corev1.ContainerStateTerminated {
	if c.State.Terminated != nil {
		return c.State.Terminated
	}
	if c.State.Waiting != nil && c.State.Waiting.Reason == "CrashLoopBackOff" {
		if c.LastTerminationState.Terminated != nil {
			return c.LastTerminationState.Terminated
		}
		return &corev1.ContainerStateTerminated{Reason: "CrashLoopBackOff", Message: c.State.Waiting.Message}
	}
	return nil
}

func imageError(p *corev1.Pod, c corev1.ContainerStatus, message string) *api.Error {
	image := c.Image
	for _, spec := range p.Spec.Containers {
		if spec.Name == c.Name {
			image = spec.Image // as it was written
		}
	}
	// "Back-off pulling image "x": ErrImagePull: what happened"
	if _, cause, ok := strings.Cut(message, ": ErrImagePull: "); ok {
		message = cause
	}
	return api.Errorf(api.ExitImagePull, "the cluster cannot pull the image %s: %s", image, strings.Join(strings.Fields(message), " ")).
		WithHint("Name one that the nodes can pull with --image REF (or KUBEVPN_IMAGE). To make one: `make push-image IMAGE=REF`,\n" +
			"or without a registry `make image IMAGE=REF` and `ctr -n k8s.io images import bin/kubevpn-image.tar` on every node.")
}

func joined(reason, message string) string {
	message = strings.Join(strings.Fields(message), " ")
	switch {
	case message == "":
		return cmp.Or(reason, "no reason given")
	case reason == "" || reason == "Error":
		return message
	}
	return reason + ": " + message
}

// lastLines is the end of a log: what a program says last is why it ends.
func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}
