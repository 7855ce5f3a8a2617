package workloads

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podstatus"
)

const (
	// logPause is the first pause before FollowLog requests a log again that has ended. It doubles, up to logPauseMax.
	// Within it, the pod's status usually shows that the container has ended.
	logPause    = 100 * time.Millisecond
	logPauseMax = 5 * time.Second
	// lineMax limits a line, in bytes. FollowLog drops the rest of a longer one.
	lineMax = 64 << 10
)

// ContainerEnded is in the chain of FollowLog's error when the container has ended.
type ContainerEnded struct {
	Namespace, Pod, Container string
	ExitCode                  int32
	Reason                    string // "OOMKilled", "Error", "Completed"
	Message                   string // its last output, if known
}

func (e *ContainerEnded) Error() string {
	text := fmt.Sprintf("the container %s of the pod %s/%s has ended, with exit code %d", e.Container, e.Namespace,
		e.Pod, e.ExitCode)
	if e.Reason != "" {
		text += " (" + e.Reason + ")"
	}
	if e.Message != "" {
		text += ": " + e.Message
	}
	return text
}

// Await waits until ok returns true for the pod, and returns the pod. It calls ok at once and after each change. The
// error is ctx's, or has client.ErrPodGone in its chain.
type Await func(ctx context.Context, ok func(*corev1.Pod) bool) (*corev1.Pod, error)

// Log is the log of one container.
type Log struct {
	Namespace, Pod, Container string
	Await                     Await // of the pod
}

// FollowLog waits until the container runs and passes each line of its log to line, from the beginning, until the
// container or ctx ends. It replaces connections that break, and neither loses nor repeats lines. It drops the rest of
// a line after 64 KiB. line is called from one goroutine at a time.
//
// The error is never nil. It is ctx's, or an *api.Error: the container has ended (a *ContainerEnded is in its chain),
// its pod is gone (client.ErrPodGone), the node cannot pull its image or start it, or the user may not read logs. The
// kubelet retries pulls and starts, so FollowLog may be called again.
func (c Client) FollowLog(ctx context.Context, log Log, line func(string)) error {
	f := logFollower{Log: log, kube: c.Kube(), line: line}
	return c.ExplainContext(ctx, f.run(ctx))
}

// logFollower follows one container's log.
type logFollower struct {
	Log
	kube kubernetes.Interface
	line func(string)

	last time.Time // the kubelet's timestamp of the latest line
	same int       // the number of lines with that timestamp
}

func (f *logFollower) run(ctx context.Context) error {
	over, err := f.started(ctx)
	denied := false // by the last answer
	for pause := logPause; err == nil; pause = min(2*pause, logPauseMax) {
		before := f.last
		broken := f.read(ctx, over != nil)
		refused := apierrors.IsForbidden(broken) || apierrors.IsUnauthorized(broken)
		switch {
		case ctx.Err() != nil:
			return ctx.Err()
		case refused && (denied || f.last.IsZero()):
			return fmt.Errorf("reading the log of the container %s: %w", f.Container, broken)
		case refused: // the log was readable: an API server that restarts denies for a moment
			pause = logPauseMax
		case over != nil && !retriable(broken):
			return api.Errorf(api.ExitInject, "%w", over).
				WithHint("`kubectl -n %s logs %s -c %s` shows the cause.", api.ShellQuote(f.Namespace),
					api.ShellQuote(f.Pod), api.ShellQuote(f.Container))
		case !f.last.Equal(before):
			pause = logPause
		}
		denied = refused
		over, err = f.endWithin(ctx, pause, over)
	}
	return err
}

// started waits until the container has a log. It returns how the container ended, if it has.
func (f *logFollower) started(ctx context.Context) (*ContainerEnded, error) {
	p, err := f.Await(ctx, func(p *corev1.Pod) bool {
		s := podstatus.Of(p, f.Container)
		return s.Running || s.Problem != podstatus.None || Finished(p)
	})
	if err != nil {
		return nil, err
	}
	s := podstatus.Of(p, f.Container)
	switch {
	case s.Running:
		return nil, nil
	case s.Problem == podstatus.Ended:
		return f.ended(s), nil
	case Finished(p):
		return nil, client.PodGone(f.Namespace, f.Pod)
	}
	e := s.Error("the container "+f.Container, api.ExitInject)
	if s.Problem == podstatus.Image {
		e = e.WithHint("Name one that the nodes can pull with --image REF. %s", e.Hint)
	}
	return nil, e
}

// endWithin waits for the pause, or until the pod's status shows how the container ended. It returns how, or over.
func (f *logFollower) endWithin(ctx context.Context, pause time.Duration,
	over *ContainerEnded) (*ContainerEnded, error) {
	within, cancel := context.WithTimeout(ctx, pause)
	defer cancel()
	p, err := f.Await(within, func(p *corev1.Pod) bool {
		return over == nil && (podstatus.Of(p, f.Container).Problem == podstatus.Ended || Finished(p))
	})
	switch {
	case ctx.Err() != nil:
		return nil, ctx.Err()
	case within.Err() != nil:
		return over, nil
	case err != nil:
		return nil, err
	}
	if s := podstatus.Of(p, f.Container); s.Problem == podstatus.Ended {
		return f.ended(s), nil
	}
	return nil, client.PodGone(f.Namespace, f.Pod)
}

func (f *logFollower) ended(s podstatus.Status) *ContainerEnded {
	return &ContainerEnded{f.Namespace, f.Pod, f.Container, s.End.ExitCode, s.End.Reason, api.OneLine(s.End.Message)}
}

// retriable reports whether another request may return the rest of the log. An answer below 500 is final.
func retriable(err error) bool {
	var status apierrors.APIStatus
	return err != nil && !(errors.As(err, &status) && status.Status().Code < 500)
}

// read passes the lines after the latest one to line until the connection ends. If the log is whole, its last line may
// lack a newline; otherwise such a line is incomplete, and read ignores it.
func (f *logFollower) read(ctx context.Context, whole bool) error {
	o := &corev1.PodLogOptions{Container: f.Container, Follow: true, Timestamps: true}
	if !f.last.IsZero() {
		o.SinceTime = &metav1.Time{Time: f.last} // the API server receives whole seconds
	}
	log, err := f.kube.CoreV1().Pods(f.Namespace).GetLogs(f.Pod, o).Stream(ctx)
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
		case parsing != nil: // a message of the kubelet
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

// readLine reads a line and returns its first lineMax bytes, without the newline. With an error, it returns the bytes
// before the error.
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
