package intercept

import (
	"context"
	"encoding/json"
	"errors"
	"sync"
	"testing"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// greets is a doorstep of the world whose agents greet at their ports, as the agent of the pod, and whose logs are mute.
func (w *world) greets(say func(pod string) []byte) {
	w.mute = make(chan struct{})
	w.doorstep = func(_ context.Context, pod string, _ uint16) ([]byte, error) { return say(pod), nil }
}

func (w *world) greeting(pod string) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	line, err := json.Marshal(w.agents[w.pod(pod).UID].greeting)
	if err != nil {
		w.t.Error(err)
	}
	return line
}

// The port is enough to begin. The log is followed afterwards.
func TestGreetingByPort(t *testing.T) {
	w := newWorld(t, "web-a", "web-b")
	w.greets(w.greeting)
	i, _, err := begin(t, w, api.InterceptSpec{})
	if err != nil {
		t.Fatal(err)
	}
	if s := i.Status(); s.State != api.InterceptActive {
		t.Errorf("%+v", s)
	}
	w.mu.Lock()
	ports := len(w.greeted)
	w.mu.Unlock()
	if ports != 2 {
		t.Errorf("agents were given %d ports", ports)
	}
	close(w.mute)
	w.endAgent("web-a") // of which only the log tells
	testenv.Until(t, "the pod is covered again", func() bool {
		w.mu.Lock()
		defer w.mu.Unlock()
		return len(w.injected) == 3
	})
}

// Something else at the port, or no right to forward ports, and the log is followed at once.
func TestGreetingByLog(t *testing.T) {
	for name, say := range map[string]string{"no_greeting": "SSH-2.0-OpenSSH_9.2", "incomplete": `{"protocol":1,"port":1}`, "error": `{"error":{"code":1,"message":"x"}}`, "forbidden": ""} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "web-a")
			if say != "" {
				w.greets(func(string) []byte { return []byte(say) })
				close(w.mute)
			}
			began := time.Now()
			if _, _, err := begin(t, w, api.InterceptSpec{}); err != nil {
				t.Fatal(err)
			}
			if took := time.Since(began); took >= greetPatience {
				t.Errorf("it took %v", took)
			}
		})
	}
}

// A port that never answers costs no more than greetPatience.
func TestGreetingSilence(t *testing.T) {
	w := newWorld(t, "web-a")
	var asked sync.WaitGroup
	asked.Add(1)
	w.doorstep = func(ctx context.Context, _ string, _ uint16) ([]byte, error) {
		defer asked.Done()
		<-ctx.Done()
		return nil, ctx.Err()
	}
	if _, _, err := begin(t, w, api.InterceptSpec{}); err != nil {
		t.Fatal(err)
	}
	asked.Wait() // it is not asked for ever: the log has greeted
}

// A container that has ended shows in the pod: its log is asked why without waiting for the port.
func TestGreetingTrouble(t *testing.T) {
	p := &corev1.Pod{}
	for _, tt := range []struct {
		state corev1.ContainerState
		want  bool
	}{
		{corev1.ContainerState{}, false},
		{corev1.ContainerState{Running: &corev1.ContainerStateRunning{}}, false},
		{corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ContainerCreating"}}, false},
		{corev1.ContainerState{Waiting: &corev1.ContainerStateWaiting{Reason: "ErrImagePull"}}, true},
		{corev1.ContainerState{Terminated: &corev1.ContainerStateTerminated{}}, true},
	} {
		p.Status.EphemeralContainerStatuses = []corev1.ContainerStatus{{Name: "kubevpn-agent-1", State: tt.state}}
		if got := troubled(p, "kubevpn-agent-1"); got != tt.want {
			t.Errorf("%+v: %v", tt.state, got)
		}
		if troubled(p, "kubevpn-agent-2") {
			t.Error("it is another container")
		}
	}
}

// The application's key is for the agent that the log names, as another container could listen at the port.
func TestGreetingWithKey(t *testing.T) {
	w := newWorld(t, "web-a")
	w.doorstep = func(context.Context, string, uint16) ([]byte, error) {
		t.Error("the port is asked")
		return nil, errors.New("nobody")
	}
	if _, _, err := begin(t, w, api.InterceptSpec{TLS: &api.TLSTermination{}}); err != nil {
		t.Fatal(err)
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.greeted) > 0 {
		t.Errorf("the agent was given the port %d", w.greeted[0])
	}
}

func TestGreetPort(t *testing.T) {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{}}}}
	for n := int32(20000); n <= 32767; n++ {
		if n != 31000 {
			p.Spec.Containers[0].Ports = append(p.Spec.Containers[0].Ports, corev1.ContainerPort{ContainerPort: n})
		}
	}
	if got := greetPort(p); got != 31000 {
		t.Errorf("%d, which the pod has", got)
	}
}

// An agent that is about to end, as after a reset, is replaced, whether it says so or has ended.
func TestEndingAgentIsReplaced(t *testing.T) {
	for name, end := range map[string]func(*world, *fakeAgent){
		"it_says_so": func(_ *world, a *fakeAgent) {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.ending = true
		},
		"it_has_ended": func(w *world, _ *fakeAgent) { w.endAgent("web-a") },
	} {
		t.Run(name, func(t *testing.T) {
			w := newWorld(t, "web-a")
			key := newKey(t)
			_, stop, err := beginAs(t, w, key, api.InterceptSpec{})
			if err != nil {
				t.Fatal(err)
			}
			if err := stop(); err != nil {
				t.Fatal(err)
			}
			w.mu.Lock()
			old := w.agents[w.pod("web-a").UID]
			w.stale = name == "it_has_ended"
			w.mu.Unlock()
			end(w, old)
			i, _, err := beginAs(t, w, key, api.InterceptSpec{})
			if err != nil {
				t.Fatal(err)
			}
			if s := i.Status(); s.State != api.InterceptActive || s.LastError != "" {
				t.Errorf("%+v", s)
			}
			if n := len(w.injected); n != 2 {
				t.Errorf("%d agents were added", n)
			}
			old.end()
		})
	}
}
