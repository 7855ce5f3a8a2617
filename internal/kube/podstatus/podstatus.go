// Package podstatus reads from a pod's status why one of its containers does not run. Everything that waits for a
// container uses it, so that all messages name the same reasons in the same words.
package podstatus

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/kubectl/pkg/cmd/util/podcmd"

	"kubevpn/internal/api"
)

// Problem is the reason why a container does not run. Each can heal by itself: nodes come, registries recover, Secrets
// appear.
type Problem int

const (
	None        Problem = iota // nothing is known to be wrong
	PodFailed                  // the kubelet does not admit the pod, or has ended it
	Unscheduled                // no node can run the pod
	Image                      // the node cannot pull the image
	Config                     // the node cannot create or start the container
	Ended                      // the container has ended, perhaps again and again
)

// Status describes one container of a pod.
type Status struct {
	Container string
	Running   bool
	Problem   Problem
	// Retrying reports that the kubelet has met the Problem once, and tries again within seconds.
	Retrying bool
	// Text describes on one line what the container waits for, or the Problem. It is empty if the container runs.
	Text string
	// End is how the container ended, for Ended.
	End *corev1.ContainerStateTerminated

	pod   *corev1.Pod
	image string
}

// Of describes the container with that name: an init, regular or ephemeral container.
func Of(p *corev1.Pod, container string) Status {
	s := Status{Container: container, pod: p}
	if c, _ := podcmd.FindContainerByName(p, container); c != nil {
		s.image = c.Image
	}
	if p.Status.Phase == corev1.PodFailed && p.Status.Reason != "" { // else a container has failed, and says why
		s.Problem, s.Retrying, s.Text = PodFailed, true, join(p.Status.Reason, p.Status.Message)
		return s
	}
	for _, c := range p.Status.Conditions {
		if c.Type == corev1.PodScheduled && c.Status == corev1.ConditionFalse {
			s.Problem, s.Text = Unscheduled, cmp.Or(strings.TrimSuffix(api.OneLine(c.Message), "."), c.Reason)
			return s
		}
	}
	for _, c := range Containers(p) {
		if c.Name == container {
			s.image = cmp.Or(s.image, c.Image)
			s.of(c)
			return s
		}
	}
	s.Text = "the node " + p.Spec.NodeName + " is starting the pod"
	if p.Spec.NodeName == "" {
		s.Text = "waiting for a node"
	}
	return s
}

// Containers returns the statuses of all containers of the pod: init containers, containers, ephemeral containers.
func Containers(p *corev1.Pod) []corev1.ContainerStatus {
	return slices.Concat(p.Status.InitContainerStatuses, p.Status.ContainerStatuses,
		p.Status.EphemeralContainerStatuses)
}

// of describes a container whose status the kubelet has reported.
func (s *Status) of(c corev1.ContainerStatus) {
	wait := c.State.Waiting
	switch {
	case c.State.Running != nil:
		s.Running = true
		return
	case c.State.Terminated != nil:
		s.Problem, s.End, s.Retrying = Ended, c.State.Terminated, c.RestartCount == 0
	case wait == nil:
		s.Text = "the node is starting the container"
		return
	case wait.Reason == "CrashLoopBackOff":
		s.Problem = Ended
		s.End = cmp.Or(c.LastTerminationState.Terminated,
			&corev1.ContainerStateTerminated{Reason: wait.Reason, Message: wait.Message})
	}
	if s.End != nil {
		s.Text = join(s.End.Reason, lastLines(s.End.Message))
		return
	}
	s.Text = join(wait.Reason, wait.Message)
	switch wait.Reason {
	case "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError",
		"RegistryUnavailable":
		s.Problem, s.Retrying = Image, wait.Reason == "ErrImagePull"
		// "Back-off pulling image "x": ErrImagePull: what happened"
		if _, cause, found := strings.Cut(s.Text, ": ErrImagePull: "); found {
			s.Text = wait.Reason + ": " + cause
		}
	case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
		s.Problem, s.Retrying = Config, true
	case "ContainerCreating", "PodInitializing":
		s.Text = "the node " + s.pod.Spec.NodeName + " is pulling the image and starting the container"
	}
}

// Error returns nil if there is no Problem. Otherwise it returns an error about what (for example "the traffic
// manager") with the given code, or api.ExitImagePull for Image, and a kubectl command as the hint.
func (s Status) Error(what string, code api.ExitCode) *api.Error {
	namespace, name := api.ShellQuote(s.pod.Namespace), api.ShellQuote(s.pod.Name)
	describe := fmt.Sprintf("`kubectl -n %s describe pod %s` shows the cause.", namespace, name)
	switch s.Problem {
	case PodFailed:
		return api.Errorf(code, "the pod %s of %s failed: %s", s.pod.Name, what, s.Text).WithHint("%s", describe)
	case Unscheduled:
		return api.Errorf(code, "no node can run the pod %s of %s: %s", s.pod.Name, what, s.Text).
			WithHint("%s", describe)
	case Image:
		return api.Errorf(api.ExitImagePull, "the node %s cannot pull the image %s: %s", s.pod.Spec.NodeName, s.image,
			s.Text).WithHint("%s", describe)
	case Config:
		return api.Errorf(code, "the node %s cannot start %s: %s", s.pod.Spec.NodeName, what, s.Text).
			WithHint("%s", describe)
	case Ended:
		return api.Errorf(code, "%s has ended with exit code %d: %s", what, s.End.ExitCode, s.Text).
			WithHint("`kubectl -n %s logs %s -c %s` shows the cause.", namespace, name, api.ShellQuote(s.Container))
	}
	return nil
}

// join returns "REASON: MESSAGE" on one line. It omits the reason "Error", which has no meaning.
func join(reason, message string) string {
	message = api.OneLine(message)
	switch {
	case message == "":
		return cmp.Or(reason, "no reason given")
	case reason == "" || reason == "Error":
		return message
	}
	return reason + ": " + message
}

// lastLines returns the last three lines of a log, which usually name the cause of the end.
func lastLines(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return strings.Join(lines[max(0, len(lines)-3):], "; ")
}
