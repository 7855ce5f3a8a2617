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
	// every is how often Follow reads the volumes; the kubelet does it about as often.
	every = time.Minute
	// beat is how often it looks at the pod, with whose end a token's ends.
	beat = 10 * time.Second
)

// Following is what Follow begins with.
type Following struct {
	Readers  []*Reader // of containers of one pod; they are Follow's alone until it returns
	Volumes  []Volume  // what the program has of them, as [Volumes] gave it
	Problems []Problem // what was told of them then: it is not told again

	// Running finds a pod of the workload that runs, if the readers' does not go on to; nil: there is none.
	Running func(ctx context.Context) (*corev1.Pod, error)
	// Show has the program see the volume as it is now. It gets none but those of Volumes, and of these none that the program fills
	// itself; after an error it gets it again the next time.
	Show func(ctx context.Context, v Volume) error
	Warn func(text string) // what cannot be read, or shown: once, until it could be and cannot again
	Tick <-chan time.Time  // when to look at the pod; nil: every 10 seconds. What it gives is the time
}

// Follow shows what changes in a pod's volumes, as the kubelet does, until ctx ends. Nothing else may use the readers meanwhile.
//
//	tick ─▶ the pod ─┬─ as it was ── once a minute ──────────────────┐
//	                 ├─ with other labels ───────────────────────────┤
//	                 └─ gone, or going ─▶ another one that runs ─────┤ tokens are asked for again, bound to that one
//	                                  └─▶ none: tokens of no pod ────┴─▶ Volumes ─▶ those that differ ─▶ Show
//
// Which volumes, mounts and containers there are stays as the first pod had it: the program has these. What cannot be read stays
// as it was, down to one source of a projected volume; where the API server does not answer, all of it.
func Follow(ctx context.Context, f Following) {
	l := &follower{Following: f, shown: map[string]Volume{}, told: map[string]bool{}, read: time.Now()}
	for _, v := range f.Volumes {
		if !v.Empty {
			l.shown[v.Name] = v
		}
	}
	for _, p := range f.Problems {
		l.told[same(p)] = true
	}
	tick := f.Tick
	if tick == nil {
		t := time.NewTicker(beat)
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
	shown map[string]Volume // what the program has, by name
	told  map[string]bool   // problems that last
	read  time.Time         // when the volumes were
}

// identity is what a container can see of its pod.
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
	bounded, cancel := context.WithTimeout(ctx, every)
	defer cancel()
	before := f.identity()
	problems, err := f.findPod(bounded)
	if err != nil {
		if ctx.Err() == nil { // what else there is to tell lasts
			f.tell(Problem{What: "bringing volumes up to date", Err: err})
		}
		return
	}
	if reflect.DeepEqual(f.identity(), before) && now.Sub(f.read) < every {
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
			problems = append(problems, Problem{What: "volume " + v.Name, Err: fmt.Errorf("it is as it was before: %w", err)})
			continue
		}
		f.shown[v.Name] = v
	}
	if ctx.Err() != nil {
		return
	}
	lasting := map[string]bool{}
	for _, p := range problems {
		f.tell(p)
		lasting[same(p)] = true
	}
	f.told = lasting
}

func (f *follower) tell(p Problem) {
	if key := same(p); !f.told[key] {
		f.told[key] = true
		f.Warn(p.Error())
	}
}

// same is equal for problems that are one: an error of the network has another text each time.
func same(p Problem) string {
	if unanswered(p.Err) {
		return p.What
	}
	return p.Error()
}

// unanswered reports whether err is the network's, or of an API server that does not get to an answer.
func unanswered(err error) bool {
	var status apierrors.APIStatus
	if errors.As(err, &status) {
		return apierrors.IsTimeout(err) || apierrors.IsServerTimeout(err) || apierrors.IsServiceUnavailable(err) || apierrors.IsTooManyRequests(err) ||
			apierrors.IsInternalError(err)
	}
	var network interface{ Timeout() bool } // of net.Error, *url.Error and context.DeadlineExceeded
	return errors.As(err, &network)
}

// findPod has the readers read for the pod as it is now, or for another one of the workload. An error says that the API server
// cannot be asked now.
func (f *follower) findPod(ctx context.Context) ([]Problem, error) {
	pod := f.Readers[0].pod
	var problems []Problem
	gone := false
	if pod.UID != "" { // else none has been seen to run
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

// Runs reports whether the pod runs, and goes on to.
func Runs(p *corev1.Pod) bool {
	return p.DeletionTimestamp == nil && p.Status.Phase == corev1.PodRunning
}
