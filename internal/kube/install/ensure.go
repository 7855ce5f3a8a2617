package install

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	rbacv1 "k8s.io/api/rbac/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wakeup"
)

// apiServer is the API server of a *client.Cluster.
type apiServer interface {
	Kube() kubernetes.Interface
	// ExplainContext converts the error of a request into an *api.Error, or returns the error of a ctx that has ended.
	ExplainContext(ctx context.Context, err error) error
}

// Result describes the traffic manager that Ensure found or installed.
type Result struct {
	Namespace string
	Pod       string
	Node      string // of the pod
	Image     string // of the manager that runs, which need not be Options.Image
	Installed bool   // Ensure installed or upgraded it
	Manager   api.TrustedManager
	Warnings  []string
	Exposed   string // a sentence about what Options.Expose has done; empty: nothing
	Release   string // the Helm release that owns the manager; empty: none
	// ImageWarning is the entry of Warnings about an Image other than Options.Image, or "".
	ImageWarning string
	// Lease is that of a temporary manager, which the caller must renew. Zero: the manager stays, or the user may not
	// renew its lease.
	Lease Lease
}

const (
	stepInstall = "Installing the traffic manager"
	stepWait    = "Waiting for the traffic manager"
)

// Ensure finds or installs the traffic manager, and waits up to two minutes until a pod of it runs. It reports progress
// to o.Progress. Several laptops may call it at once. Errors are *api.Error, or ctx's.
func Ensure(ctx context.Context, c apiServer, o Options) (Result, error) {
	e := &ensurer{kube: c.Kube(), o: o, timeout: readyTimeout}
	err := e.run(ctx)
	return e.result, c.ExplainContext(ctx, err)
}

// FindPod returns the name of a pod in which the traffic manager runs. It waits for one until ctx ends.
func FindPod(ctx context.Context, c apiServer, namespace string) (string, error) {
	w := waiter{kube: c.Kube(), namespace: namespace, timeout: readyTimeout}
	pod, err := w.wait(ctx)
	if err != nil {
		return "", c.ExplainContext(ctx, err)
	}
	return pod.Name, nil
}

type ensurer struct {
	kube    kubernetes.Interface
	o       Options
	timeout time.Duration
	result  Result

	generation int64        // of the Deployment after our apply; 0: we applied none
	release    *helmRelease // owns the manager; nil: kubevpn may change it
	seen       snapshot     // of the manager that is used
	fallback   bool         // the namespace is Options.FallbackNamespace
}

// denial is the error of a user who cannot use or install a manager in a namespace, but perhaps in another one.
type denial struct {
	err     error // for the user, if there is no other namespace
	text    string
	denials []client.Permission
	exists  bool // a manager is there
}

func (d *denial) Error() string { return d.err.Error() }
func (d *denial) Unwrap() error { return d.err }

func (e *ensurer) run(ctx context.Context) error {
	if err := e.o.checkExpose(); err != nil {
		return err
	}
	if err := e.findOrInstall(ctx); err != nil {
		return err
	}
	e.result.Namespace = e.o.namespace()
	if err := e.expose(ctx); err != nil {
		return err
	}
	pod, err := e.pod(ctx)
	if err != nil {
		return err
	}
	e.result.Pod, e.result.Node = pod.Name, pod.Spec.NodeName
	installed := e.result.Image // the Deployment's; an older pod may still serve while a rollout goes on
	e.result.Image = managerImage(pod.Spec)
	if e.o.Image != "" && installed != e.o.Image && e.result.Image != e.o.Image {
		upgrade := "kubevpn connect --upgrade"
		if e.release != nil {
			upgrade = e.release.upgrade(e.o.Image)
		}
		e.warn("the traffic manager in %s runs the image %s, and this kubevpn would install %s. `%s` replaces it; "+
			"this ends the open connections of all its users", e.result.Namespace, e.result.Image, e.o.Image, upgrade)
		e.result.ImageWarning = e.result.Warnings[len(e.result.Warnings)-1]
	}
	return nil
}

// findOrInstall uses the manager in the first namespace in which the user may use or install one. If that is the
// fallback, it warns.
func (e *ensurer) findOrInstall(ctx context.Context) error {
	namespaces := e.o.namespaces()
	ns := namespaces[0]
	err := e.try(ctx, ns)
	no, denied := errors.AsType[*denial](err)
	if !denied || len(namespaces) == 1 {
		return err
	}
	fallback := namespaces[1]
	e.o.Namespace, e.fallback = fallback, true
	err = e.try(ctx, fallback)
	if also, denied := errors.AsType[*denial](err); denied {
		return e.bothDenied(ctx, ns, no, fallback, also)
	}
	if err != nil || e.result.Lease.UID != "" && !no.exists { // the latter tells of a better one
		return err
	}
	e.warn("the traffic manager runs in the namespace %s: %s in %s. To use one for the whole cluster, ask a "+
		"cluster admin to run\n%s", fallback, no.text, ns, e.ask(ctx, ns))
	return nil
}

// pod returns a pod in which the manager runs, and waits for one unless the survey has seen it.
func (e *ensurer) pod(ctx context.Context) (*corev1.Pod, error) {
	if e.generation == 0 {
		if v := judge(e.seen); v.ready {
			return v.pod, nil
		}
	}
	w := waiter{kube: e.kube, namespace: e.result.Namespace, generation: e.generation, timeout: e.timeout,
		progress: e.o.Progress}
	return w.wait(ctx)
}

func (e *ensurer) warn(format string, args ...any) {
	e.result.Warnings = append(e.result.Warnings, fmt.Sprintf(format, args...))
}

func (e *ensurer) tellInstall(format string, args ...any) {
	tell(e.o.Progress, stepInstall, format, args...)
}

// bothDenied returns the error for a user who can use neither namespace.
func (e *ensurer) bothDenied(ctx context.Context, ns string, no *denial, fallback string, also *denial) error {
	verbs := api.Texts(also.denials, func(p client.Permission) string { return p.Verb + " " + p.Resource })
	hint := "Ask a cluster admin to run\n" + e.ask(ctx, ns)
	if len(verbs) > 0 { // an admission plugin's denial names no permission
		hint += fmt.Sprintf("\nor to let you do this in %s: %s", fallback, strings.Join(verbs, ", "))
	}
	return api.Errorf(api.ExitPermission,
		"the traffic manager can be installed neither in the namespace %s (%s) nor in %s (%s)", ns, no.text, fallback,
		also.text).
		WithHint("%s", hint)
}

// try uses the manager in ns, or installs it there. It returns a *denial if the user lacks the rights.
func (e *ensurer) try(ctx context.Context, ns string) error {
	s, err := e.existing(ctx, ns)
	if err != nil {
		return err
	}
	switch {
	case apierrors.IsForbidden(s.managerErr):
		return e.denied(ctx, ns, "look for it", s.managerErr)
	case apierrors.IsNotFound(s.managerErr):
		return e.install(ctx, ns, s)
	case s.managerErr != nil:
		return s.managerErr
	case len(s.lacking) > 0:
		d := e.mayNot(ctx, ns, "use it", s.lacking)
		d.exists = true
		return d
	}
	return e.use(ctx, ns, s)
}

// existing surveys ns. It waits while the manager there, or the namespace, is being deleted.
func (e *ensurer) existing(ctx context.Context, ns string) (s *survey, err error) {
	err = e.afterDeletion(ctx, "the traffic manager in "+ns, func(ctx context.Context) (bool, error) {
		s = e.survey(ctx, ns)
		if s.managerErr != nil || s.ending() || len(s.lacking) > 0 {
			return s.ending(), nil
		}
		return e.renew(ctx, s.manager)
	})
	return s, err
}

// renew renews the lease of an existing manager, if it has one. It reports whether Kubernetes deletes the manager.
func (e *ensurer) renew(ctx context.Context, d *appsv1.Deployment) (ending bool, err error) {
	l := leaseOf(d)
	if l.UID == "" {
		return false, nil
	}
	lives, err := l.renew(ctx, e.kube, LeaseTime)
	if apierrors.IsForbidden(err) {
		e.warn("the traffic manager in %s ends when the laptop that installed it leaves: you may not patch Jobs there",
			l.Namespace)
		return false, nil
	}
	e.own(l)
	return !lives, err
}

// createNamespace creates the namespace unless it exists. It waits while the namespace is being deleted.
func (e *ensurer) createNamespace(ctx context.Context, ns string) error {
	namespaces := e.kube.CoreV1().Namespaces()
	return e.afterDeletion(ctx, "the namespace "+ns, func(ctx context.Context) (bool, error) {
		existing, err := namespaces.Get(ctx, ns, metav1.GetOptions{})
		if err == nil {
			return existing.DeletionTimestamp != nil, nil
		}
		if !apierrors.IsNotFound(err) {
			return false, fmt.Errorf("looking for the namespace %s: %w", ns, err)
		}
		n := namespaceObject(ns)
		e.o.decorate(n)
		_, err = namespaces.Create(ctx, n, metav1.CreateOptions{FieldManager: fieldManager})
		if err != nil && !apierrors.IsAlreadyExists(err) { // another laptop may have created it
			return false, fmt.Errorf("creating the namespace %s: %w", ns, err)
		}
		return false, nil
	})
}

const (
	// terminatingTimeout limits the wait for the end of an object that is being deleted.
	terminatingTimeout = time.Minute
	terminatingPause   = 500 * time.Millisecond // between two looks at it
)

// afterDeletion calls look until it does not report that the object is being deleted.
func (e *ensurer) afterDeletion(ctx context.Context, object string,
	look func(context.Context) (ending bool, err error)) error {
	ctx, cancel := context.WithTimeout(ctx, terminatingTimeout)
	defer cancel()
	for told := false; ; told = true {
		if ending, err := look(ctx); !ending || err != nil {
			return err
		}
		if !told {
			e.tellInstall("%s is being deleted: waiting until it is gone", object)
		}
		if !wakeup.Pause(ctx, terminatingPause) {
			return fmt.Errorf("waiting for the deletion of %s: %w", object, ctx.Err())
		}
	}
}

// denied returns the denial for a request that the API server refused.
func (e *ensurer) denied(ctx context.Context, ns, doing string, err error) *denial {
	if _, p, ok := client.Denial(err); ok {
		return e.mayNot(ctx, ns, doing, []client.Permission{p})
	}
	return &denial{err: err, text: "you may not " + doing}
}

func (e *ensurer) mayNot(ctx context.Context, ns, doing string, missing []client.Permission) *denial {
	return &denial{
		text: "you may not " + doing, denials: missing,
		err: api.Errorf(api.ExitPermission, "you may not %s in the namespace %s: this requires the right to %s",
			strings.Replace(doing, "it", "the traffic manager", 1), ns, missing[0]).
			WithHint("Ask a cluster admin to run\n%s", e.ask(ctx, ns)),
	}
}

// ask returns the commands with which an admin lets the user use a manager in ns.
func (e *ensurer) ask(ctx context.Context, ns string) string {
	install := "kubevpn install"
	if ns != DefaultNamespace {
		install += " --manager-namespace " + ns
	}
	return "  " + install + "\n  " + client.BindCommand(ns, userRoleName, username(ctx, e.kube))
}

// install makes a new manager in ns. It returns a *denial if the user lacks the rights.
func (e *ensurer) install(ctx context.Context, ns string, s *survey) error {
	needs := append(toInstall(ns), toUse(ns)...)
	n, err := s.namespace, s.namespaceErr
	create := apierrors.IsNotFound(err)
	if create {
		needs = append(needs, client.Permission{Verb: "create", Resource: "namespaces"})
	} else if err != nil && !apierrors.IsForbidden(err) {
		return fmt.Errorf("looking for the namespace %s: %w", ns, err)
	}
	if missing := lacking(ctx, e.kube, needs); len(missing) > 0 {
		return e.mayNot(ctx, ns, "install it", missing)
	}
	if err := e.o.noImage(); err != nil {
		return err
	}
	if err := e.upstreamLeftovers(ctx, ns); err != nil {
		return err
	}
	if !create && e.o.Namespace == "" {
		if err := e.trustNamespace(n, ns); err != nil {
			return err
		}
	}
	if r, err := helmReleaseIn(ctx, e.kube, ns); err != nil {
		return err
	} else if r != nil {
		return r.refuse(r.upgrade(e.o.Image))
	}
	e.tellInstall("in the namespace %s, image %s", ns, e.o.Image)
	if create || err == nil { // else the user may not read it: it exists, or the next request fails
		err := e.createNamespace(ctx, ns)
		if apierrors.IsForbidden(err) {
			return e.denied(ctx, ns, "create the namespace", err)
		}
		if err != nil {
			return err
		}
	}
	if e.fallback && !e.o.Keep && len(lacking(ctx, e.kube, toLease(ns))) == 0 &&
		len(lacking(ctx, e.kube, toGrant(ns))) > 0 {
		l, err := e.lease(ctx, ns)
		if err != nil {
			return err
		}
		e.own(l)
	}
	err = e.applyManager(ctx, ns)
	if _, _, denied := client.Denial(err); denied || apierrors.IsNotFound(err) {
		return e.denied(ctx, ns, "install it", err)
	}
	return err
}

// trustNamespace asks for consent to install into an existing namespace without a manager that the user did not name,
// since its creator may be able to change what is installed there.
func (e *ensurer) trustNamespace(n *corev1.Namespace, ns string) error {
	m := manager(ns, e.o.Image, n.CreationTimestamp) // n is zero if the user may not read it
	m.NamespaceUID = string(n.UID)
	if e.o.Consent == nil || e.o.Consent.Trusts(m) == nil {
		return nil
	}
	return api.NeedsManager(m,
		"the namespace %s already exists: its creator may be able to change the traffic manager that you install "+
			"into it", ns)
}

// applyManager applies everything that the user may, the Deployment last.
func (e *ensurer) applyManager(ctx context.Context, ns string) error {
	o := e.o
	o.Namespace, o.APIServers = ns, apiServers(ctx, e.kube)
	o.Objects.Resources = append(quotaLimits(ctx, e.kube, ns), o.Objects.Resources...)
	if o.owner == nil {
		if err := e.grant(ctx, o); err != nil {
			return err
		}
	}
	if err := o.applyAll(ctx, e.kube, baseObjects(o)); err != nil {
		return err
	}
	d, identity, err := readManager(ctx, e.kube, ns)
	if err != nil {
		return fmt.Errorf("reading the Deployment back: %w", err)
	}
	// Another field manager may have added to it.
	if err := checkShape(d, "The ServiceAccount, the Deployment and, where you may, the manager's rights were\n"+
		"applied before; `kubevpn uninstall --manager-namespace "+ns+"` removes them."); err != nil {
		return err
	}
	e.generation, e.result.Image, e.result.Installed = d.Generation, o.Image, true
	e.result.Manager = identity
	if e.o.Progress != nil {
		e.o.Progress(api.Event{Time: time.Now(), Installed: &e.result.Manager})
	}
	return nil
}

// quotaLimits returns the limits that quotas of the namespace demand and the manager does not have, as in api.Objects.
// It returns none if the user may not read quotas: the API server then says what it demands.
func quotaLimits(ctx context.Context, kube kubernetes.Interface, ns string) (limits []string) {
	quotas, err := kube.CoreV1().ResourceQuotas(ns).List(ctx, metav1.ListOptions{})
	if err != nil {
		return nil
	}
	for _, q := range quotas.Items {
		if _, demanded := q.Spec.Hard[corev1.ResourceLimitsCPU]; demanded {
			limits = append(limits, "limits.cpu=1")
		}
		if _, demanded := q.Spec.Hard[corev1.ResourceLimitsEphemeralStorage]; demanded {
			limits = append(limits, "limits.ephemeral-storage=64Mi")
		}
	}
	return limits
}

// grant gives the manager its rights, if the user may; else it warns.
func (e *ensurer) grant(ctx context.Context, o Options) error {
	var reason string
	if missing := lacking(ctx, e.kube, toGrant(o.namespace())); len(missing) > 0 {
		reason = "you may not " + missing[0].String()
	} else if err := o.applyAll(ctx, e.kube, rightsObjects(o)); apierrors.IsForbidden(err) {
		reason = "the API server forbids it: " + err.Error()
	} else {
		return err
	}
	e.warn("the traffic manager gets no rights of its own (%s). It dials ClusterIPs directly, which requires "+
		"kube-proxy, and cannot read the nodes' pod networks or the names of Services. Ask a cluster admin to run\n"+
		"  kubevpn install --manager-namespace %s", reason, o.namespace())
	return nil
}

// use accepts an existing manager if it is ours and the user trusts it.
func (e *ensurer) use(ctx context.Context, ns string, s *survey) error {
	d := s.manager
	e.seen = snapshot{namespace: ns, deployment: d, pods: s.pods}
	if err := checkShape(d, nothing); err != nil {
		return err
	}
	if e.o.Upgrade {
		if err := e.o.noImage(); err != nil {
			return err
		}
	}
	e.result.Image, e.result.Manager = managerImage(d.Spec.Template.Spec), identify(d, s.namespace, s.namespaceErr)
	if e.o.Consent != nil {
		if err := e.o.Consent.Trusts(e.result.Manager); err != nil {
			return err
		}
	}
	if e.release = helmReleaseOf(d); e.release != nil {
		e.result.Release = e.release.name
	}
	broken := isBroken(d, s.pods)
	switch {
	case e.o.Keep && e.result.Lease.UID != "":
		return e.keep(ctx, ns)
	case e.o.Image == "" || e.result.Image == e.o.Image:
	case e.o.Upgrade && e.release != nil:
		return e.release.refuse(e.release.upgrade(e.o.Image))
	case e.o.Upgrade:
		e.tellInstall("upgrading from image %s to %s", e.result.Image, e.o.Image)
		return e.applyManager(ctx, ns)
	case broken && e.release == nil && len(lacking(ctx, e.kube, toInstall(ns))) == 0:
		// No session can break: no pod serves one.
		e.warn("the traffic manager in %s did not run with image %s: it now has %s", ns, e.result.Image, e.o.Image)
		return e.applyManager(ctx, ns)
	}
	if d.Status.AvailableReplicas == 0 {
		e.pullAgain(ctx, ns, s.pods)
	}
	return e.repair(ctx, ns, s, broken)
}

// own makes the lease the owner of what is applied.
func (e *ensurer) own(l Lease) { e.result.Lease, e.o.owner = l, l.owner() }

// pullAgain deletes the pods whose image could not be pulled, if the user may. The kubelet pulls the image of their
// successors at once, but waits up to five minutes before it retries a failed pull.
func (e *ensurer) pullAgain(ctx context.Context, ns string, pods []*corev1.Pod) {
	stuck := unpullable(pods)
	if len(stuck) == 0 || len(lacking(ctx, e.kube,
		[]client.Permission{{Verb: "delete", Resource: "pods", Namespace: ns}})) > 0 {
		return
	}
	e.tellInstall("its image could not be pulled: retrying")
	for _, p := range stuck {
		err := e.kube.CoreV1().Pods(ns).Delete(ctx, p.Name,
			metav1.DeleteOptions{Preconditions: &metav1.Preconditions{UID: &p.UID}})
		// the wait for a pod reports a problem that remains
		if err != nil && !apierrors.IsNotFound(err) && !apierrors.IsConflict(err) {
			e.tellInstall("deleting the pod %s: %v", p.Name, err)
		}
	}
}

// isBroken reports whether nobody can be using the manager, and waiting will probably not repair it.
func isBroken(d *appsv1.Deployment, pods []*corev1.Pod) bool {
	if d.Status.AvailableReplicas > 0 || d.Status.ObservedGeneration != d.Generation {
		return false
	}
	return mature(d) || len(unpullable(pods)) > 0
}

// unpullable returns the pods whose image cannot be pulled. Unlike mature, it needs no wait when a user who gave a
// wrong image tries another one.
func unpullable(pods []*corev1.Pod) (stuck []*corev1.Pod) {
	for _, p := range pods {
		if why := judgePod(p).problem; p.DeletionTimestamp == nil && why != nil && why.err.Code == api.ExitImagePull {
			stuck = append(stuck, p)
		}
	}
	return stuck
}

// mature reports whether the Deployment has been unavailable for so long that its pods should run by now.
func mature(d *appsv1.Deployment) bool {
	c := api.Find(d.Status.Conditions, func(c appsv1.DeploymentCondition) bool {
		return c.Type == appsv1.DeploymentAvailable && c.Status == corev1.ConditionFalse
	})
	return c != nil && time.Since(c.LastTransitionTime.Time) > 10*time.Second
}

// part is an object besides the Deployment that repair restores.
type part struct {
	look func(context.Context) error // reads it
	obj  runtime.Object
	need []client.Permission
}

// parts returns the ServiceAccount, the ClusterRole, its binding and the Role of users, in this order.
func (e *ensurer) parts(ns string) []part {
	const group = rbacv1.GroupName
	rbac := e.kube.RbacV1()
	all := objects(Options{Namespace: ns}, "ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role")
	return []part{
		{getter(e.kube.CoreV1().ServiceAccounts(ns), ManagerName), all[0], toApply("", "serviceaccounts", ns)},
		{getter(rbac.ClusterRoles(), clusterName(ns)), all[1], toApply(group, "clusterroles", "")},
		{getter(rbac.ClusterRoleBindings(), clusterName(ns)), all[2], toApply(group, "clusterrolebindings", "")},
		{getter(rbac.Roles(ns), userRoleName), all[3], toApply(group, "roles", ns)},
	}
}

// repair restores missing objects besides the Deployment, if the user may. Otherwise the manager reports the rights
// that it lacks. repair does not change the Deployment, which another tool may manage, nor objects of a Helm release.
func (e *ensurer) repair(ctx context.Context, ns string, s *survey, broken bool) error {
	if e.release != nil {
		return nil
	}
	for i, c := range e.parts(ns) {
		if i > 0 && e.o.owner != nil {
			break // a temporary manager has no rights
		}
		if !apierrors.IsNotFound(s.parts[i]) || len(lacking(ctx, e.kube, c.need)) > 0 {
			continue
		}
		if err := e.o.apply(ctx, e.kube, c.obj); apierrors.IsForbidden(err) {
			continue // the user does not hold the rights to grant
		} else if err != nil {
			return err
		}
		e.tellInstall("restored the %s", c.obj.GetObjectKind().GroupVersionKind().Kind)
		if i == 0 && broken {
			if err := e.restart(ctx, ns); err != nil {
				return err
			}
		}
	}
	return nil
}

// restart replaces the pods at once. The controller's own retries become slower and slower.
func (e *ensurer) restart(ctx context.Context, ns string) error {
	patch := fmt.Sprintf(`{"spec":{"template":{"metadata":{"annotations":{%q:%q}}}}}`, annotationRestarted,
		time.Now().UTC().Format(time.RFC3339))
	d, err := e.kube.AppsV1().Deployments(ns).Patch(ctx, ManagerName, types.StrategicMergePatchType, []byte(patch),
		metav1.PatchOptions{FieldManager: fieldManager})
	if err != nil {
		return fmt.Errorf("restarting the traffic manager: %w", err)
	}
	e.generation = d.Generation
	return nil
}

// managerImage returns the image of the traffic manager in a pod or a template, or "".
func managerImage(spec corev1.PodSpec) string {
	c := api.Find(spec.Containers, func(c corev1.Container) bool { return c.Name == containerName })
	return cmp.Or(c, new(corev1.Container)).Image
}

// tell reports a detail of a step. progress may be nil.
func tell(progress func(api.Event), step, format string, args ...any) {
	if progress != nil {
		progress(api.Event{Time: time.Now(), Step: step, Detail: fmt.Sprintf(format, args...)})
	}
}
