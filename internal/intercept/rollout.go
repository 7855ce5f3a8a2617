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
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/types"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// A sidecar's way in and out (sidecar.go says what changes):
//
//	template gets the agent ─▶ Services name ports ─▶ rollout ─▶ all pods have it ─▶ Services name what only they have
//	leave: claims released ─▶ Services as they were ─▶ template as it was ─▶ rollout, which nobody waits for

// rolloutPatience is how long a rollout may take until all pods have the agent.
const rolloutPatience = 3 * time.Minute

// writeTries is how often somebody else may change an object that is about to be changed.
const writeTries = 5

// rollsOut returns nil if pods with an agent in their template take the place of those without when the template changes.
func rollsOut(w *cluster.Workload) error {
	if containers, _, _ := unstructured.NestedSlice(w.Object.Object, "spec", "template", "spec", "containers"); len(containers) == 0 {
		return api.Errorf(api.ExitInject, "%s has no pod template of its own, and a sidecar comes with that", w).
			WithHint("Name what makes its pods: `kubectl -n %s get deployments,statefulsets,daemonsets`.", w.Namespace)
	}
	if w.Resource.Group == appsv1.GroupName && w.Kind == "ReplicaSet" {
		return api.Errorf(api.ExitInject, "the pods of %s stay as they are when its template changes, and a sidecar comes with that", w).
			WithHint("Name the Deployment, if one has made it.")
	}
	return nil
}

// rollOut adds the agent to the workload's template, and has Services lead to it as far as that may be at once.
func (i *Intercept) rollOut(ctx context.Context) error {
	done := i.step("Adding the agent to the template of %s", i.cfg.Workload)
	var claimed []cluster.Port
	for _, p := range i.status.Ports {
		known := slices.IndexFunc(i.workload.Ports(), func(k cluster.Port) bool { return k.Protocol == p.Protocol && k.Port == p.Container })
		if known >= 0 {
			claimed = append(claimed, i.workload.Ports()[known])
		} else {
			claimed = append(claimed, cluster.Port{Protocol: p.Protocol, Port: p.Container, Container: i.container})
		}
	}
	var plan sidecarPlan
	err := i.writer().template(ctx, func(template map[string]any) (map[string]any, error) {
		// Of an earlier intercept of ours, also of one whose laptop was killed: its key went with it, but not its name.
		without, _, err := undoSidecars(template, func(hash, name string) bool { return hash == i.identity.hash || name == i.cfg.Owner })
		if err != nil {
			return nil, err
		}
		plan, err = planSidecar(without, i.container, claimed, sidecarAgent{image: i.image, owner: i.identity.hash, ownerName: i.cfg.Owner})
		return plan.template, err
	})
	if err != nil {
		return err
	}
	i.rolled, i.claim.Ports = &plan, plan.ports
	if err := i.redirectServices(ctx, false); err != nil {
		return err
	}
	done("its pods are replaced")
	return nil
}

// redirectServices has Services lead to the agents' ports: those whose port only pods with an agent have, or the others.
func (i *Intercept) redirectServices(ctx context.Context, rolled bool) error {
	var patches []servicePatch
	var names []string
	for _, p := range i.rolled.services {
		if p.rolled == rolled {
			patches, names = append(patches, p), append(names, p.service)
		}
	}
	return i.writer().services(ctx, names, func(service map[string]any) (map[string]any, error) { return patchService(service, patches) })
}

// rollBack takes back what rollOut did.
func (i *Intercept) rollBack(ctx context.Context) error {
	if i.rolled == nil {
		return nil
	}
	return i.writer().rollBack(ctx, i.identity.hash)
}

// seeRemoved ends with an error when somebody has taken our agent out of the template: it looks there when a pod is without.
func (i *Intercept) seeRemoved(ctx context.Context) error {
	select {
	case <-i.begun:
	case <-ctx.Done():
		return ctx.Err()
	}
	if i.rolled == nil {
		return nil
	}
	looked := make(map[types.UID]bool)
	for {
		var without *cover
		if err := i.await(ctx, func() bool {
			for _, c := range i.sorted() {
				if uid := c.pod.UID; !looked[uid] && c.pod.DeletionTimestamp == nil && sidecarOf(c.pod, i.identity.hash) == "" {
					without = c
					looked[uid] = true
					return true
				}
			}
			return false
		}); err != nil {
			return err
		}
		template, err := i.writer().current(ctx)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case err != nil:
			i.log.Warn("looking for the agent in the template", "pod", without.name, "err", err)
			i.mu.Lock()
			delete(looked, without.pod.UID)
			i.mu.Unlock()
			pause(ctx, retryMin)
			continue
		case template == nil:
			continue // the workload has gone, and its pods go
		}
		if without, _, err := undoSidecar(template, i.identity.hash); err != nil || !equality.Semantic.DeepEqual(template, without) {
			continue // it is a pod of before the agent
		}
		return api.Errorf(api.ExitIntercept, "somebody has removed the agent from the template of %s, as `kubevpn reset` does", i.cfg.Workload).
			WithHint("`kubevpn proxy %s` begins anew, once that is settled.", i.cfg.Workload)
	}
}

func (i *Intercept) writer() writer { return writer{i.pods, i.objects, i.workload} }

// writer changes a workload and its Services.
type writer struct {
	pods     pods
	objects  objects
	workload *cluster.Workload
}

// rollBack takes an owner's agent out of the template, or everybody's if owner is empty. As long as others' agents stay,
// Services lead to them.
func (w writer) rollBack(ctx context.Context, owner string) error {
	_, err := w.remove(ctx, func(hash, _ string) bool { return owner == "" || hash == owner })
	return err
}

// remove is rollBack of agents by their owners' hashes and names, and reports whether there were any.
func (w writer) remove(ctx context.Context, gone func(hash, name string) bool) (removed bool, err error) {
	template, err := w.current(ctx)
	if err != nil || template == nil {
		return false, err
	}
	without, last, err := undoSidecars(template, gone)
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
		without, _, err := undoSidecars(template, gone)
		return without, err
	})
}

// current reads the workload's template; nil: there is none any more.
func (w writer) current(ctx context.Context) (map[string]any, error) {
	o, err := w.objects.read(ctx, w.workload.Resource, w.workload.Namespace, w.workload.Name)
	if apierrors.IsNotFound(err) {
		return nil, nil // and its pods with it
	}
	if err != nil {
		return nil, w.explain(ctx, err)
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

// services changes the Services of these names.
func (w writer) services(ctx context.Context, names []string, change func(map[string]any) (map[string]any, error)) error {
	slices.Sort(names)
	for _, name := range slices.Compact(names) {
		if err := w.edit(ctx, corev1.SchemeGroupVersion.WithResource("services"), name, change); err != nil {
			return err
		}
	}
	return nil
}

// edit reads an object, changes it and writes it if it is another then; again where somebody else has changed it meanwhile.
func (w writer) edit(ctx context.Context, r schema.GroupVersionResource, name string, change func(map[string]any) (map[string]any, error)) error {
	for try := 1; ; try++ {
		o, err := w.objects.read(ctx, r, w.workload.Namespace, name)
		if err != nil {
			return w.explain(ctx, fmt.Errorf("reading %s %s: %w", r.Resource, name, err))
		}
		changed, err := change(runtime.DeepCopyJSON(o.Object))
		if err != nil {
			return fmt.Errorf("changing %s %s: %w", r.Resource, name, err)
		}
		if equality.Semantic.DeepEqual(o.Object, changed) {
			return nil
		}
		err = w.objects.write(ctx, r, &unstructured.Unstructured{Object: changed})
		if err == nil {
			return nil
		}
		if !apierrors.IsConflict(err) || try == writeTries {
			return w.explain(ctx, fmt.Errorf("changing %s %s: %w", r.Resource, name, err))
		}
	}
}

func (w writer) explain(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return w.pods.Explain(err)
}
