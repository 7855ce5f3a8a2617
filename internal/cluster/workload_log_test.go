package cluster

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/rest"

	"kubevpn/internal/api"
)

// logServer is an API server with one pod, whose states and logs follow a script.
type logServer struct {
	*httptest.Server
	t *testing.T

	mu    sync.Mutex
	state *corev1.Pod // nil: none
	moved chan struct{}
	logs  []func(w http.ResponseWriter, r *http.Request) // one for each time that the log is asked for
}

func newLogServer(t *testing.T, state *corev1.Pod, logs ...func(http.ResponseWriter, *http.Request)) *logServer {
	s := &logServer{t: t, state: state, moved: make(chan struct{}), logs: logs}
	s.Server = httptest.NewServer(s)
	t.Cleanup(s.Close)
	return s
}

// move brings the pod into another state. It does so once.
func (s *logServer) move(p *corev1.Pod) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.state = p; p != nil {
		p.ResourceVersion = "2"
	}
	close(s.moved)
	s.moved = make(chan struct{})
}

func (s *logServer) now() (*corev1.Pod, <-chan struct{}) {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.state, s.moved
}

func (s *logServer) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	p, moved := s.now()
	switch {
	case strings.HasSuffix(r.URL.Path, "/pods/web-1/log"):
		if q := r.URL.Query(); q.Get("container") != "agent" || q.Get("follow") != "true" || q.Get("timestamps") != "true" {
			s.t.Errorf("asks for the log %s", r.URL.RawQuery)
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
	case r.URL.Query().Get("watch") != "":
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusOK)
		for known := r.URL.Query().Get("resourceVersion"); ; {
			switch {
			case p == nil:
				answerJSON(s.t, w, metav1.WatchEvent{Type: "DELETED", Object: runtime.RawExtension{Object: typed(holding())}})
				return
			case p.ResourceVersion != known:
				known = p.ResourceVersion
				answerJSON(s.t, w, metav1.WatchEvent{Type: "MODIFIED", Object: runtime.RawExtension{Object: typed(p)}})
			}
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
				return
			case <-moved:
			}
			p, moved = s.now()
		}
	case p == nil:
		w.Header().Set("Content-Type", "application/json")
		w.WriteHeader(http.StatusNotFound)
		answerJSON(s.t, w, metav1.Status{TypeMeta: metav1.TypeMeta{Kind: "Status", APIVersion: "v1"}, Status: metav1.StatusFailure, Reason: metav1.StatusReasonNotFound, Code: http.StatusNotFound})
	default:
		w.Header().Set("Content-Type", "application/json")
		answerJSON(s.t, w, typed(p))
	}
}

func typed(p *corev1.Pod) *corev1.Pod {
	p = p.DeepCopy()
	p.TypeMeta = metav1.TypeMeta{Kind: "Pod", APIVersion: "v1"}
	return p
}

func answerJSON(t *testing.T, w http.ResponseWriter, v any) {
	if err := json.NewEncoder(w).Encode(v); err != nil {
		t.Error(err)
	}
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
	f := logFollower{kube: kube, namespace: "ns", pod: "web-1", container: "agent", line: told}
	return f.run(ctx)
}

func TestFollowLog(t *testing.T) {
	waits := func(reason string) corev1.ContainerState {
		return corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: reason, Message: "so it is"}}
	}
	failed := holding(with("agent", me))
	failed.Status.Phase = corev1.PodFailed
	successor := in(running)
	successor.UID = "2"
	nobody := new(corev1.Pod) // stands for none
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
		{name: "no_pod", code: api.ExitInject, err: "the pod ns/web-1 has gone", gone: true},
		{name: "pod_failed", first: failed, code: api.ExitInject, err: "has gone", gone: true},
		{name: "no_image", first: in(waits("ErrImagePull")), code: api.ExitImagePull, err: "ErrImagePull: so it is"},
		{name: "cannot_start", first: in(waits("ContainerCreating")), later: in(waits("CreateContainerError")), code: api.ExitInject, err: "cannot start the container agent: CreateContainerError: so it is"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			noLeaks(t)
			s := newLogServer(t, tt.first, tt.logs...)
			var got []string
			if tt.later != nil {
				var once sync.Once
				s.Config.Handler = http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
					if r.URL.Query().Get("watch") != "" {
						once.Do(func() {
							if tt.later == nobody {
								s.move(nil)
							} else {
								s.move(tt.later)
							}
						})
					}
					s.ServeHTTP(w, r)
				})
			}
			err := s.follow(t.Context(), func(line string) { got = append(got, line) })
			if d := cmp.Diff(tt.want, got); d != "" {
				t.Errorf("lines (-want +got):\n%s", d)
			}
			e := facts{}.explain(err)
			if e == nil || e.Code != tt.code || !strings.Contains(e.Message, tt.err) || e.Hint == "" {
				t.Errorf("got %+v, want code %d, %q", e, tt.code, tt.err)
			}
			var end *ContainerEnded
			if errors.As(err, &end) != (tt.ended != 0) || end != nil && end.ExitCode != tt.ended {
				t.Errorf("the container's end: %+v", end)
			}
			if errors.Is(err, ErrPodGone) != tt.gone {
				t.Errorf("the pod has gone: want %v, by %v", tt.gone, err)
			}
			s.CloseClientConnections()
		})
	}
}

func texts(all ...func(http.ResponseWriter, *http.Request)) []func(http.ResponseWriter, *http.Request) {
	return all
}

// A log that is being followed ends with its reader.
func TestFollowLogCancelled(t *testing.T) {
	noLeaks(t)
	s := newLogServer(t, in(running), func(w http.ResponseWriter, r *http.Request) {
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
