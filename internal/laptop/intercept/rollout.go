package intercept

import (
	"cmp"
	"context"
	"fmt"
	"slices"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/util/retry"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podstatus"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
)

// How the intercept adds and removes a sidecar (sidecar.go describes the changes):
//
//	add the agent to the template ─▶ patch Services ─▶ rollout ─▶ all pods have the agent ─▶ patch Services that had to wait
//	leave: release claims ─▶ undo the Services ─▶ undo the template ─▶ rollout, for which leave does not wait

// rolloutTimeout is how long the intercept waits until all pods have the agent.
const rolloutTimeout = 3 * time.Minute

// rollsOut returns nil if a change of the workload's template replaces its pods.
func rollsOut(w *workloads.Workload) error {
	if containers, _, _ := unstructured.NestedSlice(w.Object.Object, "spec", "template", "spec",
		"containers"); len(containers) == 0 {
		return api.Errorf(api.ExitInject, "%s has no pod template; a sidecar needs a pod template", w).
			WithHint("Name the workload that owns its pods: `kubectl -n %s get deployments,statefulsets,daemonsets`.",
				w.Namespace)
	}
	if w.Resource.Group == appsv1.GroupName && w.Kind == "ReplicaSet" {
		return api.Errorf(api.ExitInject,
			"a change of the template of %s does not replace its pods, and a sidecar needs that", w).
			WithHint("Name the Deployment that owns it.")
	}
	field := func(path ...string) any {
		value, _, _ := unstructured.NestedFieldNoCopy(w.Object.Object, append([]string{"spec"}, path...)...)
		return value
	}
	why, hint := "", ""
	minReady, _ := field("minReadySeconds").(int64)
	switch partition, _ := field("updateStrategy", "rollingUpdate", "partition").(int64); {
	case field("paused") == true, field("updateStrategy", "paused") == true:
		why, hint = "it is paused", fmt.Sprintf("Resume it: `kubectl -n %s rollout resume %s`.", w.Namespace, w)
	case field("updateStrategy", "type") == string(appsv1.OnDeleteStatefulSetStrategyType):
		why, hint = "its updateStrategy is OnDelete", "Change its updateStrategy to RollingUpdate."
	case partition > 0:
		why = fmt.Sprintf("the partition of its updateStrategy is %d", partition)
		hint = "Set the partition to 0."
	case minReady >= int64(rolloutTimeout/time.Second):
		why = fmt.Sprintf("a new pod counts only after %d s (minReadySeconds)", minReady)
		hint = fmt.Sprintf("Set minReadySeconds to less than %v.", rolloutTimeout)
	default:
		return nil
	}
	return api.Errorf(api.ExitInject,
		"%s does not replace its pods when its template changes, and a sidecar needs that: %s", w, why).
		WithHint("%s Or use a namespace that admits ephemeral containers, with --mode ephemeral.", hint)
}

// How long an obstacle to a rollout may last: controllers and the scheduler retry, and nodes come.
const (
	obstacleTime = 15 * time.Second
	obstaclePoll = 2 * time.Second
)

// watchObstacles returns an error when the rollout does not go on, with the cluster's reason.
func (i *Intercept) watchObstacles(ctx context.Context) error {
	since := time.Now() // the last moment without an obstacle
	for wakeup.Pause(ctx, obstaclePoll) {
		obstacle, err := i.obstacle(ctx)
		i.set(func() { i.slow = obstacle })
		switch {
		case err != nil:
			i.log.Warn("cannot see whether the rollout goes on", "err", err)
		case obstacle == nil || obstacle.Code == api.ExitNotReady: // that may take as long as the rollout
			since = time.Now()
		case obstacle.Code == api.ExitIntercept || time.Since(since) >= obstacleTime:
			return obstacle
		}
	}
	return nil
}

// obstacle returns why the cluster does not run pods with the agent, or nil: the scheduler, a node or the controller of
// the workload reports it. The code is ExitIntercept for an obstacle that is final, and ExitNotReady for one that may
// take long.
func (i *Intercept) obstacle(ctx context.Context) (*api.Error, error) {
	w := i.workload
	o, err := i.rollout.resource(w.Resource).Get(ctx, w.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	if removed, err := i.rollout.removedFrom(o); err != nil || removed {
		return errorRemoved(i.cfg.Workload, o), err
	}
	message := ""
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		c, _ := c.(map[string]any)
		switch text, _ := c["message"].(string); {
		case c["type"] == string(appsv1.DeploymentReplicaFailure) && c["status"] == "True":
			message = text
		case c["type"] == "Paused" && c["status"] == "True", // an Argo Rollout, at a step of its strategy
			c["type"] == string(appsv1.DeploymentProgressing) && c["status"] == "False" && message == "":
			message = fmt.Sprintf("%s, %v: %v: %s", c["type"], c["status"], c["reason"], text)
		}
	}
	if e, err := i.podObstacle(ctx, o); e != nil && (e.Code != api.ExitNotReady || message == "") || err != nil {
		return e, err
	}
	if message == "" { // other kinds have no such condition
		if message, err = i.warning(ctx, o.GetUID(), func(e corev1.Event) bool {
			return e.Reason == "FailedCreate" && !workloads.LastSeen(e).Before(i.rollout.since)
		}); message == "" {
			return nil, err
		}
	}
	return api.Errorf(api.ExitInject, "the cluster creates no pod of %s with the agent: %s", i.cfg.Workload,
		api.CleanLine(message)).
		WithHint("kubevpn has undone the change of the template. %s", client.PolicyHint), nil
}

// warning returns the message of the latest warning about an object that of selects, or "". The user may not see any.
func (i *Intercept) warning(ctx context.Context, uid types.UID, of func(corev1.Event) bool) (string, error) {
	events, err := workloads.Events(ctx, i.pods.Kube(), i.workload.Namespace, uid)
	if apierrors.IsForbidden(err) {
		err = nil
	}
	return api.CleanLine(workloads.Warning(events, of)), err
}

// podObstacle is obstacle for what the pods report: those with the agent, those from which admission has removed it,
// and those for which a StatefulSet waits before it replaces others.
func (i *Intercept) podObstacle(ctx context.Context, o *unstructured.Unstructured) (slow *api.Error, err error) {
	policy, _, _ := unstructured.NestedString(o.Object, "spec", "podManagementPolicy")
	inOrder := i.workload.Kind == "StatefulSet" && policy != string(appsv1.ParallelPodManagement)
	pods := i.latestPods()
	for _, p := range pods {
		with := sidecarOf(p, i.identity.hash) != ""
		switch created := i.rollout.created(p, pods); {
		case p.DeletionTimestamp != nil:
		case !with && created:
			return api.Errorf(api.ExitInject, "the pod %s was created without the agent, which the template of %s "+
				"has: an admission webhook or policy of the cluster has removed or renamed it", p.Name, i.cfg.Workload).
				WithHint("`kubectl get mutatingwebhookconfigurations` lists what changes pods. An admin can exempt "+
					"containers whose names begin with %s", api.AgentPrefix), nil
		case podutils.IsPodReady(p), !with && !inOrder:
		default:
			e := podProblem(p)
			if e == nil {
				text, err := i.warning(ctx, p.UID, func(corev1.Event) bool { return true })
				if err != nil {
					return nil, err
				}
				code := api.ExitNotReady
				if p.Status.Phase == corev1.PodPending && text != "" { // about a volume, or the pod's network
					code = api.ExitInject
				}
				e = api.Errorf(code, "the pod %s is not ready: %s", p.Name, cmp.Or(text, "nothing reports why")).
					WithHint("`kubectl -n %s describe pod %s` shows the cause.", p.Namespace, p.Name)
			}
			if !with {
				e.Code, e.Message = api.ExitInject, fmt.Sprintf("%s replaces no pod before its pod %s is ready: %s",
					i.cfg.Workload, p.Name, e.Message)
			}
			if slow = e; e.Code != api.ExitNotReady {
				return e, nil
			}
		}
	}
	return slow, nil
}

// podProblem returns why a container of a pod does not run, or nil.
func podProblem(p *corev1.Pod) *api.Error {
	for _, c := range podstatus.Containers(p) {
		s := podstatus.Of(p, c.Name)
		if e := s.Error("the container "+c.Name+" of pod "+p.Name, api.ExitInject); e != nil &&
			(s.End == nil || s.End.ExitCode != 0) { // else an init container
			return e
		}
	}
	return podstatus.Of(p, "").Error("the workload with the agent", api.ExitInject)
}

// claimed returns the ports to intercept as w has them.
func (i *Intercept) claimed(w *workloads.Workload) (claimed []workloads.Port) {
	known := w.Ports()
	for _, p := range i.ports {
		none := &workloads.Port{Protocol: p.Protocol, Port: p.Container, Container: i.container}
		claimed = append(claimed, *cmp.Or(portOf(known, p), none))
	}
	return claimed
}

// rollOut adds the agent to the workload's template, and patches the Services that need not wait for the rollout.
func (i *Intercept) rollOut(ctx context.Context) error {
	done := i.step("Adding the agent to the template of %s", i.cfg.Workload)
	r, err := i.startRollout(ctx, i.workload)
	if err != nil {
		return err
	}
	i.claim.Ports = r.plan.ports
	i.set(func() { i.rollout = r })
	if err := r.redirectServices(ctx, false); err != nil {
		return err
	}
	done("the rollout replaces its pods")
	return nil
}

// rollout is the change of the workload's template that adds the owner's agent, and the changes of its Services.
type rollout struct {
	writer
	hash  string // of the owner's key
	plan  sidecarPlan
	since time.Time     // when the template changed, by the API server's clock, in whole seconds; zero: unknown
	early []*corev1.Pod // that were there before
}

// created reports whether the pod is of the changed template: it was created since, with a hash of the template that no
// earlier pod has.
func (r *rollout) created(p *corev1.Pod, all []*corev1.Pod) bool {
	early := func(p *corev1.Pod) bool {
		return p.CreationTimestamp.Time.Before(r.since) ||
			slices.ContainsFunc(r.early, func(e *corev1.Pod) bool { return e.UID == p.UID })
	}
	hash := func(p *corev1.Pod) string {
		return cmp.Or(p.Labels[appsv1.DefaultDeploymentUniqueLabelKey], p.Labels[appsv1.ControllerRevisionHashLabelKey],
			p.Labels["rollouts-pod-template-hash"])
	}
	return !r.since.IsZero() && !early(p) &&
		!slices.ContainsFunc(all, func(o *corev1.Pod) bool { return early(o) && hash(o) != "" && hash(o) == hash(p) })
}

// startRollout adds the agent to the template. Its container is beside the one that listens on the claimed ports.
func (i *Intercept) startRollout(ctx context.Context, w *workloads.Workload) (*rollout, error) {
	if err := i.await(ctx, func() bool { return i.listed }); err != nil {
		return nil, err
	}
	agent, claimed := i.agent(), i.claimed(w)
	r := &rollout{writer: writer{i.pods, i.objects, w}, hash: agent.Owner, early: i.latestPods()}
	var err error
	r.since, err = r.template(ctx, func(template map[string]any) (map[string]any, error) {
		// Remove the agent of this owner's earlier intercept, whose daemon may have been killed.
		without, _, err := undoSidecar(template, r.hash)
		if err != nil {
			return nil, err
		}
		r.plan, err = planSidecar(without, i.container, claimed, agent)
		return r.plan.template, err
	})
	if err != nil {
		return nil, err
	}
	return r, nil
}

// redirectServices patches Services to send to the agents' ports: those that must wait for the rollout, or the others.
func (r *rollout) redirectServices(ctx context.Context, afterRollout bool) error {
	var patches []servicePatch
	var names []string
	for _, p := range r.plan.services {
		if p.afterRollout == afterRollout {
			patches, names = append(patches, p), append(names, p.service)
		}
	}
	return r.services(ctx, names, func(service map[string]any) (map[string]any, error) {
		return patchService(service, patches)
	})
}

// removedFrom reports whether somebody has removed the agent from the template of o, the workload's object.
func (r *rollout) removedFrom(o *unstructured.Unstructured) (bool, error) {
	template, _, err := unstructured.NestedMap(o.Object, "spec", "template")
	if err != nil {
		return false, err
	}
	without, _, err := undoSidecar(template, r.hash)
	return err == nil && equality.Semantic.DeepEqual(template, without), err
}

// errorRemoved is the error of a template from which somebody has removed the agent.
func errorRemoved(workload string, o *unstructured.Unstructured) *api.Error {
	return api.Errorf(api.ExitIntercept, "somebody has removed the agent from the template of %s, as `kubevpn reset` "+
		"does: %s", workload, setBy(o, "spec", "template", "spec", "containers")).
		WithHint("Let that manager leave the template alone, and run `kubevpn proxy %s` again.", workload)
}

// undo removes the agent from the template, and undoes the changes of the Services.
func (r *rollout) undo(ctx context.Context) error {
	_, err := r.removeAgents(ctx, r.hash)
	return err
}

const fieldManager = "kubevpn"

// writer changes a workload and its Services. It edits whole objects, and keeps fields that this program does not know.
type writer struct {
	pods     pods
	objects  dynamic.Interface
	workload *workloads.Workload
}

// resource returns the objects of a kind in the workload's namespace.
func (w writer) resource(r schema.GroupVersionResource) dynamic.ResourceInterface {
	return w.objects.Resource(r).Namespace(w.workload.Namespace)
}

// removeAgents removes the agents of the owner whose key has that hash from the template, or those of all owners if
// owner is empty, and reports whether there were any. It undoes the Services with the last agent.
func (w writer) removeAgents(ctx context.Context, owner string) (removed bool, err error) {
	template, err := w.current(ctx)
	if err != nil {
		return false, err
	}
	without, last := template, true // the workload no longer exists
	if template != nil {
		if without, last, err = undoSidecar(template, owner); err != nil {
			return false, err
		}
	}
	if last {
		names := api.Texts(w.workload.Services, func(s corev1.Service) string { return s.Name })
		if err := w.services(ctx, names, undoService); err != nil {
			return false, err
		}
	}
	if equality.Semantic.DeepEqual(template, without) { // somebody else has removed them
		return false, nil
	}
	_, err = w.template(ctx, func(template map[string]any) (map[string]any, error) {
		without, _, err := undoSidecar(template, owner)
		return without, err
	})
	return true, err
}

// current reads the workload's template. It returns nil if the workload no longer exists.
func (w writer) current(ctx context.Context) (map[string]any, error) {
	o, err := w.resource(w.workload.Resource).Get(ctx, w.workload.Name, metav1.GetOptions{})
	if apierrors.IsNotFound(err) {
		return nil, nil
	}
	if err != nil {
		return nil, w.pods.ExplainContext(ctx, err)
	}
	template, _, err := unstructured.NestedMap(o.Object, "spec", "template")
	return template, err
}

// template changes the workload's template, and returns when, by the API server's clock.
func (w writer) template(ctx context.Context, change func(map[string]any) (map[string]any, error)) (time.Time, error) {
	return w.edit(ctx, w.workload.Resource, w.workload.Name, func(o map[string]any) (map[string]any, error) {
		template, _, err := unstructured.NestedMap(o, "spec", "template")
		if err != nil {
			return nil, err
		}
		if template, err = change(template); err != nil {
			return nil, err
		}
		return o, unstructured.SetNestedMap(o, template, "spec", "template")
	})
}

// services changes the Services with these names, as far as they exist.
func (w writer) services(ctx context.Context, names []string,
	change func(map[string]any) (map[string]any, error)) error {
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if _, err := w.edit(ctx, corev1.SchemeGroupVersion.WithResource("services"), name, change); err != nil {
			return err
		}
	}
	return nil
}

// edit reads an object, changes it, and writes it if it differs. It retries after a conflict. It returns the time of
// the write by the API server's clock, or zero. A Service that does not exist needs no change.
func (w writer) edit(ctx context.Context, r schema.GroupVersionResource, name string,
	change func(map[string]any) (map[string]any, error)) (at time.Time, err error) {
	err = retry.RetryOnConflict(retry.DefaultRetry, func() error {
		o, err := w.resource(r).Get(ctx, name, metav1.GetOptions{})
		if apierrors.IsNotFound(err) && r.Resource == "services" {
			return nil
		}
		if err != nil {
			return fmt.Errorf("reading %s %s: %w", r.Resource, name, err)
		}
		changed, err := change(runtime.DeepCopyJSON(o.Object))
		if err != nil {
			return fmt.Errorf("changing %s %s: %w", r.Resource, name, err)
		}
		if equality.Semantic.DeepEqual(o.Object, changed) {
			return nil
		}
		o, err = w.resource(r).Update(ctx, &unstructured.Unstructured{Object: changed},
			metav1.UpdateOptions{FieldManager: fieldManager}) // a conflict if it has changed since Get
		if _, _, denied := client.Denial(err); !denied && (apierrors.IsForbidden(err) || apierrors.IsInvalid(err) ||
			apierrors.IsBadRequest(err)) {
			return api.Errorf(api.ExitInject, "the cluster does not admit the change of %s %s: %s", r.Resource, name,
				api.CleanLine(err.Error())).
				WithHint("Ask a cluster admin about the rule that the message names.")
		}
		if err != nil {
			return fmt.Errorf("changing %s %s: %w", r.Resource, name, err)
		}
		for _, f := range o.GetManagedFields() {
			if f.Manager == fieldManager && f.Time != nil && f.Time.After(at) {
				at = f.Time.Time
			}
		}
		return nil
	})
	return at, w.pods.ExplainContext(ctx, err)
}
