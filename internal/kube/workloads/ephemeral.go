package workloads

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

const (
	fieldManager = "kubevpn"
	// addTries limits the attempts of Add. Another laptop may take the name before each.
	addTries = 5
)

// Ephemeral adds one kind of ephemeral container to pods: traffic agents or traffic gateways. Kubernetes keeps the
// entry of a container that has ended, so names have a number: kubevpn-agent-1, kubevpn-agent-2.
type Ephemeral struct {
	Prefix string // of the containers' names
	// New returns the container of that name.
	New func(name string) corev1.EphemeralContainer
	// Serves reports whether a container of the pod makes a new one unnecessary.
	Serves func(p *corev1.Pod, c corev1.EphemeralContainer) bool
	// Check returns an error if the pod must not have the container. Nil: every pod may have it.
	Check func(p *corev1.Pod) error
}

// Add adds a container to the pod, unless one Serves. It returns the container's name, and whether Add added it. It
// does not wait until the container runs. p may be outdated; Add reads the pod again if needed. With dry, the API
// server only decides whether it would admit the container. Errors are those of the API server and of Check, or have
// client.ErrPodGone in their chain.
func (e Ephemeral) Add(ctx context.Context, kube kubernetes.Interface, p *corev1.Pod,
	dry bool) (name string, added bool, err error) {
	for range addTries {
		if p.DeletionTimestamp != nil || Finished(p) {
			return "", false, client.PodGone(p.Namespace, p.Name)
		}
		if e.Check != nil {
			if err := e.Check(p); err != nil {
				return "", false, err
			}
		}
		if name := e.present(p); name != "" {
			return name, false, nil
		}
		name := e.next(p)
		after, err := e.patch(ctx, kube, p, name, dry)
		switch {
		case err == nil && (after == nil || e.present(after) == name):
			return name, true, nil
		case err == nil: // p was outdated: a container that does not serve has that name
			p = after
		case apierrors.IsConflict(err), apierrors.IsInvalid(err):
			seen, reading := readPod(ctx, kube, p.Namespace, p.Name)
			if reading != nil {
				return "", false, reading
			}
			if e.next(seen) == name { // the name is free, so the error has another cause
				return "", false, err
			}
			p = seen
		default:
			return "", false, err
		}
	}
	return "", false, api.Errorf(api.ExitInject, "others keep adding containers to the pod %s", p.Name).
		WithHint("Try again.")
}

// Container returns an ephemeral container that runs a program of kubevpn's image.
func Container(name, image string, security *corev1.SecurityContext, args ...string) corev1.EphemeralContainer {
	return corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name:                     name,
		Image:                    image,
		ImagePullPolicy:          corev1.PullIfNotPresent,
		Args:                     args,
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext:          security,
	}}
}

// present returns the name of the container that serves, or "".
func (e Ephemeral) present(p *corev1.Pod) string {
	for _, c := range p.Spec.EphemeralContainers {
		if _, is := e.number(c.Name); is && e.Serves(p, c) {
			return c.Name
		}
	}
	return ""
}

// number returns the number in a container's name.
func (e Ephemeral) number(name string) (int, bool) {
	text, found := strings.CutPrefix(name, e.Prefix)
	n, err := strconv.Atoi(text)
	return n, found && err == nil
}

// next returns a name that no container of the pod has.
func (e Ephemeral) next(p *corev1.Pod) string {
	last := 0
	for _, c := range p.Spec.EphemeralContainers {
		if n, is := e.number(c.Name); is {
			last = max(last, n)
		}
	}
	return e.Prefix + strconv.Itoa(last+1)
}

// patch adds a container. If two laptops add the same container under the same name, the second patch changes nothing;
// the API server rejects a different container under that name. patch returns the changed pod, or nil if a webhook
// prevents a dry run.
func (e Ephemeral) patch(ctx context.Context, kube kubernetes.Interface, p *corev1.Pod, name string,
	dry bool) (*corev1.Pod, error) {
	data, err := json.Marshal(map[string]any{
		// With the UID, the patch fails for a later pod of the same name.
		"metadata": map[string]any{"uid": p.UID},
		"spec":     map[string]any{"ephemeralContainers": []corev1.EphemeralContainer{e.New(name)}},
	})
	if err != nil {
		return nil, fmt.Errorf("writing the container %s: %w", name, err)
	}
	o := metav1.PatchOptions{FieldManager: fieldManager}
	if dry {
		o.DryRun = []string{metav1.DryRunAll}
	}
	after, err := kube.CoreV1().Pods(p.Namespace).Patch(ctx, p.Name, types.StrategicMergePatchType, data, o,
		"ephemeralcontainers")
	var status apierrors.APIStatus
	switch {
	case dry && noDryRun(err):
		return nil, nil
	case apierrors.IsNotFound(err) && errors.As(err, &status) && status.Status().Details != nil &&
		status.Status().Details.Name == p.Name:
		return nil, client.PodGone(p.Namespace, p.Name)
	}
	return after, err
}

func readPod(ctx context.Context, kube kubernetes.Interface, namespace, name string) (*corev1.Pod, error) {
	p, err := kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, client.PodGone(namespace, name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the pod %s: %w", name, err)
	}
	return p, nil
}

// hasEnded reports whether a container of the pod has ended.
func hasEnded(p *corev1.Pod, container string) bool {
	return slices.ContainsFunc(p.Status.EphemeralContainerStatuses, func(s corev1.ContainerStatus) bool {
		return s.Name == container && s.State.Terminated != nil
	})
}
