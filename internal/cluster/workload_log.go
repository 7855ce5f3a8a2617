package cluster

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"slices"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/fields"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/apimachinery/pkg/watch"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
)

const (
	// logPause is how long the end of a log may precede the news that its container has ended, and what is waited before the
	// log is asked for again; it doubles, up to logPauseMax.
	logPause    = 100 * time.Millisecond
	logPauseMax = 5 * time.Second
	// lineMax is the longest line that is told; the rest of a longer one is dropped.
	lineMax = 64 << 10
)

// ContainerEnded is in the chain of FollowLog's error when the container has ended.
type ContainerEnded struct {
	Namespace, Pod, Container string
	ExitCode                  int32
	Reason                    string // "OOMKilled", "Error", "Completed"
	Message                   string // what it said last, if it is known
}

func (e *ContainerEnded) Error() string {
	text := fmt.Sprintf("the container %s of the pod %s/%s has ended, with exit code %d", e.Container, e.Namespace, e.Pod, e.ExitCode)
	if e.Reason != "" {
		text += " (" + e.Reason + ")"
	}
	if e.Message != "" {
		text += ": " + e.Message
	}
	return text
}

// FollowLog waits until the container runs and tells line each line of its log, from the beginning, until it ends or ctx does.
// Connections that break are replaced; no line is lost or told twice, but the rest of one longer than 64 KiB. line is called
// from one goroutine at a time.
//
// The error is never nil. It is ctx's, or an *api.Error: that the container has ended (a *ContainerEnded is in its chain), that
// its pod has gone (ErrPodGone), that its image cannot be pulled or the node cannot start it, as the kubelet says at that
// moment (it goes on trying: FollowLog may be called again), or that the user may not read logs.
func (c *Cluster) FollowLog(ctx context.Context, namespace, pod, container string, line func(string)) error {
	f := logFollower{kube: c.kube, namespace: namespace, pod: pod, container: container, line: line}
	return c.explained(ctx, f.run(ctx))
}

// logFollower follows one container's log.
type logFollower struct {
	kube                      kubernetes.Interface
	namespace, pod, container string
	line                      func(string)

	uid  types.UID // of the pod, once it was seen: another may take its name
	last time.Time // the kubelet's stamp of the latest line
	same int       // lines that had it
}

func (f *logFollower) run(ctx context.Context) error {
	over, err := f.await(ctx, true)
	for pause := logPause; err == nil; pause = min(2*pause, logPauseMax) {
		before := f.last
		broken := f.read(ctx, over != nil)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case apierrors.IsForbidden(broken), apierrors.IsUnauthorized(broken):
			return fmt.Errorf("reading the log of the container %s: %w", f.container, broken)
		case over != nil && !retriable(broken):
			return api.Errorf(api.ExitInject, "%w", over).
				WithHint("`kubectl -n %s logs %s -c %s` says more.", f.namespace, f.pod, f.container)
		case !f.last.Equal(before):
			pause = logPause
		}
		if over == nil {
			over, err = f.endWithin(ctx, pause)
		} else {
			err = linger(ctx, pause)
		}
	}
	return err
}

// retriable reports whether a log may be whole another time: an answer of the API server is final.
func retriable(err error) bool {
	var status apierrors.APIStatus
	return err != nil && !(errors.As(err, &status) && status.Status().Code < 500)
}

// linger waits, or returns ctx's error.
func linger(ctx context.Context, pause time.Duration) error {
	timer := time.NewTimer(pause)
	defer timer.Stop()
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-timer.C:
		return nil
	}
}

// endWithin is how the container ended, if it is known within the time. The end of a log precedes that.
func (f *logFollower) endWithin(ctx context.Context, patience time.Duration) (*ContainerEnded, error) {
	within, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	over, err := f.await(within, false)
	if within.Err() != nil && ctx.Err() == nil {
		return nil, nil
	}
	return over, err
}

// await waits for the container's end, and returns it, or, where its start is enough, until it runs.
func (f *logFollower) await(ctx context.Context, start bool) (*ContainerEnded, error) {
	pods := f.kube.CoreV1().Pods(f.namespace)
	for pause := logPause; ; pause = min(2*pause, logPauseMax) {
		p, err := pods.Get(ctx, f.pod, metav1.GetOptions{})
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case apierrors.IsNotFound(err):
			return nil, podGone(f.namespace, f.pod)
		case apierrors.IsForbidden(err), apierrors.IsUnauthorized(err):
			return nil, fmt.Errorf("reading the pod %s: %w", f.pod, err)
		case err == nil:
			if enough, over, err := f.judge(p, start); enough {
				return over, err
			}
			if enough, over, err := f.watch(ctx, p.ResourceVersion, start); enough {
				return over, err
			}
		}
		if err := linger(ctx, pause); err != nil {
			return nil, err
		}
	}
}

// watch judges each state of the pod after a version, until one is enough or the connection ends.
func (f *logFollower) watch(ctx context.Context, version string, start bool) (enough bool, over *ContainerEnded, err error) {
	events, err := f.kube.CoreV1().Pods(f.namespace).Watch(ctx, metav1.ListOptions{
		FieldSelector:   fields.OneTermEqualSelector(metav1.ObjectNameField, f.pod).String(),
		ResourceVersion: version,
	})
	if err != nil {
		return apierrors.IsForbidden(err), nil, fmt.Errorf("watching the pod %s: %w", f.pod, err)
	}
	defer events.Stop()
	for event := range events.ResultChan() {
		p, isPod := event.Object.(*corev1.Pod)
		switch {
		case !isPod: // why the watch ends
			return false, nil, nil
		case event.Type == watch.Deleted:
			return true, nil, podGone(f.namespace, f.pod)
		}
		if enough, over, err = f.judge(p, start); enough {
			return true, over, err
		}
	}
	return false, nil, nil
}

// judge says whether a state of the pod is enough, and what it means.
func (f *logFollower) judge(p *corev1.Pod, start bool) (enough bool, over *ContainerEnded, err error) {
	if f.uid == "" {
		f.uid = p.UID
	}
	if p.UID != f.uid {
		return true, nil, podGone(f.namespace, f.pod)
	}
	if t := ended(p, f.container); t != nil {
		return true, &ContainerEnded{f.namespace, f.pod, f.container, t.ExitCode, t.Reason, oneLine(t.Message)}, nil
	}
	s := statusOf(p, f.container)
	switch {
	case s != nil && s.State.Running != nil:
		return start, nil, nil
	case finished(p):
		return true, nil, podGone(f.namespace, f.pod)
	case s == nil || s.State.Waiting == nil:
		return false, nil, nil
	}
	why := s.State.Waiting.Reason
	if s.State.Waiting.Message != "" {
		why += ": " + oneLine(s.State.Waiting.Message)
	}
	switch s.State.Waiting.Reason {
	case "ErrImagePull", "ImagePullBackOff", "ErrImageNeverPull", "InvalidImageName", "ImageInspectError", "RegistryUnavailable":
		return true, nil, api.Errorf(api.ExitImagePull, "the node %s cannot pull the image %s: %s", p.Spec.NodeName, s.Image, why).
			WithHint("Name one that the nodes can pull with --image REF. `kubectl -n %s describe pod %s` says more.", f.namespace, f.pod)
	case "CreateContainerConfigError", "CreateContainerError", "RunContainerError":
		return true, nil, api.Errorf(api.ExitInject, "the node %s cannot start the container %s: %s", p.Spec.NodeName, f.container, why).
			WithHint("`kubectl -n %s describe pod %s` says more.", f.namespace, f.pod)
	}
	return false, nil, nil
}

// statusOf is what the kubelet says of any of the pod's containers, or nil.
func statusOf(p *corev1.Pod, container string) *corev1.ContainerStatus {
	for _, list := range [][]corev1.ContainerStatus{p.Status.EphemeralContainerStatuses, p.Status.ContainerStatuses, p.Status.InitContainerStatuses} {
		if i := slices.IndexFunc(list, func(s corev1.ContainerStatus) bool { return s.Name == container }); i >= 0 {
			return &list[i]
		}
	}
	return nil
}

// ended is how a container of the pod ended, or nil.
func ended(p *corev1.Pod, container string) *corev1.ContainerStateTerminated {
	if s := statusOf(p, container); s != nil {
		return s.State.Terminated
	}
	return nil
}

// read tells the log's lines after the latest that was told, as long as the connection lasts. Only where the log is whole its
// last line may lack an end: of another it is the beginning.
func (f *logFollower) read(ctx context.Context, whole bool) error {
	o := &corev1.PodLogOptions{Container: f.container, Follow: true, Timestamps: true}
	if !f.last.IsZero() {
		o.SinceTime = &metav1.Time{Time: f.last} // whole seconds arrive there
	}
	log, err := f.kube.CoreV1().Pods(f.namespace).GetLogs(f.pod, o).Stream(ctx)
	if err != nil {
		return err
	}
	defer log.Close()
	known, skip := f.last, f.same
	lines := bufio.NewReader(log)
	for {
		text, err := readLine(lines)
		if err != nil && (text == "" || !whole || !errors.Is(err, io.EOF)) {
			if errors.Is(err, io.EOF) {
				return nil
			}
			return err
		}
		stamp, message, _ := strings.Cut(text, " ")
		at, parsing := time.Parse(time.RFC3339Nano, stamp)
		switch {
		case parsing != nil: // the kubelet's own words
			message = text
		case at.Before(known):
			continue
		case at.Equal(known) && skip > 0:
			skip--
			continue
		case at.Equal(f.last):
			f.same++
		default:
			f.last, f.same = at, 1
		}
		f.line(message)
	}
}

// readLine reads a line, of which it returns the first lineMax bytes, without its end. With an error, it is what there was.
func readLine(r *bufio.Reader) (string, error) {
	var line []byte
	for {
		part, err := r.ReadSlice('\n')
		line = append(line, part[:min(len(part), lineMax-len(line))]...)
		if !errors.Is(err, bufio.ErrBufferFull) {
			return strings.TrimRight(string(line), "\r\n"), err
		}
	}
}

// DialPod connects to a TCP port of a pod by pods/portforward, as PortForward does; its errors are *api.Error, with ErrPodGone
// in the chain where that is the cause, or ctx's.
func (c *Cluster) DialPod(ctx context.Context, namespace, pod string, port uint16) (net.Conn, error) {
	conn, err := c.PortForward(ctx, namespace, pod, port)
	if apierrors.IsNotFound(err) {
		return nil, podGone(namespace, pod)
	}
	if err != nil {
		return nil, c.explained(ctx, err)
	}
	return conn, nil
}
