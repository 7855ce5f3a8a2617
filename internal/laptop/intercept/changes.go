package intercept

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strconv"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/api/equality"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
	"k8s.io/apimachinery/pkg/fields"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
)

const (
	followPause   = time.Second      // between two looks at the local copies
	followTimeout = 10 * time.Second // until the API server has sent the objects
	maxManager    = 64               // characters of a manager's name that are shown
)

// found is what follow has found: changes of others that keep requests from the intercept.
type found struct {
	changes []string // for the user
	cut     string   // why no request comes any more; empty: some do
}

// watcher compares the workload and its Services with what the intercept needs. It puts right once what others have
// reset, and does not fight after that.
type watcher struct {
	i       *Intercept
	known   map[way]knownWay // that led to claimed ports
	righted map[string]bool  // what was put right
}

// knownWay is a way as it was when requests came by it.
type knownWay struct {
	selector string
	target   string
}

// follow keeps the status true while others change the workload and its Services: GitOps, autoscalers, colleagues. It
// returns an error when the intercept cannot go on.
func (i *Intercept) follow(ctx context.Context) error {
	w, kube := i.workload, i.pods.Kube()
	object := client.NewMirror(kube, &unstructured.Unstructured{}, metav1.ListOptions{
		FieldSelector: fields.OneTermEqualSelector(metav1.ObjectNameField, w.Name).String(),
	}, i.objects.Resource(w.Resource).Namespace(w.Namespace))
	services := client.NewMirror(kube, &corev1.Service{}, metav1.ListOptions{}, kube.CoreV1().Services(w.Namespace))
	defer wakeup.Go(ctx, object.Run, services.Run)()
	f := &watcher{i: i, known: make(map[way]knownWay), righted: make(map[string]bool)}
	for w, target := range i.ways(i.workload) {
		if i.rollout != nil {
			target = i.rollout.plan.patch(w).to
		}
		f.known[w] = knownWay{fmt.Sprint(serviceNamed(i.workload.Services, w.service).Spec.Selector), target}
	}
	for began := time.Now(); wakeup.Pause(ctx, followPause); {
		if !object.Listed() || !services.Listed() {
			if time.Since(began) > followTimeout {
				i.warn(fmt.Sprintf("kubevpn cannot watch %s and the Services of the namespace %s, and does not see "+
					"what others change there", w, w.Namespace))
			}
			continue
		}
		var o *unstructured.Unstructured
		if all := object.Objects(); len(all) > 0 {
			o = all[0]
		}
		var list []corev1.Service
		for _, s := range services.Objects() {
			list = append(list, *s)
		}
		now, err := f.look(ctx, o, list)
		if err != nil {
			return err
		}
		i.mu.Lock()
		if now.cut != i.now.cut || !slices.Equal(now.changes, i.now.changes) {
			i.now = now
			i.changed.Send()
		}
		i.mu.Unlock()
	}
	return ctx.Err()
}

// look compares the objects with what the intercept needs, and puts right what it may.
func (f *watcher) look(ctx context.Context, o *unstructured.Unstructured, all []corev1.Service) (found, error) {
	i, pods := f.i, f.i.latestPods()
	if o == nil {
		return found{cut: i.cfg.Workload + " no longer exists"}, nil
	}
	now, err := i.workload.Now(o, all, pods)
	if err != nil {
		i.log.Warn("cannot read the template", "err", err)
		return found{}, nil
	}
	replicas, is, _ := unstructured.NestedInt64(o.Object, "spec", "replicas")
	if is && replicas == 0 && len(pods) == 0 {
		return found{cut: i.cfg.Workload + " has no pods: spec.replicas is 0: " + setBy(o, "spec", "replicas")}, nil
	}
	ways, past := i.ways(now), make(map[way]string)
	if i.rollout != nil {
		if err := f.keepTemplate(ctx, now); err != nil {
			return found{}, err
		}
		placed := !slices.ContainsFunc(pods, func(p *corev1.Pod) bool { return sidecarOf(p, i.identity.hash) == "" })
		if past, err = f.keepServices(ctx, now, ways, placed); err != nil {
			return found{}, err
		}
	}
	remain, fights := 0, len(past) > 0
	var n found
	for w, target := range ways {
		s := serviceNamed(now.Services, w.service)
		f.known[w] = knownWay{fmt.Sprint(s.Spec.Selector), target}
		if past[w] == "" && (i.rollout == nil || !isHeadless(s)) {
			remain++
		}
	}
	for w := range f.known {
		if _, leads := ways[w]; !leads {
			past[w] = f.lost(w, now, all)
		}
	}
	for _, text := range past {
		n.changes = append(n.changes, text)
	}
	slices.Sort(n.changes)
	if remain == 0 && fights {
		return found{}, api.Errorf(api.ExitIntercept, "the intercept receives no requests any more: %s", n.changes[0]).
			WithHint("Let that manager leave the field alone, and run `kubevpn proxy %s` again. kubevpn has undone "+
				"the intercept, but not the changes of others.", i.cfg.Workload)
	}
	if remain == 0 && len(n.changes) > 0 {
		n.cut = "no Service sends requests to the intercepted ports: " + n.changes[0]
	}
	return n, nil
}

// keepTemplate adds the agent again if somebody has removed it from the template, once for each object. It returns an
// error if it may not.
func (f *watcher) keepTemplate(ctx context.Context, now *workloads.Workload) error {
	i := f.i
	removed, err := i.rollout.removedFrom(now.Object)
	if err != nil {
		i.log.Warn("cannot read the template", "err", err)
		return nil
	}
	for _, p := range i.ports {
		if was, is := declares(i.workload, p), declares(now, p); was && !is {
			return api.Errorf(api.ExitIntercept,
				"the template of %s no longer has port %d, to which the agent sends: %s", i.cfg.Workload,
				p.Container, setBy(now.Object, "spec", "template", "spec", "containers")).
				WithHint("Run `kubevpn proxy %s` again. kubevpn has undone the intercept.", i.cfg.Workload)
		}
	}
	if !removed {
		return nil
	}
	// The copy may be older than what this function did before.
	o, err := i.rollout.resource(now.Resource).Get(ctx, now.Name, metav1.GetOptions{})
	if err != nil {
		i.log.Warn("cannot read the template", "err", err)
		return nil
	}
	if removed, err := i.rollout.removedFrom(o); err != nil || !removed {
		return nil
	}
	gone := errorRemoved(i.cfg.Workload, o)
	if f.righted[string(o.GetUID())] || f.wasReset(ctx, o) {
		return gone
	}
	f.righted = map[string]bool{string(o.GetUID()): true}
	clear(f.known)
	// Until the new pods are there, only the original target ports lead to any.
	if err := i.rollout.undo(ctx); err != nil {
		return err
	}
	r, err := i.startRollout(ctx, now)
	if err != nil {
		return err
	}
	i.set(func() { i.rollout = r })
	if !slices.Equal(r.plan.ports, i.claim.Ports) { // the claims have the earlier ones
		return gone
	}
	i.warn(gone.Message + "; kubevpn has added it again, once")
	return r.redirectServices(ctx, false)
}

// declares reports whether a container of the workload's pods declares the port.
func declares(w *workloads.Workload, p api.PortMap) bool {
	return slices.ContainsFunc(w.Ports(), func(d workloads.Port) bool {
		return d.Container != "" && d.Protocol == p.Protocol && d.Port == p.Container
	})
}

// wasReset reports whether somebody has run `kubevpn reset` since the agent was added.
func (f *watcher) wasReset(ctx context.Context, o *unstructured.Unstructured) bool {
	events, err := workloads.Events(ctx, f.i.pods.Kube(), f.i.workload.Namespace, o.GetUID())
	if err != nil {
		f.i.log.Warn("cannot read the events of the workload", "err", err)
	}
	return err != nil || slices.ContainsFunc(events, func(e corev1.Event) bool {
		return e.Reason == resetReason && !e.CreationTimestamp.Time.Before(f.i.rollout.since)
	})
}

// keepServices makes the ways lead to the agents, once for each that somebody has reset. It returns those that it
// leaves to others, which bypass the agents, and why.
func (f *watcher) keepServices(ctx context.Context, now *workloads.Workload, ways map[way]string,
	placed bool) (map[way]string, error) {
	i, past := f.i, make(map[way]string)
	i.rollout.workload = now // leave undoes its Services
	for w, target := range ways {
		patch := i.rollout.plan.patch(w)
		if target == patch.to || patch.afterRollout && !placed {
			continue
		}
		by, key := "", w.String()
		if err := i.rollout.services(ctx, []string{w.service}, func(service map[string]any) (map[string]any, error) {
			patched, err := patchService(service, []servicePatch{patch})
			if by = ""; err != nil || equality.Semantic.DeepEqual(service, patched) {
				return service, err // the copy is old
			}
			by = fmt.Sprintf("%v bypasses the agents: %s", w, setBy(&unstructured.Unstructured{Object: service}, "spec",
				"ports", strconv.Itoa(int(w.port)), "targetPort"))
			if f.righted[key] {
				return service, nil
			}
			return patched, nil
		}); err != nil {
			return nil, err
		}
		switch {
		case by == "":
		case f.righted[key]:
			past[w] = by
		default:
			if f.righted[key] = true; f.known[w].target == patch.to {
				i.warn(by + "; kubevpn has set it again, once")
			}
		}
	}
	return past, nil
}

// lost describes why a known way no longer leads to its port.
func (f *watcher) lost(w way, now *workloads.Workload, all []corev1.Service) string {
	was, text := f.known[w], w.String()+" no longer leads to the intercepted pods: "
	s := serviceNamed(all, w.service)
	if s == nil {
		return text + "the Service does not exist"
	}
	n := slices.IndexFunc(s.Spec.Ports, func(p corev1.ServicePort) bool { return p.Port == w.port })
	switch {
	case s.Spec.Type == corev1.ServiceTypeExternalName:
		return text + setBy(s, "spec", "type")
	case fmt.Sprint(s.Spec.Selector) != was.selector:
		return text + setBy(s, "spec", "selector")
	case serviceNamed(now.Services, w.service) == nil:
		if pods := f.i.latestPods(); len(pods) > 0 {
			return text + "pod " + pods[0].Name + ": " + setBy(pods[0], "metadata", "labels")
		}
		return text + setBy(now.Object, "spec", "template", "metadata", "labels")
	case n < 0:
		return text + setBy(s, "spec", "ports")
	case s.Spec.Ports[n].TargetPort.StrVal == was.target && was.target != "":
		return text + now.String() + ": " + setBy(now.Object, "spec", "template", "spec", "containers")
	}
	return text + setBy(s, "spec", "ports", strconv.Itoa(int(w.port)), "targetPort")
}

// setBy says who last wrote a field of an object, as far as metadata.managedFields does: "spec.selector was set by helm
// (Update, 2026-01-01T10:02:03Z)". A removed field has no manager, nor have replicas that `kubectl scale` sets to 0. A
// number in the path is that of a port of a Service.
func setBy(o metav1.Object, path ...string) string {
	var last metav1.ManagedFieldsEntry
	owned := false
	for _, e := range o.GetManagedFields() {
		if e.Manager == fieldManager || e.Subresource == "status" || e.Time == nil || e.FieldsV1 == nil {
			continue
		}
		owns := ownsField(e.FieldsV1.GetRawBytes(), path)
		if owns && !owned || owns == owned && (last.Time == nil || last.Time.Before(e.Time)) {
			last, owned = e, owns
		}
	}
	field := strings.Join(path, ".")
	if last.Time == nil {
		return "metadata.managedFields names no manager of " + field
	}
	text := fmt.Sprintf("%.*s (%s, %s)", maxManager, api.CleanLine(last.Manager), api.CleanLine(string(last.Operation)),
		last.Time.UTC().Format(time.RFC3339))
	if owned {
		return field + " was set by " + text
	}
	return "metadata.managedFields names no manager of " + field + "; the last other writer is " + text
}

// ownsField reports whether the fields of a manager, in the form of FieldsV1, contain one.
func ownsField(raw []byte, path []string) bool {
	if len(path) == 0 {
		return true
	}
	var inside map[string]json.RawMessage
	if json.Unmarshal(raw, &inside) != nil {
		return false
	}
	for key, value := range inside {
		if (key == "f:"+path[0] || strings.HasPrefix(key, `k:{"port":`+path[0]+",")) && ownsField(value, path[1:]) {
			return true
		}
	}
	return false
}
