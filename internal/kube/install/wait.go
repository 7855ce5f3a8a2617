package install

import (
	"cmp"
	"context"
	"errors"
	"strconv"
	"time"

	appsv1 "k8s.io/api/apps/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wakeup"
)

const (
	// readyTimeout limits the wait for a running pod.
	readyTimeout = 2 * time.Minute
	// readyGrace is the time after which wait returns a pod that runs and is not ready. The manager listens for
	// sessions before the kubelet probes its health.
	readyGrace = 2 * time.Second
)

// waiter watches until a pod of the traffic manager runs in one namespace.
type waiter struct {
	kube       kubernetes.Interface
	namespace  string
	generation int64 // as in snapshot
	timeout    time.Duration
	progress   func(api.Event) // may be nil

	lasting string    // identifies the problem that lasts; "": none
	since   time.Time // when it began
	said    string    // the latest detail
}

// wait returns the pod. Its errors are *api.Error, or ctx's.
func (w *waiter) wait(ctx context.Context) (*corev1.Pod, error) {
	ctx, cancel := context.WithTimeoutCause(ctx, w.timeout, errNotInTime)
	defer cancel()
	changed := wakeup.NewSignal()
	selector := managerPods()
	byName := metav1.ListOptions{FieldSelector: fields.OneTermEqualSelector("metadata.name", ManagerName).String()}
	apps := w.kube.AppsV1()
	pods := client.NewMirror(w.kube, &corev1.Pod{}, selector, w.kube.CoreV1().Pods(w.namespace))
	deployments := client.NewMirror(w.kube, &appsv1.Deployment{}, byName, apps.Deployments(w.namespace))
	sets := client.NewMirror(w.kube, &appsv1.ReplicaSet{}, selector, apps.ReplicaSets(w.namespace))
	pods.Changed, deployments.Changed, sets.Changed = changed, changed, changed
	defer wakeup.Go(ctx, pods.Run, deployments.Run, sets.Run)()
	timer := time.NewTimer(0)
	defer timer.Stop()
	for {
		select {
		case <-ctx.Done():
			return nil, w.end(ctx)
		case <-changed:
		case <-timer.C:
		}
		if !pods.Listed() {
			continue
		}
		s := snapshot{namespace: w.namespace, generation: w.generation, sets: sets.Objects(), pods: pods.Objects()}
		if d := deployments.Objects(); len(d) > 0 {
			s.deployment = d[0]
		}
		pod, again, err := w.weigh(judge(s), time.Now())
		if pod != nil || err != nil {
			return pod, err
		}
		if again > 0 {
			timer.Reset(again)
		}
	}
}

// weigh returns the pod or the error with which wait ends, or the time after which it must judge again even if nothing
// changes.
func (w *waiter) weigh(v verdict, now time.Time) (pod *corev1.Pod, again time.Duration, err error) {
	if v.detail != "" && v.detail != w.said {
		w.said = v.detail
		tell(w.progress, stepWait, "%s", v.detail)
	}
	if v.pod != nil && v.ready {
		return v.pod, 0, nil
	}
	key, grace := "", time.Duration(0)
	switch {
	case v.pod != nil:
		key, grace = "pod "+v.pod.Name, readyGrace
	case v.problem != nil:
		// The kubelet changes the text of a problem while it lasts, so the code identifies it.
		key, grace = "problem "+strconv.Itoa(int(v.problem.err.Code)), v.problem.grace
	default:
		w.lasting = ""
		return nil, 0, nil
	}
	if key != w.lasting {
		w.lasting, w.since = key, now
	}
	if left := grace - now.Sub(w.since); left > 0 {
		return nil, left, nil
	}
	if v.pod != nil {
		return v.pod, 0, nil
	}
	return nil, 0, v.problem.err
}

var errNotInTime = errors.New("not in time")

func (w *waiter) end(ctx context.Context) error {
	if !errors.Is(context.Cause(ctx), errNotInTime) {
		return ctx.Err()
	}
	return api.Errorf(api.ExitNotReady, "the traffic manager in %s was not ready within %v: %s", w.namespace, w.timeout,
		cmp.Or(w.said, "no status was reported")).
		WithHint("`kubectl -n %s describe deployment,pod -l %s=kubevpn` shows the cause.", w.namespace, labelName)
}
