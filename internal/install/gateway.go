package install

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

const (
	// gatewayPrefix, with a number, is the name of a gateway's container. A container that has ended stays in its pod's
	// specification, and its name with it.
	gatewayPrefix = "gateway-"
	// gatewayTries is how often another laptop may take the name that was to be ours.
	gatewayTries = 5
	// handoverTimeout bounds the time from the gateway's start until the manager has its device.
	handoverTimeout = 20 * time.Second

	labelEnforce = "pod-security.kubernetes.io/enforce"

	stepGateway = "Adding the gateway"
)

// GatewayOptions say where a gateway is wanted. A gateway (`traffic gateway`) is an ephemeral container of the traffic
// manager's pod: the one part with capabilities, which the system netstack needs. It is added with the user's own
// rights, and no other container is touched.
type GatewayOptions struct {
	Namespace string
	Pod       string
	Image     string // empty: the manager's own
	// Relabel lets a namespace that we made, and that enforces pod security, be labelled privileged: asked for by who
	// wants the system netstack and no other.
	Relabel  bool
	Progress func(api.Event) // may be nil
	// Ready, if set, is closed when the manager says that the gateway is there. AddGateway then waits for that; else it
	// is content with a container that runs.
	Ready <-chan struct{}
}

func (o GatewayOptions) tell(format string, args ...any) {
	if o.Progress != nil {
		o.Progress(event(stepGateway, format, args...))
	}
}

// MayAddGateway returns nil if there is a gateway, or AddGateway would be admitted now: by RBAC, pod security and
// whatever else the cluster has. Else it returns an *api.Error that says what forbids it, in its own words, with what an
// admin would do about it. It changes nothing.
func MayAddGateway(ctx context.Context, c *cluster.Cluster, o GatewayOptions) error {
	g := adder{kube: c.Kube(), o: o}
	if err := g.may(ctx); err != nil {
		return c.Explain(err)
	}
	return nil
}

// AddGateway adds a gateway to the pod, unless one runs there, and waits until it does. Where the runtime's device rules
// keep TUN devices from a container that is not privileged, a privileged one is tried, and told of. Errors are
// *api.Error.
func AddGateway(ctx context.Context, c *cluster.Cluster, o GatewayOptions) error {
	g := adder{kube: c.Kube(), o: o, timeout: readyTimeout, handover: handoverTimeout}
	if err := g.run(ctx); err != nil {
		return c.Explain(err)
	}
	return nil
}

// gatewayContainer is admitted where pod security enforces "privileged".
func gatewayContainer(name, image string, privileged bool) corev1.EphemeralContainer {
	security := &corev1.SecurityContext{
		RunAsUser:              ptr[int64](0),
		RunAsGroup:             ptr[int64](0),
		RunAsNonRoot:           ptr(false), // the pod says true
		ReadOnlyRootFilesystem: ptr(true),
	}
	if privileged {
		security.Privileged = ptr(true)
	} else {
		security.AllowPrivilegeEscalation = ptr(false)
		security.SeccompProfile = &corev1.SeccompProfile{Type: corev1.SeccompProfileTypeRuntimeDefault}
		security.Capabilities = &corev1.Capabilities{
			Drop: []corev1.Capability{"ALL"},
			// NET_RAW is for iptables-legacy, which speaks to the kernel through a raw socket. Who has NET_ADMIN and a
			// TUN device can send any packet without it.
			Add: []corev1.Capability{"MKNOD", "NET_ADMIN", "NET_RAW"},
		}
	}
	return corev1.EphemeralContainer{EphemeralContainerCommon: corev1.EphemeralContainerCommon{
		Name:                     name,
		Image:                    image,
		ImagePullPolicy:          corev1.PullIfNotPresent,
		Args:                     []string{"gateway"},
		TerminationMessagePolicy: corev1.TerminationMessageFallbackToLogsOnError,
		SecurityContext:          security,
	}}
}

// ErrPodGone is in the chain of AddGateway's error where the pod to which the gateway was to be added has gone, or is
// about to go: another takes its place.
var ErrPodGone = errors.New("the traffic manager's pod has gone, and its gateway with it")

func podGone(name, how string) error {
	return api.Errorf(api.ExitNotReady, "%w: %s %s", ErrPodGone, name, how).WithHint("Another takes its place: connect again.")
}

// adder adds a gateway to one pod.
type adder struct {
	kube              kubernetes.Interface
	o                 GatewayOptions
	timeout, handover time.Duration
}

// pod reads the pod, and refuses one to which no gateway may ever be added.
func (g *adder) pod(ctx context.Context) (*corev1.Pod, error) {
	p, err := g.kube.CoreV1().Pods(g.o.Namespace).Get(ctx, g.o.Pod, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, podGone(g.o.Pod, "is there no more")
	}
	if err != nil {
		return nil, fmt.Errorf("reading the traffic manager's pod: %w", err)
	}
	if p.Spec.HostNetwork {
		return nil, api.Errorf(api.ExitNetstack, "the traffic manager's pod %s has its node's network, and a gateway would change it", p.Name).
			WithHint("Install a traffic manager without hostNetwork: `kubevpn install`.")
	}
	return p, nil
}

func (g *adder) image(p *corev1.Pod) string { return cmp.Or(g.o.Image, ImageOf(p.Spec)) }

func (g *adder) may(ctx context.Context) error {
	p, err := g.pod(ctx)
	if err != nil || g.present(p) != "" {
		return err
	}
	err = g.patch(ctx, p, gatewayContainer(nextGateway(p), g.image(p), false), true)
	if enforced(err) && g.o.Relabel {
		n, reading := g.relabellable(ctx)
		if reading != nil || n != nil {
			return reading
		}
	}
	return g.refusal(ctx, err)
}

// present is the name of the gateway that runs, or is being started from the right image, or "".
func (g *adder) present(p *corev1.Pod) string {
	for _, c := range p.Spec.EphemeralContainers {
		if !isGateway(c.Name) {
			continue
		}
		i := slices.IndexFunc(p.Status.EphemeralContainerStatuses, func(s corev1.ContainerStatus) bool { return s.Name == c.Name })
		switch {
		case i < 0, p.Status.EphemeralContainerStatuses[i].State.Running == nil && p.Status.EphemeralContainerStatuses[i].State.Terminated == nil:
			if c.Image == g.image(p) {
				return c.Name
			}
		case p.Status.EphemeralContainerStatuses[i].State.Running != nil:
			return c.Name
		}
	}
	return ""
}

func isGateway(name string) bool {
	_, is := gatewayNumber(name)
	return is
}

// gatewayNumber is what is behind gatewayPrefix in the name of a gateway's container.
func gatewayNumber(name string) (int, bool) {
	text, found := strings.CutPrefix(name, gatewayPrefix)
	n, err := strconv.Atoi(text)
	return n, found && err == nil
}

// nextGateway is a name that no container of the pod has.
func nextGateway(p *corev1.Pod) string {
	last := 0
	for _, c := range p.Spec.EphemeralContainers {
		if n, is := gatewayNumber(c.Name); is {
			last = max(last, n)
		}
	}
	return gatewayPrefix + itoa(last+1)
}

// patch adds a container. Of two laptops that add the same under the same name one changes nothing; another one under a
// name that is taken is refused.
func (g *adder) patch(ctx context.Context, p *corev1.Pod, c corev1.EphemeralContainer, dry bool) error {
	data, err := json.Marshal(map[string]any{
		"spec": map[string]any{"ephemeralContainers": []corev1.EphemeralContainer{c}},
	})
	if err != nil {
		return fmt.Errorf("writing the gateway's container: %w", err)
	}
	o := metav1.PatchOptions{FieldManager: fieldManager}
	if dry {
		o.DryRun = []string{metav1.DryRunAll}
	}
	_, err = g.kube.CoreV1().Pods(p.Namespace).Patch(ctx, p.Name, types.StrategicMergePatchType, data, o, "ephemeralcontainers")
	if apierrors.IsNotFound(err) {
		return podGone(p.Name, "is there no more")
	}
	if err != nil {
		return fmt.Errorf("adding the gateway to the pod %s: %w", p.Name, err)
	}
	return nil
}

// enforced reports whether pod security has refused.
func enforced(err error) bool {
	return apierrors.IsForbidden(err) && strings.Contains(err.Error(), "violates PodSecurity")
}

// refusal is what the user is told of an error of patch.
func (g *adder) refusal(ctx context.Context, err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	ns := g.o.Namespace
	if user, p, ok := cluster.ParseDenial(err.Error()); ok {
		return api.Errorf(api.ExitPermission, "you may not add the gateway to the traffic manager's pod: that needs the right to %s", p).
			WithHint("Whoever has it in a namespace that admits privileged pods is root on the nodes. Ask a cluster admin to run:\n%s", p.GrantCommands(cmp.Or(user, username(ctx, g.kube))))
	}
	if !enforced(err) {
		return err // a webhook's, a quota's: cluster.Explain knows them
	}
	_, words, _ := strings.Cut(err.Error(), "violates PodSecurity")
	label := fmt.Sprintf("kubectl label namespace %s %s=privileged --overwrite", ns, labelEnforce)
	e := api.Errorf(api.ExitNetstack, "pod security does not admit the gateway in the namespace %s: violates PodSecurity%s", ns, words)
	if n, reading := g.relabellable(ctx); reading == nil && n != nil {
		return e.WithHint("`kubevpn connect --netstack system` lets it in, by\n  %s", label)
	}
	return e.WithHint("Ask a cluster admin to run\n  %s", label)
}

// relabellable is the namespace, if it is one that we made, and the user may label it; else nil.
func (g *adder) relabellable(ctx context.Context) (*corev1.Namespace, error) {
	n, err := g.kube.CoreV1().Namespaces().Get(ctx, g.o.Namespace, metav1.GetOptions{})
	if apierrors.IsForbidden(err) {
		return nil, nil // those who may not see it may not label it
	}
	if err != nil {
		return nil, fmt.Errorf("reading the namespace %s: %w", g.o.Namespace, err)
	}
	// lacking asks for the right to all namespaces. A right to this one alone shows only when it is tried.
	if n.Annotations[annotationCreated] != "true" ||
		len(lacking(ctx, g.kube, []cluster.Permission{{Verb: "patch", Resource: "namespaces"}})) > 0 {
		return nil, nil
	}
	return n, nil
}

// relabel sets the level of pod security that the namespace enforces.
func (g *adder) relabel(ctx context.Context, level string) error {
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, labelEnforce, level)
	_, err := g.kube.CoreV1().Namespaces().Patch(ctx, g.o.Namespace, types.StrategicMergePatchType, []byte(patch), metav1.PatchOptions{FieldManager: fieldManager})
	if err != nil {
		return fmt.Errorf("labelling the namespace %s: %w", g.o.Namespace, err)
	}
	return nil
}

func (g *adder) run(ctx context.Context) error {
	privileged := false
	for {
		name, added, err := g.ensure(ctx, privileged)
		if err != nil {
			return err
		}
		err = g.wait(ctx, name)
		switch {
		case !added && errors.As(err, new(*gatewayEnded)):
			// The kubelet is a moment late to say so; the next one is ours.
			g.o.tell("%s has ended meanwhile", name)
		case !privileged && noTUN(err):
			g.o.tell("%v; trying a privileged container, the last resort", err)
			privileged = true
		default:
			return err
		}
	}
}

// gatewayEnded is the end of a gateway's container.
type gatewayEnded struct {
	cause *api.Error
	code  int32 // its exit code
}

func (e *gatewayEnded) Error() string { return e.cause.Error() }
func (e *gatewayEnded) Unwrap() error { return e.cause }

// noTUN reports whether the gateway ended because it got no TUN device.
func noTUN(err error) bool {
	var ended *gatewayEnded
	return errors.As(err, &ended) && api.ExitCode(ended.code) == api.ExitNoTUN
}

// ensure returns the name of the gateway that is there, or that it adds.
func (g *adder) ensure(ctx context.Context, privileged bool) (name string, added bool, err error) {
	for try := 1; ; try++ {
		p, err := g.pod(ctx)
		if err != nil {
			return "", false, err
		}
		if name := g.present(p); name != "" {
			return name, false, nil
		}
		c := gatewayContainer(nextGateway(p), g.image(p), privileged)
		g.o.tell("the container %s in the pod %s", c.Name, p.Name)
		err = g.patch(ctx, p, c, false)
		if enforced(err) && g.o.Relabel {
			err = g.addRelabelled(ctx, p, c, err)
		}
		switch {
		case err == nil:
			return c.Name, true, nil
		case (apierrors.IsConflict(err) || apierrors.IsInvalid(err)) && try < gatewayTries && g.taken(ctx, c.Name):
			continue
		}
		return "", false, g.refusal(ctx, err)
	}
}

// taken reports whether the pod has a container of that name by now.
func (g *adder) taken(ctx context.Context, name string) bool {
	p, err := g.pod(ctx)
	return err == nil && slices.ContainsFunc(p.Spec.EphemeralContainers, func(c corev1.EphemeralContainer) bool { return c.Name == name })
}

// addRelabelled adds the container once the namespace admits it. refused is what it said before.
func (g *adder) addRelabelled(ctx context.Context, p *corev1.Pod, c corev1.EphemeralContainer, refused error) error {
	n, err := g.relabellable(ctx)
	if err != nil {
		return err
	}
	if n == nil {
		return refused
	}
	before := n.Labels[labelEnforce]
	g.o.tell("labelling the namespace %s: %s=privileged, which was %s", p.Namespace, labelEnforce, before)
	if err := g.relabel(ctx, "privileged"); err != nil {
		return err
	}
	// Each API server's admission has its own copy of the namespaces, which follows a moment later: it is asked for 5 s.
	follows := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 2, Steps: 10}
	gaveUp := wait.ExponentialBackoffWithContext(ctx, follows, func(ctx context.Context) (bool, error) {
		err = g.patch(ctx, p, c, false)
		return !enforced(err), nil
	})
	if err == nil {
		err = gaveUp
	}
	if err != nil && before != "" && !apierrors.IsConflict(err) && !apierrors.IsInvalid(err) {
		return errors.Join(err, g.relabel(context.WithoutCancel(ctx), before))
	}
	return err
}

// wait watches until the gateway runs and the manager has its device, or it is known why not.
func (g *adder) wait(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, g.timeout, errNotInTime)
	defer cancel()
	changed := make(chan struct{}, 1)
	pods := g.kube.CoreV1().Pods(g.o.Namespace)
	store := follow(ctx, g.kube, changed, &corev1.Pod{}, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", g.o.Pod).String(),
	}, pods.List, pods.Watch)
	defer func() {
		cancel()
		store.done.Wait()
	}()
	var late <-chan time.Time
	started, said := false, "nothing was seen of it"
	for {
		select {
		case <-ctx.Done():
			if !errors.Is(context.Cause(ctx), errNotInTime) {
				return ctx.Err()
			}
			return g.tooLate(name, fmt.Sprintf("did not start within %v: %s", g.timeout, said))
		case <-late:
			return g.tooLate(name, fmt.Sprintf("runs, and the traffic manager has not taken its device within %v", g.handover))
		case <-g.o.Ready:
			return nil
		case <-changed:
		}
		if !store.listed.Load() {
			continue
		}
		items := store.List()
		if len(items) == 0 {
			return podGone(g.o.Pod, "is there no more")
		}
		running, detail, err := judgeGateway(items[0].(*corev1.Pod), name)
		switch {
		case err != nil:
			return err
		case running && g.o.Ready == nil:
			return nil
		case running && !started:
			started = true
			late = time.After(g.handover)
		}
		if detail != "" && detail != said {
			said = detail
			g.o.tell("%s", detail)
		}
	}
}

func (g *adder) tooLate(name, what string) error {
	return api.Errorf(api.ExitNotReady, "the gateway %s", what).
		WithHint("`kubectl -n %s logs %s -c %s` and `kubectl -n %s describe pod %s` say more.", g.o.Namespace, g.o.Pod, name, g.o.Namespace, g.o.Pod)
}

// judgeGateway says what a pod shows of a gateway's container.
func judgeGateway(p *corev1.Pod, name string) (running bool, detail string, err error) {
	if p.DeletionTimestamp != nil {
		return false, "", podGone(p.Name, "is being deleted")
	}
	i := slices.IndexFunc(p.Status.EphemeralContainerStatuses, func(c corev1.ContainerStatus) bool { return c.Name == name })
	if i < 0 {
		return false, "the node " + p.Spec.NodeName + " has not begun to start it", nil
	}
	c := p.Status.EphemeralContainerStatuses[i]
	switch state := c.State; {
	case state.Running != nil:
		return true, "", nil
	case state.Terminated != nil:
		words := joined(state.Terminated.Reason, lastLines(state.Terminated.Message))
		return false, "", &gatewayEnded{code: state.Terminated.ExitCode, cause: api.Errorf(api.ExitNetstack, "the gateway has ended, with exit code %d: %s", state.Terminated.ExitCode, words).
			WithHint("`kubectl -n %s logs %s -c %s` says more. Is %s the image of this kubevpn?", p.Namespace, p.Name, name, c.Image)}
	case state.Waiting != nil:
		detail = joined(state.Waiting.Reason, state.Waiting.Message)
		switch state.Waiting.Reason {
		case "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable":
			return false, detail, imageError(p, c, state.Waiting.Message)
		case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
			return false, detail, api.Errorf(api.ExitNetstack, "the node cannot start the gateway: %s", detail).
				WithHint("`kubectl -n %s describe pod %s` says more.", p.Namespace, p.Name)
		}
	}
	return false, detail, nil
}
