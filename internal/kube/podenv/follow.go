package podenv

import (
	"context"
	"errors"
	"fmt"
	"reflect"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/types"
)

const (
	// readInterval is the interval between reads of the volumes, about that of the kubelet.
	readInterval = time.Minute
	// podInterval is the interval between reads of the pod. Bound tokens become invalid with the pod.
	podInterval = 10 * time.Second
)

// Following is the configuration of Follow.
type Following struct {
	Readers  []*Reader // readers of containers of one pod; only Follow may use them until it returns
	Volumes  []Volume  // the volumes that the program has, from [Volumes]
	Problems []Problem // problems that are already reported

	// Running returns a running pod of the workload, or nil, when the readers' pod no longer runs. May be nil.
	Running func(ctx context.Context) (*corev1.Pod, error)
	// Show gives the program the new content of one of Volumes, except those that the program fills itself. After
	// an error Follow calls it again the next time.
	Show func(ctx context.Context, v Volume) error
	Warn func(text string) // reports a volume that Follow cannot read or show, once while the problem lasts
	Tick <-chan time.Time  // delivers the current time when Follow should read the pod; nil for every 10 seconds
}

// Follow shows changes of a pod's volumes, as the kubelet does, until ctx ends.
//
//	tick ─▶ the pod ─┬─ unchanged ── once a minute ──────────────────┐
//	                 ├─ other labels ────────────────────────────────┤
//	                 └─ gone or terminating ─▶ another running pod ──┤ new tokens, bound to that pod
//	                                      └─▶ none: unbound tokens ──┴─▶ Volumes ─▶ changed ones ─▶ Show
//
// Volumes, mounts and containers stay those of the first pod, because the program uses them. A volume, or a source of a
// projected volume, that cannot be read keeps its content. If the API server does not answer, every volume does.
func Follow(ctx context.Context, f Following) {
	l := &follower{Following: f, shown: map[string]Volume{}, reported: map[string]bool{}, read: time.Now()}
	for _, v := range f.Volumes {
		if !v.Empty {
			l.shown[v.Name] = v
		}
	}
	for _, p := range f.Problems {
		l.reported[same(p)] = true
	}
	tick := f.Tick
	if tick == nil {
		t := time.NewTicker(podInterval)
		defer t.Stop()
		tick = t.C
	}
	for {
		select {
		case <-ctx.Done():
			return
		case now := <-tick:
			l.look(ctx, now)
		}
	}
}

type follower struct {
	Following
	shown    map[string]Volume // the volumes that the program has, by name
	reported map[string]bool   // problems that last
	read     time.Time         // when the volumes were last read
}

// identity contains the fields of the pod that a container can see.
type identity struct {
	uid                 types.UID
	gone                bool
	labels, annotations map[string]string
	status              []corev1.PodIP
}

func (f *follower) identity() identity {
	r := f.Readers[0]
	return identity{r.pod.UID, r.gone, r.pod.Labels, r.pod.Annotations, r.pod.Status.PodIPs}
}

func (f *follower) look(ctx context.Context, now time.Time) {
	bounded, cancel := context.WithTimeout(ctx, readInterval)
	defer cancel()
	before := f.identity()
	problems, err := f.findPod(bounded)
	if err != nil {
		if ctx.Err() == nil { // the other reported problems still last
			f.report(Problem{What: "updating volumes", Err: err})
		}
		return
	}
	if reflect.DeepEqual(f.identity(), before) && now.Sub(f.read) < readInterval {
		return
	}
	f.read = now
	_, volumes, more := Volumes(bounded, f.Readers...)
	problems = append(problems, more...)
	for _, v := range volumes {
		before, has := f.shown[v.Name]
		if !has || v.Empty || reflect.DeepEqual(v, before) || ctx.Err() != nil {
			continue
		}
		if err := f.Show(ctx, v); err != nil {
			problems = append(problems,
				Problem{What: "volume " + v.Name, Err: fmt.Errorf("its content is not updated: %w", err)})
			continue
		}
		f.shown[v.Name] = v
	}
	if ctx.Err() != nil {
		return
	}
	lasting := map[string]bool{}
	for _, p := range problems {
		f.report(p)
		lasting[same(p)] = true
	}
	f.reported = lasting
}

func (f *follower) report(p Problem) {
	if key := same(p); !f.reported[key] {
		f.reported[key] = true
		f.Warn(p.Error())
	}
}

// same returns a key that is equal for repeated problems. It ignores the text of network errors, which varies.
func same(p Problem) string {
	if unanswered(p.Err) {
		return p.What
	}
	return p.Error()
}

// unanswered reports whether err is a network error, or the API server could not answer.
func unanswered(err error) bool {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsServiceUnavailable(err) ||
			apierrors.IsTooManyRequests(err) ||
			apierrors.IsInternalError(err)
	}
	var network interface{ Timeout() bool } // of net.Error, *url.Error and context.DeadlineExceeded
	return errors.As(err, &network)
}

// findPod updates the pod of the readers, or replaces it by another one of the workload. It returns an error if the API
// server does not answer.
func (f *follower) findPod(ctx context.Context) ([]Problem, error) {
	pod := f.Readers[0].pod
	var problems []Problem
	gone := false
	if pod.UID != "" { // a pod built from a template has none
		now, err := f.Readers[0].kube.CoreV1().Pods(pod.Namespace).Get(ctx, pod.Name, metav1.GetOptions{})
		switch {
		case err == nil && now.UID == pod.UID:
			f.each(func(r *Reader) { r.become(now) })
			if Runs(now) {
				return nil, nil
			}
		case err == nil, apierrors.IsNotFound(err):
			gone = true
		case unanswered(err):
			return nil, err
		default:
			return []Problem{{What: "pod " + pod.Name, Err: err}}, nil
		}
	}
	if f.Running != nil {
		other, err := f.Running(ctx)
		switch {
		case err == nil && other != nil:
			f.each(func(r *Reader) { r.become(other) })
			return nil, nil
		case unanswered(err):
			return nil, err
		case err != nil:
			problems = append(problems, Problem{What: "looking for another pod", Err: err})
		}
	}
	if gone {
		f.each(func(r *Reader) { r.unbind() })
	}
	return problems, nil
}

func (f *follower) each(do func(*Reader)) {
	for _, r := range f.Readers {
		do(r)
	}
}

// Runs reports whether the pod runs and is not terminating.
func Runs(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning
}
