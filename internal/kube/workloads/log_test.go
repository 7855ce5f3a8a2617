package workloads

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// logServer is an API server with the log of one container, whose states follow a script.
type logServer struct {
	*httptest.Server
	t    *testing.T
	pods Pods

	mu    sync.Mutex
	later *corev1.Pod                                    // the pod once somebody waits for another state; nil: no change
	logs  []func(w http.ResponseWriter, r *http.Request) // one for each request of the log
}

// nobody stands for a pod that has gone.
var nobody = new(corev1.Pod)

func newLogServer(t *testing.T, first, later *corev1.Pod, logs ...func(http.ResponseWriter, *http.Request)) *logServer {
	s := &logServer{t: t, later: later, logs: logs}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	s.move(first)
	return s
}

func (s *logServer) move(p *corev1.Pod) {
	if p == nobody {
		s.pods.Update(nil)
	} else {
		s.pods.Update([]corev1.Pod{*p})
	}
}

func (s *logServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	if q := r.URL.Query(); !strings.HasSuffix(r.URL.Path, "/pods/web-1/log") || q.Get("container") != "agent" || q.Get("follow") != "true" || q.Get("timestamps") != "true" {
		s.t.Errorf("asks for %s", r.URL)
	}
	s.mu.Lock()
	if len(s.logs) == 0 {
		s.mu.Unlock()
		return // empty
	}
	answer := s.logs[0]
	s.logs = s.logs[1:]
	s.mu.Unlock()
	answer(w, r)
}

// await moves the pod to its later state when somebody waits for one.
func (s *logServer) await(ctx context.Context, ok func(*corev1.Pod) bool) (*corev1.Pod, error) {
	return s.pods.Await(holding())(ctx, func(p *corev1.Pod) bool {
		if ok(p) {
			return true
		}
		s.mu.Lock()
		later := s.later
		s.later = nil
		s.mu.Unlock()
		if later != nil {
			s.move(later)
		}
		return false
	})
}

// in is the pod with the agent in a state.
func in(s corev1.ContainerState) *corev1.Pod { return holding(with("agent", me, s)) }

// text answers with lines, and then ends, or breaks the connection.
func text(lines string, broken bool) func(http.ResponseWriter, *http.Request) {
	return func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, lines)
		if broken {
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		}
	}
}

func stamped(lines ...string) string {
	var all strings.Builder
	for i, line := range lines {
		fmt.Fprintf(&all, "2026-01-01T00:00:00.%09dZ %s\n", i/2, line) // pairs have the same stamp
	}
	return all.String()
}

func (s *logServer) follow(ctx context.Context, told func(string)) error {
	kube, err := kubernetes.NewForConfig(&rest.Config{Host: s.URL})
	if err != nil {
		s.t.Fatal(err)
	}
	f := logFollower{kube: kube, Log: Log{Namespace: "ns", Pod: "web-1", Container: "agent", Await: s.await}, line: told}
	return f.run(ctx)
}

func TestFollowLogReturnsEachLineOnce(t *testing.T) {
	waits := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "so it is"}}
	}
	failed := holding(with("agent", me))
	failed.Status.Phase = corev1.PodFailed
	successor := in(running)
	successor.UID = "2"
	long := strings.Repeat("x", 2*lineMax)
	for _, tt := range []struct {
		name  string
		first *corev1.Pod
		later *corev1.Pod // once it is watched
		logs  []func(http.ResponseWriter, *http.Request)
		want  []string
		code  api.ExitCode
		err   string
		gone  bool
		ended int32
	}{
		{name: "dead_already", first: in(died), logs: texts(text(stamped("a", "b"), false)), want: []string{"a", "b"},
			code: api.ExitInject, err: "the container agent of the pod ns/web-1 has ended, with exit code 137 (OOMKilled)", ended: 137},
		{name: "unfinished_line", first: in(died), logs: texts(text(stamped("a")+"2026-01-01T00:00:01Z b", false)), want: []string{"a", "b"},
			code: api.ExitInject, err: "has ended", ended: 137},
		{name: "kubelets_words", first: in(died), logs: texts(text("unable to retrieve logs\n", false)), want: []string{"unable to retrieve logs"},
			code: api.ExitInject, err: "has ended", ended: 137},
		{name: "long_line", first: in(died), logs: texts(text(stamped(long, "b"), false)),
			want: []string{long[:lineMax-len("2026-01-01T00:00:00.000000000Z ")], "b"}, code: api.ExitInject, err: "has ended", ended: 137},
		{name: "broken_connection", first: in(died), logs: texts(text(stamped("a", "b", "c")+"2026-01-01T00:00:00.0000", true), text(stamped("a", "b", "c", "d", "e"), false)),
			want: []string{"a", "b", "c", "d", "e"}, code: api.ExitInject, err: "has ended", ended: 137},
		{name: "broken_while_it_runs", first: in(running), later: in(died), logs: texts(text(stamped("a", "b", "c"), true), text(stamped("a", "b", "c", "d"), false)),
			want: []string{"a", "b", "c", "d"}, code: api.ExitInject, err: "has ended", ended: 137},
		{name: "starts_late", first: holding(with("agent", me)), later: in(died), logs: texts(text(stamped("a"), false)),
			want: []string{"a"}, code: api.ExitInject, err: "has ended", ended: 137},
		{name: "goes", first: holding(with("agent", me)), later: nobody, code: api.ExitInject, err: "has gone", gone: true},
		{name: "another_of_the_name", first: in(running), later: successor, logs: texts(text(stamped("a"), false)), want: []string{"a"}, code: api.ExitInject, err: "has gone", gone: true},
		{name: "no_pod", first: nobody, code: api.ExitInject, err: "the pod ns/web-1 has gone", gone: true},
		{name: "pod_failed", first: failed, code: api.ExitInject, err: "has gone", gone: true},
		{name: "no_image", first: in(waits("ErrImagePull")), code: api.ExitImagePull, err: "ErrImagePull: so it is"},
		{name: "cannot_start", first: in(waits("ContainerCreating")), later: in(waits("CreateContainerError")), code: api.ExitInject, err: "cannot start the container agent: CreateContainerError: so it is"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			noLeaks(t)
			s := newLogServer(t, tt.first, tt.later, tt.logs...)
			var got []string
			err := s.follow(t.Context(), func(line string) { got = append(got, line) })
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("lines (-want +got):\n%s", d)
			}
			e := explain(t, err)
			if e == nil || e.Code != tt.code || !strings.Contains(e.Message, tt.err) || e.Hint == "" {
				t.Errorf("got %+v, want code %d, %q", e, tt.code, tt.err)
			}
			var end *ContainerEnded
			if errors.As(err, &end) != (tt.ended != 0) || end != nil && end.ExitCode != tt.ended {
				t.Errorf("the container's end: %+v", end)
			}
			if errors.Is(err, client.ErrPodGone) != tt.gone {
				t.Errorf("the pod has gone: want %v, by %v", tt.gone, err)
			}
			s.CloseClientConnections()
		})
	}
}

func texts(all ...func(http.ResponseWriter, *http.Request)) []func(http.ResponseWriter, *http.Request) {
	return all
}

// deny is what an API server answers while it does not know its Roles yet.
func deny(w http.ResponseWriter, _ *http.Request) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(http.StatusForbidden)
	fmt.Fprint(w, `{"kind":"Status","apiVersion":"v1","status":"Failure","reason":"Forbidden","code":403}`)
}

// A log that was readable outlives one denial, and ends at the second. One that was not readable fails at once.
func TestFollowLogOutlivesOneDenial(t *testing.T) {
	for _, tt := range []struct {
		logs []func(http.ResponseWriter, *http.Request)
		want string
	}{
		{texts(text(stamped("a"), true), deny, text(stamped("a", "b", "c"), true), deny, deny, text(stamped("d"), true)), "abc"},
		{texts(deny, text(stamped("a"), true)), ""},
	} {
		s := newLogServer(t, in(running), nil, tt.logs...)
		var got strings.Builder
		err := s.follow(t.Context(), func(line string) { got.WriteString(line) })
		if got.String() != tt.want || !apierrors.IsForbidden(err) {
			t.Errorf("got %q and %v, want %q", got.String(), err, tt.want)
		}
		s.CloseClientConnections()
	}
}

func TestFollowLogEndsWithItsContext(t *testing.T) {
	noLeaks(t)
	s := newLogServer(t, in(running), nil, func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprint(w, stamped("a"))
		w.(http.Flusher).Flush()
		<-r.Context().Done()
	})
	ctx, cancel := context.WithCancel(t.Context())
	err := s.follow(ctx, func(string) { cancel() })
	if !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	s.CloseClientConnections()
}
