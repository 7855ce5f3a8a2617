package cluster

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

	"kubevpn/internal/api"
)

const (
	fieldManager = "kubevpn"
	// injectTries is how often another laptop may take the name that was to be ours.
	injectTries  = 5
	labelEnforce = "pod-security.kubernetes.io/enforce"
	// agentAddress is the variable of the agent's environment that has the pod's addresses.
	agentAddress = "POD_IP"
)

// ErrPodGone is in the chain of an error that is there because the pod has gone, or will not run again.
var ErrPodGone = errors.New("has gone")

func podGone(namespace, name string) error {
	return api.Errorf(api.ExitInject, "the pod %s/%s %w", namespace, name, ErrPodGone).
		WithHint("Whatever takes its place has another name: `kubectl -n %s get pods`.", namespace)
}

// Agent is a traffic agent that is to be added to a pod.
type Agent struct {
	Image     string
	Owner     string // hash of the owner's public key; no secret
	OwnerName string // user@host
	// Greet is a port of the pod's loopback address where the agent says for a while what it says in its log; 0: none. See
	// api.AgentGreetVariable.
	Greet uint16
	// Spent are agents of the owner's that are about to end, by their containers' names: they do not count.
	Spent []string
}

// container is the agent as an ephemeral container. NET_ADMIN is for the redirects; nothing else is asked for, and nothing of
// the pod's own defaults (a user, runAsNonRoot) is in its way.
func (a Agent) container(name string) corev1.EphemeralContainer {
	c := corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name:            name,
		Image:           a.Image,
		ImagePullPolicy: corev1.PullIfNotPresent,
		Args:            []string{"agent"},
		Env: []corev1.EnvVar{
			{Name: api.AgentOwnerVariable, Value: literal(a.Owner)},
			{Name: api.AgentNameVariable, Value: literal(a.OwnerName)},
			{Name: agentAddress, ValueFrom: &corev1.EnvVarSource{FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.podIPs"}}},
		},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext: &corev1.SecurityContext{
			RunAsUser:                new(int64(0)),
			RunAsGroup:               new(int64(0)),
			RunAsNonRoot:             new(false), // the pod may say true
			AllowPrivilegeEscalation: new(false),
			ReadOnlyRootFilesystem:   new(true),
			Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}, Add: []corev1.Capability{"NET_ADMIN"}},
			SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
		},
	}}
	if a.Greet != 0 {
		c.Env = append(c.Env, corev1.EnvVar{Name: api.AgentGreetVariable, Value: strconv.Itoa(int(a.Greet))})
	}
	return c
}

// literal keeps the kubelet from replacing $(NAME).
func literal(value string) string { return strings.ReplaceAll(value, "$", "$$") }

// present is the name of the owner's agent in the pod, if it runs or is about to, or "".
func (a Agent) present(p *corev1.Pod) string {
	for _, c := range p.Spec.EphemeralContainers {
		if _, is := agentNumber(c.Name); !is || c.Image != a.Image || ended(p, c.Name) != nil || slices.Contains(a.Spent, c.Name) {
			continue
		}
		if slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool { return e.Name == api.AgentOwnerVariable && e.Value == literal(a.Owner) }) {
			return c.Name
		}
	}
	return ""
}

// agentNumber is what is behind api.AgentPrefix in the name of an agent's container.
func agentNumber(name string) (int, bool) {
	text, found := strings.CutPrefix(name, api.AgentPrefix)
	n, err := strconv.Atoi(text)
	return n, found && err == nil
}

// nextAgent is a name that no container of the pod has. A container that has ended stays in its pod's specification, and its
// name with it.
func nextAgent(p *corev1.Pod) string {
	last := 0
	for _, c := range p.Spec.EphemeralContainers {
		if n, is := agentNumber(c.Name); is {
			last = max(last, n)
		}
	}
	return api.AgentPrefix + strconv.Itoa(last+1)
}

// MayPatch returns nil if the user may change the workload: a patch that changes nothing is tried without effect, so that it
// is the API server that decides. Errors are *api.Error.
func (c *Cluster) MayPatch(ctx context.Context, w *Workload) error {
	r, err := c.workloads()
	if err != nil {
		return err
	}
	return c.explained(ctx, r.mayPatch(ctx, w))
}

func (r workloads) mayPatch(ctx context.Context, w *Workload) error {
	o := metav1.PatchOptions{FieldManager: fieldManager, DryRun: []string{metav1.DryRunAll}}
	_, err := r.dynamic.Resource(w.Resource).Namespace(w.Namespace).Patch(ctx, w.Name, types.MergePatchType, []byte("{}"), o)
	if user, p, ok := denial(err); ok {
		return api.Errorf(api.ExitPermission, "you may not intercept %s: that needs the right to %s", w, p).
			WithHint("Ask a cluster admin to run:\n%s", p.GrantCommands(user))
	}
	switch {
	case err == nil, noDryRun(err):
		return nil
	case apierrors.IsNotFound(err):
		return api.Errorf(api.ExitWorkload, "there is no %s in the namespace %s any more", w, w.Namespace).
			WithHint("`kubectl -n %s get %s` lists what there is.", w.Namespace, w.shown)
	}
	return fmt.Errorf("trying whether %s may be changed: %w", w, err)
}

// denial is what RBAC says in err.
func denial(err error) (user string, p Permission, ok bool) {
	if !apierrors.IsForbidden(err) {
		return "", Permission{}, false
	}
	return ParseDenial(err.Error())
}

// noDryRun reports that a webhook of the cluster cannot be asked without effect. It is asked after the user's rights.
func noDryRun(err error) bool {
	return apierrors.IsBadRequest(err) && strings.Contains(err.Error(), "does not support dry run")
}

// MayInject returns nil if the agent is in the pod, or Inject would be admitted: by RBAC, pod security and whatever else the
// cluster has. It changes nothing. Errors are *api.Error that say what forbids it, and what an admin would do about it.
func (c *Cluster) MayInject(ctx context.Context, pod *corev1.Pod, a Agent) error {
	_, _, err := workloads{kube: c.kube}.inject(ctx, pod, a, true)
	return c.explained(ctx, err)
}

// Inject adds the agent to the pod as an ephemeral container, unless its owner has one there, and returns the container's
// name, and whether it was added just now: the port of another one may have been let go. It does not wait until it runs;
// FollowLog does. pod is as it was last seen: where that is too long ago, it is read again. Errors are *api.Error, with ErrPodGone in the chain where that is the cause.
func (c *Cluster) Inject(ctx context.Context, pod *corev1.Pod, a Agent) (container string, added bool, err error) {
	container, added, err = workloads{kube: c.kube}.inject(ctx, pod, a, false)
	return container, added, c.explained(ctx, err)
}

func (r workloads) inject(ctx context.Context, p *corev1.Pod, a Agent, dry bool) (name string, added bool, err error) {
	for range injectTries {
		if p.DeletionTimestamp != nil || finished(p) {
			return "", false, podGone(p.Namespace, p.Name)
		}
		if err := Unfit("pod/"+p.Name, p.Spec); err != nil {
			return "", false, err
		}
		if name := a.present(p); name != "" {
			return name, false, nil
		}
		name := nextAgent(p)
		after, err := r.patch(ctx, p, a.container(name), dry)
		switch {
		case err == nil && ended(after, name) == nil && !slices.Contains(a.Spent, name):
			return name, true, nil
		case err == nil: // p was old: the owner's agent had that name, and has ended
			p = after
		case apierrors.IsConflict(err), apierrors.IsInvalid(err):
			seen, reading := r.pod(ctx, p.Namespace, p.Name)
			if reading != nil {
				return "", false, reading
			}
			if nextAgent(seen) == name { // it is not about the name
				return "", false, r.refusal(p, err)
			}
			p = seen
		default:
			return "", false, r.refusal(p, err)
		}
	}
	return "", false, api.Errorf(api.ExitInject, "others add agents to the pod %s faster than this laptop", p.Name).WithHint("Try again.")
}

func (r workloads) pod(ctx context.Context, namespace, name string) (*corev1.Pod, error) {
	p, err := r.kube.CoreV1().Pods(namespace).Get(ctx, name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, podGone(namespace, name)
	}
	if err != nil {
		return nil, fmt.Errorf("reading the pod %s: %w", name, err)
	}
	return p, nil
}

// patch adds a container. Of two laptops that add the same under the same name one changes nothing; another one under a name
// that is taken is refused.
func (r workloads) patch(ctx context.Context, p *corev1.Pod, c corev1.EphemeralContainer, dry bool) (*corev1.Pod, error) {
	data, err := json.Marshal(map[string]any{
		// A pod that took the name of one that has gone is not meant.
		"metadata": map[string]any{"uid": p.UID},
		"spec":     map[string]any{"ephemeralContainers": []corev1.EphemeralContainer{c}},
	})
	if err != nil {
		return nil, fmt.Errorf("writing the agent's container: %w", err)
	}
	o := metav1.PatchOptions{FieldManager: fieldManager}
	if dry {
		o.DryRun = []string{metav1.DryRunAll}
	}
	after, err := r.kube.CoreV1().Pods(p.Namespace).Patch(ctx, p.Name, types.StrategicMergePatchType, data, o, "ephemeralcontainers")
	if dry && noDryRun(err) {
		return p, nil // it shows when it is done
	}
	return after, err
}

// refusal is what the user is told of an error of patch.
func (r workloads) refusal(p *corev1.Pod, err error) error {
	const sidecar = "`--mode sidecar` needs no capability, and restarts the pods."
	ns, message := p.Namespace, oneLine(err.Error())
	var status apierrors.APIStatus
	if user, permission, ok := denial(err); ok {
		return api.Errorf(api.ExitPermission, "you may not add the traffic agent to the pod %s: that needs the right to %s", p.Name, permission).
			WithHint("Ask a cluster admin to run:\n%s", permission.GrantCommands(user))
	}
	switch {
	case apierrors.IsNotFound(err):
		if errors.As(err, &status) && status.Status().Details != nil && status.Status().Details.Name == p.Name {
			return podGone(ns, p.Name)
		}
		return api.Errorf(api.ExitInject, "the cluster's API has no ephemeral containers, which Kubernetes has since 1.23").
			WithHint("%s", sidecar)
	case apierrors.IsMethodNotSupported(err):
		return api.Errorf(api.ExitInject, "the cluster's API does not let ephemeral containers be patched: %s", message).WithHint("%s", sidecar)
	case apierrors.IsForbidden(err) && strings.Contains(message, "violates PodSecurity"):
		_, words, _ := strings.Cut(message, "violates PodSecurity")
		return api.Errorf(api.ExitInject, "pod security does not admit the traffic agent in the namespace %s: violates PodSecurity%s", ns, words).
			WithHint("%s Or ask a cluster admin to run\n  kubectl label namespace %s %s=privileged --overwrite", sidecar, ns, labelEnforce)
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err), strings.Contains(message, "denied the request"):
		// A policy's webhook, a quota, a static pod: the words are the cluster's.
		return api.Errorf(api.ExitInject, "the cluster does not admit the traffic agent in the pod %s: %s", p.Name, message).
			WithHint("%s Or ask a cluster admin, who knows the rule that the message names.", sidecar)
	case apierrors.IsConflict(err):
		return api.Errorf(api.ExitInject, "the pod %s was changed meanwhile: %s", p.Name, message).WithHint("Try again.")
	}
	return fmt.Errorf("adding the traffic agent to the pod %s: %w", p.Name, err)
}
