package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/util/wait"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podstatus"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
)

const (
	// gatewayPrefix, with a number, is the name of a gateway's container. A container that has ended stays in its pod's
	// specification, and its name with it.
	gatewayPrefix = "gateway-"
	// handoverTimeout limits the time from the gateway's start until the manager has its device. The gateway runs many
	// programs, which a busy node with slow processors starts slowly.
	handoverTimeout = 2 * time.Minute

	stepGateway = "Adding the gateway"
)

// GatewayOptions configures AddGateway. A gateway (`traffic gateway`) is an ephemeral container of the traffic
// manager's pod, with capabilities that the system netstack needs. AddGateway uses the user's own rights and changes no
// other container.
type GatewayOptions struct {
	Namespace string
	Pod       string
	Image     string // of the trusted manager's Deployment; the images of the pod do not matter
	// Relabel lets AddGateway label the namespace privileged if kubevpn created it and it enforces pod security. It is
	// for a user who asks for the system netstack.
	Relabel  bool
	Progress func(api.Event) // may be nil
	// Ready is closed when the manager has the gateway's device, and AddGateway waits for that. Nil: AddGateway waits
	// until the container runs.
	Ready <-chan struct{}
}

func (o GatewayOptions) tell(format string, args ...any) {
	tell(o.Progress, stepGateway, format, args...)
}

// MayAddGateway returns nil if a gateway runs, or if the cluster (RBAC, pod security, webhooks) would admit one now.
// Otherwise it returns an *api.Error with the reason and a hint for an admin, or ctx's error. It changes nothing.
func MayAddGateway(ctx context.Context, c apiServer, o GatewayOptions) error {
	g := adder{kube: c.Kube(), o: o}
	return c.ExplainContext(ctx, g.may(ctx))
}

// AddGateway adds a gateway to the pod unless one runs there, and waits until it runs. If the runtime's device rules
// deny TUN devices to unprivileged containers, it adds a privileged container and reports this. Errors are *api.Error,
// or ctx's.
func AddGateway(ctx context.Context, c apiServer, o GatewayOptions) error {
	g := adder{kube: c.Kube(), o: o, timeout: readyTimeout, handover: handoverTimeout}
	return c.ExplainContext(ctx, g.run(ctx))
}

// gatewayContainer returns the gateway's container, which needs the Pod Security level "privileged".
func gatewayContainer(name, image string, privileged bool) corev1.EphemeralContainer {
	// iptables-legacy needs NET_RAW for its raw socket. It adds no risk: a process with NET_ADMIN and a TUN device can
	// send any packet.
	security := workloads.Root("MKNOD", "NET_ADMIN", "NET_RAW")
	if privileged {
		security.Privileged = new(true)
		security.AllowPrivilegeEscalation, security.SeccompProfile, security.Capabilities = nil, nil, nil
	}
	return workloads.Container(name, image, security, "gateway")
}

// ErrPodGone is in the chain of AddGateway's error if the pod is gone or is being deleted; another pod replaces it.
var ErrPodGone = errors.New("the traffic manager's pod is gone, and so is its gateway")

func podGone(name, how string) error {
	return api.Errorf(api.ExitNotReady, "%w: %s %s", ErrPodGone, name, how).
		WithHint("Another pod replaces it: connect again.")
}

// adder adds a gateway to one pod.
type adder struct {
	kube              kubernetes.Interface
	o                 GatewayOptions
	timeout, handover time.Duration
}

// pod reads the pod. It fails for a pod that must not have a gateway.
func (g *adder) pod(ctx context.Context) (*corev1.Pod, error) {
	p, err := g.kube.CoreV1().Pods(g.o.Namespace).Get(ctx, g.o.Pod, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, podGone(g.o.Pod, "no longer exists")
	}
	if err != nil {
		return nil, fmt.Errorf("reading the traffic manager's pod: %w", err)
	}
	if p.Spec.HostNetwork {
		return nil, api.Errorf(api.ExitNetstack,
			"the traffic manager's pod %s uses its node's network, which a gateway would change", p.Name).
			WithHint("Install a traffic manager without hostNetwork: `kubevpn install`.")
	}
	return p, nil
}

func (g *adder) may(ctx context.Context) error {
	p, err := g.pod(ctx)
	if err != nil {
		return err
	}
	_, _, err = g.add(ctx, p, false, true)
	if enforced(err) && g.o.Relabel {
		n, reading := g.relabellable(ctx)
		if reading != nil || n != nil {
			return reading
		}
	}
	return g.refusal(ctx, err)
}

// add adds a gateway to the pod, unless one runs there or starts from the right image.
func (g *adder) add(ctx context.Context, p *corev1.Pod, privileged, dry bool) (name string, added bool, err error) {
	name, added, err = workloads.Ephemeral{
		Prefix: gatewayPrefix,
		New:    func(name string) corev1.EphemeralContainer { return gatewayContainer(name, g.o.Image, privileged) },
		Serves: func(p *corev1.Pod, c corev1.EphemeralContainer) bool {
			s := podstatus.Of(p, c.Name)
			return s.Running || s.Problem != podstatus.Ended && c.Image == g.o.Image
		},
	}.Add(ctx, g.kube, p, dry)
	switch {
	case errors.Is(err, client.ErrPodGone):
		err = podGone(p.Name, "is being deleted")
	case err != nil:
		err = fmt.Errorf("adding the gateway to the pod %s: %w", p.Name, err)
	}
	return name, added, err
}

// enforced reports whether pod security has rejected the container.
func enforced(err error) bool {
	return apierrors.IsForbidden(err) && client.PodSecurityViolation(err.Error()) != ""
}

// refusal converts an error of add to one for the user.
func (g *adder) refusal(ctx context.Context, err error) error {
	if !apierrors.IsForbidden(err) {
		return err
	}
	ns := g.o.Namespace
	if user, p, ok := client.Denial(err); ok {
		return api.Errorf(api.ExitPermission,
			"you may not add the gateway to the traffic manager's pod: this requires the right to %s", p).
			WithHint("A user with this right in a namespace that admits privileged pods can become root on the "+
				"nodes. Ask a cluster admin to run:\n%s", p.GrantCommands(cmp.Or(user, username(ctx, g.kube))))
	}
	if !enforced(err) {
		return err // from a webhook or a quota: client.Explain explains it
	}
	label := fmt.Sprintf("kubectl label namespace %s %s=privileged --overwrite", ns, client.PodSecurityLabel)
	return api.Errorf(api.ExitNetstack, "pod security does not admit the gateway in the namespace %s: %s", ns,
		client.PodSecurityViolation(err.Error())).
		WithHint("Ask a cluster admin to run\n  %s", label)
}

// relabellable returns the namespace if kubevpn has created it and the user may label it, or nil.
func (g *adder) relabellable(ctx context.Context) (*corev1.Namespace, error) {
	n, err := g.kube.CoreV1().Namespaces().Get(ctx, g.o.Namespace, metav1.GetOptions{})
	if apierrors.IsForbidden(err) {
		return nil, nil // those who may not see it may not label it
	}
	if err != nil {
		return nil, fmt.Errorf("reading the namespace %s: %w", g.o.Namespace, err)
	}
	// A user with the right to this namespace alone counts as one without it.
	if n.Annotations[annotationCreated] != "true" ||
		len(lacking(ctx, g.kube, []client.Permission{{Verb: "patch", Resource: "namespaces"}})) > 0 {
		return nil, nil
	}
	return n, nil
}

// relabel sets the level of pod security that the namespace enforces.
func (g *adder) relabel(ctx context.Context, level string) error {
	patch := fmt.Sprintf(`{"metadata":{"labels":{%q:%q}}}`, client.PodSecurityLabel, level)
	_, err := g.kube.CoreV1().Namespaces().Patch(ctx, g.o.Namespace, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{FieldManager: fieldManager})
	if err != nil {
		return fmt.Errorf("labeling the namespace %s: %w", g.o.Namespace, err)
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
			// The pod's status was outdated. The next iteration adds a container.
			g.o.tell("%s has ended in the meantime", name)
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

// ensure returns the name of the pod's gateway, which it adds if there is none.
func (g *adder) ensure(ctx context.Context, privileged bool) (name string, added bool, err error) {
	p, err := g.pod(ctx)
	if err != nil {
		return "", false, err
	}
	name, added, err = g.add(ctx, p, privileged, false)
	if enforced(err) && g.o.Relabel {
		name, added, err = g.addRelabeled(ctx, p, privileged, err)
	}
	if err != nil {
		return "", false, g.refusal(ctx, err)
	}
	if added {
		g.o.tell("the container %s in the pod %s", name, p.Name)
	}
	return name, added, nil
}

// addRelabeled labels the namespace and adds the container. refused is the error of add without the label.
func (g *adder) addRelabeled(ctx context.Context, p *corev1.Pod, privileged bool,
	refused error) (name string, added bool, err error) {
	n, err := g.relabellable(ctx)
	if err != nil {
		return "", false, err
	}
	if n == nil {
		return "", false, refused
	}
	before := n.Labels[client.PodSecurityLabel]
	g.o.tell("labeling the namespace %s: %s=privileged, which was %s", p.Namespace, client.PodSecurityLabel, before)
	if err := g.relabel(ctx, "privileged"); err != nil {
		return "", false, err
	}
	// Each API server has its own copy of the namespaces, which may be outdated for a moment: 10 tries in 5 s.
	backoff := wait.Backoff{Duration: 10 * time.Millisecond, Factor: 2, Steps: 10}
	gaveUp := wait.ExponentialBackoffWithContext(ctx, backoff, func(ctx context.Context) (bool, error) {
		name, added, err = g.add(ctx, p, privileged, false)
		return !enforced(err), nil
	})
	if err == nil {
		err = gaveUp
	}
	if err != nil && before != "" {
		err = errors.Join(err, g.relabel(context.WithoutCancel(ctx), before))
	}
	return name, added, err
}

// wait waits until the gateway runs and the manager has its device, or until one of them fails.
func (g *adder) wait(ctx context.Context, name string) error {
	ctx, cancel := context.WithTimeoutCause(ctx, g.timeout, errNotInTime)
	defer cancel()
	mirror := client.NewMirror(g.kube, &corev1.Pod{}, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector("metadata.name", g.o.Pod).String(),
	}, g.kube.CoreV1().Pods(g.o.Namespace))
	defer wakeup.Go(ctx, mirror.Run)()
	var late <-chan time.Time
	started, said := false, "no status was reported"
	for {
		select {
		case <-ctx.Done():
			if !errors.Is(context.Cause(ctx), errNotInTime) {
				return ctx.Err()
			}
			return g.tooLate(name, fmt.Sprintf("did not start within %v: %s", g.timeout, said))
		case <-late:
			return g.tooLate(name, fmt.Sprintf("runs, but the traffic manager did not receive its device within %v",
				g.handover))
		case <-g.o.Ready:
			return nil
		case <-mirror.Changed:
		}
		if !mirror.Listed() {
			continue
		}
		pods := mirror.Objects()
		if len(pods) == 0 {
			return podGone(g.o.Pod, "no longer exists")
		}
		running, detail, err := judgeGateway(pods[0], name)
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
		WithHint("`kubectl -n %s logs %s -c %s` and `kubectl -n %s describe pod %s` show the cause.",
			api.ShellQuote(g.o.Namespace), api.ShellQuote(g.o.Pod), name, api.ShellQuote(g.o.Namespace),
			api.ShellQuote(g.o.Pod))
}

// judgeGateway returns the state of the gateway's container in a pod.
func judgeGateway(p *corev1.Pod, name string) (running bool, detail string, err error) {
	if p.DeletionTimestamp != nil {
		return false, "", podGone(p.Name, "is being deleted")
	}
	s := podstatus.Of(p, name)
	e := s.Error("the gateway", api.ExitNetstack)
	switch s.Problem {
	case podstatus.None:
		return s.Running, s.Text, nil
	case podstatus.Ended:
		return false, "", &gatewayEnded{code: s.End.ExitCode, cause: e}
	case podstatus.Image:
		return false, s.Text, e.WithHint("%s", imageHint)
	}
	return false, s.Text, e
}
