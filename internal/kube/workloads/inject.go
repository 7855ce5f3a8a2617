package workloads

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/apimachinery/pkg/api/resource"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// Agent describes a traffic agent for Inject.
type Agent struct {
	Image     string
	Owner     string // hash of the owner's public key; no secret
	OwnerName string // user@host
	// InfoPort is the port of the pod's loopback address on which the agent sends the lines of its log for a while; 0:
	// none. See api.AgentInfoPortVariable.
	InfoPort uint16
	// Container is the intercepted one.
	Container string
	pod       api.AgentPod
	// Replaced are the container names of the owner's agents that are about to end. Inject ignores them.
	Replaced []string
	Objects  api.Objects // the resources of a sidecar
	// Dials says that the agent need not redirect. Where the cluster does not admit a capability, it is an ordinary
	// user then, and restricted.
	Dials      bool
	restricted bool
}

// Decorate adds labels and annotations to an object that lacks them.
func Decorate(obj metav1.Object, o api.Objects) {
	add := func(to map[string]string, entries []string) map[string]string {
		for _, entry := range entries {
			name, value, _ := strings.Cut(entry, "=")
			if to == nil {
				to = map[string]string{}
			}
			if _, has := to[name]; !has {
				to[name] = value
			}
		}
		return to
	}
	obj.SetLabels(add(obj.GetLabels(), o.Labels))
	obj.SetAnnotations(add(obj.GetAnnotations(), o.Annotations))
}

// SetResources sets requests and limits of a container, and ignores invalid ones. A request is at most its limit.
func SetResources(c *corev1.Container, o api.Objects) {
	for _, entry := range o.Resources {
		path, value, _ := strings.Cut(entry, "=")
		kind, name, _ := strings.Cut(path, ".")
		lists := map[string]*corev1.ResourceList{"requests": &c.Resources.Requests, "limits": &c.Resources.Limits}
		quantity, err := resource.ParseQuantity(value)
		if to := lists[kind]; to != nil && err == nil {
			if *to == nil {
				*to = corev1.ResourceList{}
			}
			(*to)[corev1.ResourceName(name)] = quantity
		}
	}
	for name, limit := range c.Resources.Limits {
		if request, has := c.Resources.Requests[name]; has && request.Cmp(limit) > 0 {
			c.Resources.Requests[name] = limit
		}
	}
}

// Environment returns the variables of every agent's container.
func (a Agent) Environment() []corev1.EnvVar {
	return []corev1.EnvVar{
		{Name: api.AgentOwnerVariable, Value: Literal(a.Owner)},
		{Name: api.AgentNameVariable, Value: Literal(a.OwnerName)},
		{Name: api.AgentAddressesVariable, ValueFrom: &corev1.EnvVarSource{
			FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.podIPs"}}},
	}
}

// Restricted returns the security context of a container of kubevpn's image that complies with the "restricted" pod
// security standard. It overrides the pod's defaults.
func Restricted() *corev1.SecurityContext {
	return &corev1.SecurityContext{
		RunAsUser:                new(int64(65532)),
		RunAsGroup:               new(int64(65532)),
		RunAsNonRoot:             new(true),
		AllowPrivilegeEscalation: new(false),
		ReadOnlyRootFilesystem:   new(true),
		Capabilities:             &corev1.Capabilities{Drop: []corev1.Capability{"ALL"}},
		SeccompProfile:           &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault},
	}
}

// Root returns the security context of a container of kubevpn's image that runs as root, with these capabilities alone.
// It overrides the pod's defaults.
func Root(capabilities ...corev1.Capability) *corev1.SecurityContext {
	s := Restricted()
	s.RunAsUser, s.RunAsGroup, s.RunAsNonRoot = new(int64(0)), new(int64(0)), new(false) // the pod may say true
	s.Capabilities.Add = capabilities
	return s
}

// container returns the agent as an ephemeral container. Its only capability is NET_ADMIN, for the redirects, or none.
// It overrides the pod's defaults, such as a user and runAsNonRoot.
func (a Agent) container(name string) corev1.EphemeralContainer {
	security := Root("NET_ADMIN")
	if a.restricted {
		security = Restricted()
	}
	c := Container(name, a.Image, security, "agent")
	c.Env = append(a.Environment(), corev1.EnvVar{Name: api.AgentNodeVariable, ValueFrom: &corev1.EnvVarSource{
		FieldRef: &corev1.ObjectFieldSelector{APIVersion: "v1", FieldPath: "status.hostIP"}}})
	if len(a.pod.Checks) > 0 || a.pod.Within {
		raw, _ := json.Marshal(a.pod) // it has nothing that JSON lacks
		c.Env = append(c.Env, corev1.EnvVar{Name: api.AgentPodVariable, Value: Literal(string(raw))})
	}
	if a.InfoPort != 0 {
		c.Env = append(c.Env, corev1.EnvVar{Name: api.AgentInfoPortVariable, Value: strconv.Itoa(int(a.InfoPort))})
	}
	return c
}

// Literal escapes $(NAME), which the kubelet would expand, in a variable, command or argument of a container.
func Literal(value string) string { return strings.ReplaceAll(value, "$", "$$") }

// ephemeral returns the agent as an Ephemeral. An owner needs one agent in each pod.
func (a Agent) ephemeral() Ephemeral {
	return Ephemeral{
		Prefix: api.AgentPrefix,
		New:    a.container,
		Serves: func(p *corev1.Pod, c corev1.EphemeralContainer) bool {
			owned := slices.ContainsFunc(c.Env, func(e corev1.EnvVar) bool {
				return e.Name == api.AgentOwnerVariable && e.Value == Literal(a.Owner)
			})
			return owned && c.Image == a.Image && !hasEnded(p, c.Name) && !slices.Contains(a.Replaced, c.Name) &&
				(a.Dials || redirects(c))
		},
		Check: func(p *corev1.Pod) error {
			if slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return api.IsAgent(c.Name) }) {
				return api.Errorf(api.ExitInject, "the pod %s has an agent as a sidecar", p.Name).
					WithHint("`kubevpn proxy --mode sidecar` adds yours to it. " +
						"After `kubevpn leave`, a rollout replaces the pod.")
			}
			return Unfit("pod/"+p.Name, p.Spec)
		},
	}
}

// redirects reports whether an agent's container has the capability to redirect.
func redirects(c corev1.EphemeralContainer) bool {
	s := c.SecurityContext
	return s != nil && s.Capabilities != nil && slices.Contains(s.Capabilities.Add, "NET_ADMIN")
}

// MayPatch returns nil if the user may change the workload. It asks the API server with a dry run of an empty patch.
// Errors are *api.Error.
func (c Client) MayPatch(ctx context.Context, w *Workload) error {
	return c.ExplainContext(ctx, c.mayPatch(ctx, w))
}

func (c Client) mayPatch(ctx context.Context, w *Workload) error {
	o := metav1.PatchOptions{FieldManager: fieldManager, DryRun: []string{metav1.DryRunAll}}
	_, err := c.Dynamic().Resource(w.Resource).Namespace(w.Namespace).Patch(ctx, w.Name, types.MergePatchType,
		[]byte("{}"), o)
	if user, p, ok := client.Denial(err); ok {
		return api.Errorf(api.ExitPermission, "you may not intercept %s: this requires the right to %s", w, p).
			WithHint("Ask a cluster admin to run:\n%s", p.GrantCommands(user))
	}
	switch {
	case err == nil, noDryRun(err):
		return nil
	case apierrors.IsNotFound(err):
		return api.Errorf(api.ExitWorkload, "there is no longer a %s in the namespace %s", w, w.Namespace).
			WithHint("`kubectl -n %s get %s` lists what there is.", w.Namespace, w.shown)
	}
	return fmt.Errorf("cannot check whether you may change %s: %w", w, err)
}

// noDryRun reports whether a webhook of the cluster does not support dry runs. The API server checks the user's
// permissions before.
func noDryRun(err error) bool {
	return apierrors.IsBadRequest(err) && strings.Contains(err.Error(), "does not support dry run")
}

// MayInject returns nil if the agent is in the pod, or if the cluster (RBAC, pod security, webhooks) would admit it and
// the node's kernel can redirect. It changes nothing. Errors are *api.Error with the reason and a hint for an admin.
func (c Client) MayInject(ctx context.Context, pod *corev1.Pod, a Agent) error {
	kernel := make(chan error, 1)
	go func() { kernel <- c.checkKernel(ctx, pod) }() // in parallel, because each takes a round trip
	_, _, err := c.inject(ctx, pod, a, true)
	return c.ExplainContext(ctx, cmp.Or(<-kernel, err))
}

// Inject adds the agent to the pod as an ephemeral container, unless its owner has one there. It returns the
// container's name, and whether Inject added it: an older agent may have closed its InfoPort. Inject does not wait
// until the agent runs; FollowLog does. pod may be outdated. Errors are *api.Error, with client.ErrPodGone in the
// chain if the pod is gone.
func (c Client) Inject(ctx context.Context, pod *corev1.Pod, a Agent) (container string, added bool, err error) {
	container, added, err = c.inject(ctx, pod, a, false)
	return container, added, c.ExplainContext(ctx, err)
}

func (c Client) inject(ctx context.Context, p *corev1.Pod, a Agent, dry bool) (name string, added bool, err error) {
	a.pod, _ = describe(p.Spec, a.Container)
	instead := "`--mode sidecar` needs no capability, and restarts the pods."
	if a.Dials {
		instead = "Without --via, connections leave from the traffic manager."
	}
	name, added, err = a.ephemeral().Add(ctx, c.Kube(), p, dry)
	if err != nil {
		err = refusal(p, err, "the traffic agent", instead)
	}
	if err != nil && a.Dials && !a.restricted && api.AsError(err).Code == api.ExitInject {
		a.restricted = true
		return c.inject(ctx, p, a, dry)
	}
	return name, added, err
}

// refusal converts an error of Add to one for the user. what names the container, and instead an alternative.
func refusal(p *corev1.Pod, err error, what, instead string) error {
	ns, message := p.Namespace, api.OneLine(err.Error())
	violation := client.PodSecurityViolation(message)
	if e := (*api.Error)(nil); errors.As(err, &e) {
		return err
	}
	if user, permission, ok := client.Denial(err); ok {
		return api.Errorf(api.ExitPermission,
			"you may not add %s to the pod %s: this requires the right to %s", what, p.Name, permission).
			WithHint("Ask a cluster admin to run:\n%s", permission.GrantCommands(user))
	}
	switch {
	case apierrors.IsNotFound(err):
		return api.Errorf(api.ExitInject, "the cluster's API has no ephemeral containers, which need Kubernetes 1.23").
			WithHint("%s", instead)
	case apierrors.IsMethodNotSupported(err):
		return api.Errorf(api.ExitInject, "the cluster's API does not allow patching ephemeral containers: %s",
			message).WithHint("%s", instead)
	case apierrors.IsForbidden(err) && violation != "":
		return api.Errorf(api.ExitInject, "pod security does not admit %s in the namespace %s: %s", what, ns,
			violation).
			WithHint("%s Or ask a cluster admin to run\n  kubectl label namespace %s %s=privileged --overwrite",
				instead, api.ShellQuote(ns), client.PodSecurityLabel)
	case apierrors.IsForbidden(err), apierrors.IsInvalid(err), apierrors.IsBadRequest(err),
		strings.Contains(message, "denied the request"):
		// a policy's webhook, a quota or a static pod
		return api.Errorf(api.ExitInject, "the cluster does not admit %s in the pod %s: %s", what, p.Name,
			message).
			WithHint("%s Or ask a cluster admin about the rule that the message names. %s", instead, client.PolicyHint)
	case apierrors.IsConflict(err):
		return api.Errorf(api.ExitInject, "the pod %s was changed meanwhile: %s", p.Name, message).
			WithHint("Try again.")
	}
	return fmt.Errorf("adding %s to the pod %s: %w", what, p.Name, err)
}
