package intercept

import (
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

	"kubevpn/internal/api"
	"kubevpn/internal/podstatus"
	"kubevpn/internal/workloads"
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
	switch partition, _ := field("updateStrategy", "rollingUpdate", "partition").(int64); {
	case field("paused") == true:
		why, hint = "it is paused", fmt.Sprintf("Resume it: `kubectl -n %s rollout resume %s`.", w.Namespace, w)
	case field("updateStrategy", "type") == string(appsv1.OnDeleteStatefulSetStrategyType):
		why, hint = "its updateStrategy is OnDelete", "Change its updateStrategy to RollingUpdate."
	case partition > 0:
		why = fmt.Sprintf("the partition of its updateStrategy is %d", partition)
		hint = "Set the partition to 0."
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
	began := time.Now()
	since := began // the last moment without an obstacle
	for wakeup.Pause(ctx, obstaclePoll) {
		obstacle, err := i.obstacle(ctx, began)
		switch {
		case err != nil:
			i.log.Warn("cannot see whether the rollout goes on", "err", err)
		case obstacle == nil:
			since = time.Now()
		case time.Since(since) >= obstacleTime:
			return obstacle
		}
	}
	return nil
}

// obstacle returns why the cluster does not run pods with the agent, or nil: the scheduler or a node reports it of a
// pod, or the controller of the workload, that it cannot create one.
func (i *Intercept) obstacle(ctx context.Context, since time.Time) (*api.Error, error) {
	i.mu.Lock()
	for _, c := range i.sorted() {
		if name := sidecarOf(c.pod, i.identity.hash); name != "" && c.pod.DeletionTimestamp == nil {
			if e := podstatus.Of(c.pod, name).Error("the workload with the agent", api.ExitInject); e != nil {
				i.mu.Unlock()
				return e, nil
			}
		}
	}
	i.mu.Unlock()
	w := i.workload
	o, err := i.rollout.resource(w.Resource).Get(ctx, w.Name, metav1.GetOptions{})
	if err != nil {
		return nil, err
	}
	message := ""
	conditions, _, _ := unstructured.NestedSlice(o.Object, "status", "conditions")
	for _, c := range conditions {
		if c, _ := c.(map[string]any); c["type"] == string(appsv1.DeploymentReplicaFailure) && c["status"] == "True" {
			message, _ = c["message"].(string)
		}
	}
	if message == "" { // other kinds have no such condition
		events, err := workloads.Events(ctx, i.pods.Kube(), w.Namespace, o.GetUID())
		if err != nil && !apierrors.IsForbidden(err) {
			return nil, err
		}
		message = workloads.Warning(events, func(e corev1.Event) bool {
			return e.Reason == "FailedCreate" && workloads.LastSeen(e).After(since)
		})
	}
	if message == "" {
		return nil, nil
	}
	return api.Errorf(api.ExitInject, "the cluster creates no pod of %s with the agent: %s", i.cfg.Workload,
		api.OneLine(message)).
		WithHint("kubevpn has undone the change of the template. An admin can say what the namespace %s demands.",
			w.Namespace), nil
}

// rollOut adds the agent to the workload's template, and patches the Services that need not wait for the rollout.
func (i *Intercept) rollOut(ctx context.Context) error {
	done := i.step("Adding the agent to the template of %s", i.cfg.Workload)
	var claimed []workloads.Port
	known := i.workload.Ports()
	for _, p := range i.ports {
		if n := slices.IndexFunc(known, func(k workloads.Port) bool {
			return k.Protocol == p.Protocol && k.Port == p.Container
		}); n >= 0 {
			claimed = append(claimed, known[n])
		} else {
			claimed = append(claimed, workloads.Port{Protocol: p.Protocol, Port: p.Container, Container: i.container})
		}
	}
	r, err := startRollout(ctx, writer{i.pods, i.objects, i.workload}, i.container, claimed, i.agent())
	if err != nil {
		return err
	}
	i.claim.Ports = r.plan.ports
	i.mu.Lock()
	i.rollout = r
	i.changed.Send()
	i.mu.Unlock()
	if err := r.redirectServices(ctx, false); err != nil {
		return err
	}
	done("the rollout replaces its pods")
	return nil
}

// watchTemplate returns an error when somebody has removed the agent from the template. It reads the template whenever
// a pod without the agent appears.
func (i *Intercept) watchTemplate(ctx context.Context) error {
	select {
	case <-i.begun:
	case <-ctx.Done():
		return ctx.Err()
	}
	if i.rollout == nil {
		return nil
	}
	checked := make(map[types.UID]bool)
	for {
		var without *podIntercept
		if err := i.await(ctx, func() bool {
			for _, c := range i.sorted() {
				if uid := c.pod.UID; !checked[uid] && c.pod.DeletionTimestamp == nil &&
					sidecarOf(c.pod, i.identity.hash) == "" {
					without = c
					checked[uid] = true
					return true
				}
			}
			return false
		}); err != nil {
			return err
		}
		undone, err := i.rollout.undone(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			i.log.Warn("cannot read the template", "pod", without.name, "err", err)
			i.mu.Lock()
			delete(checked, without.pod.UID)
			i.mu.Unlock()
			wakeup.Pause(ctx, retryMin)
		case undone:
			return api.Errorf(api.ExitIntercept,
				"somebody has removed the agent from the template of %s, as `kubevpn reset` does", i.cfg.Workload).
				WithHint("Run `kubevpn proxy %s` again to start a new intercept.", i.cfg.Workload)
		}
	}
}

// rollout is the change of the workload's template that adds the owner's agent, and the changes of its Services.
type rollout struct {
	writer
	hash string // of the owner's key
	plan sidecarPlan
}

// startRollout adds the agent to the template. Its container is beside the one that listens on the claimed ports.
func startRollout(ctx context.Context, w writer, container string, claimed []workloads.Port,
	a workloads.Agent) (*rollout, error) {
	r := &rollout{writer: w, hash: a.Owner}
	err := w.template(ctx, func(template map[string]any) (map[string]any, error) {
		// Remove the agent of this owner's earlier intercept, whose daemon may have been killed.
		without, _, err := undoSidecar(template, r.hash)
		if err != nil {
			return nil, err
		}
		r.plan, err = planSidecar(without, container, claimed, a)
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

// undone reports whether somebody has removed the agent from the template. It is false if the workload no longer
// exists.
func (r *rollout) undone(ctx context.Context) (bool, error) {
	template, err := r.current(ctx)
	if err != nil || template == nil {
		return false, err
	}
	without, _, err := undoSidecar(template, r.hash)
	return err == nil && equality.Semantic.DeepEqual(template, without), err
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
	if err != nil || template == nil {
		return false, err
	}
	without, last, err := undoSidecar(template, owner)
	if err != nil || equality.Semantic.DeepEqual(template, without) {
		return false, err
	}
	if last {
		var names []string
		for _, s := range w.workload.Services {
			names = append(names, s.Name)
		}
		if err := w.services(ctx, names, undoService); err != nil {
			return false, err
		}
	}
	return true, w.template(ctx, func(template map[string]any) (map[string]any, error) {
		without, _, err := undoSidecar(template, owner)
		return without, err
	})
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

// template changes the workload's template.
func (w writer) template(ctx context.Context, change func(map[string]any) (map[string]any, error)) error {
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

// services changes the Services with these names.
func (w writer) services(ctx context.Context, names []string,
	change func(map[string]any) (map[string]any, error)) error {
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if err := w.edit(ctx, corev1.SchemeGroupVersion.WithResource("services"), name, change); err != nil {
			return err
		}
	}
	return nil
}

// edit reads an object, changes it, and writes it if it differs. It retries after a conflict.
func (w writer) edit(ctx context.Context, r schema.GroupVersionResource, name string,
	change func(map[string]any) (map[string]any, error)) error {
	err := retry.RetryOnConflict(retry.DefaultRetry, func() error {
		o, err := w.resource(r).Get(ctx, name, metav1.GetOptions{})
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
		if _, err := w.resource(r).Update(ctx, &unstructured.Unstructured{Object: changed},
			metav1.UpdateOptions{FieldManager: fieldManager}); err != nil { // a conflict if it has changed since Get
			return fmt.Errorf("changing %s %s: %w", r.Resource, name, err)
		}
		return nil
	})
	return w.pods.ExplainContext(ctx, err)
}
