package intercept

import (
	"context"
	"encoding/json"
	"errors"
	"strings"
	"sync"
	"testing"
	"testing/synctest"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/testenv"
)

// answersAtPort makes the agents of w answer with say at their ports. Their logs stay empty until w.mute is closed.
func (w *world) answersAtPort(say func(pod string) []byte) {
	w.mute = make(chan struct{})
	w.infoLine = func(_ context.Context, pod string, _ uint16) ([]byte, error) { return say(pod), nil }
}

func (w *world) info(pod string) []byte {
	w.mu.Lock()
	defer w.mu.Unlock()
	line, err := json.Marshal(w.agents[w.pod(pod).UID].info)
	if err != nil {
		w.t.Error(err)
	}
	return line
}

// The port suffices to start. Later the intercept reads the log.
func TestAgentInfoFromPort(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a", "web-b")
		w.answersAtPort(w.info)
		i, _, err := begin(t, w, api.InterceptSpec{})
		if err != nil {
			t.Fatal(err)
		}
		if s := i.Status(); s.State != api.InterceptActive {
			t.Errorf("%+v", s)
		}
		w.mu.Lock()
		ports := len(w.infoPorts)
		w.mu.Unlock()
		if ports != 2 {
			t.Errorf("agents were given %d ports", ports)
		}
		close(w.mute)
		w.endAgent("web-a") // only the log reports this
		testenv.Until(t, "another agent in web-a", func() bool {
			w.mu.Lock()
			defer w.mu.Unlock()
			return len(w.injected) == 3
		})
	})
}

// Another program listens at the port, or the user may not forward ports.
func TestAgentInfoFromLogIfPortFails(t *testing.T) {
	for name, say := range map[string]string{"no_info": "SSH-2.0-OpenSSH_9.2", "incomplete": `{"protocol":1,"port":1}`, "error": `{"error":{"code":1,"message":"x"}}`, "forbidden": ""} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a")
				if say != "" {
					w.answersAtPort(func(string) []byte { return []byte(say) })
					close(w.mute)
				}
				if _, _, err := begin(t, w, api.InterceptSpec{}); err != nil {
					t.Fatal(err)
				}
			})
		})
	}
}

func TestAgentInfoPortThatNeverAnswersDelaysNothing(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		var asked sync.WaitGroup
		asked.Add(1)
		w.infoLine = func(ctx context.Context, _ string, _ uint16) ([]byte, error) {
			defer asked.Done()
			<-ctx.Done()
			return nil, ctx.Err()
		}
		if _, _, err := begin(t, w, api.InterceptSpec{}); err != nil {
			t.Fatal(err)
		}
		asked.Wait() // the log ends FirstLine's ctx
	})
}

// Another container could listen at the port, and receive the application's TLS key.
func TestAgentInfoOnlyFromLogWithTLSKey(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t, "web-a")
		w.infoLine = func(context.Context, string, uint16) ([]byte, error) {
			t.Error("FirstLine was called")
			return nil, errors.New("nobody")
		}
		if _, _, err := begin(t, w, api.InterceptSpec{TLS: &api.TLSTermination{}}); err != nil {
			t.Fatal(err)
		}
		w.mu.Lock()
		defer w.mu.Unlock()
		if len(w.infoPorts) > 0 {
			t.Errorf("the agent was given the port %d", w.infoPorts[0])
		}
	})
}

func TestInfoPortIsFree(t *testing.T) {
	p := &corev1.Pod{Spec: corev1.PodSpec{Containers: []corev1.Container{{}}}}
	for n := int32(20000); n <= 32767; n += 2 {
		p.Spec.Containers[0].Ports = append(p.Spec.Containers[0].Ports, corev1.ContainerPort{ContainerPort: n})
	}
	for range 100 {
		if got := infoPort(p); got%2 == 0 {
			t.Errorf("infoPort = %d, which a container declares", got)
		}
	}
}

func TestEndingAgentIsReplaced(t *testing.T) {
	for name, end := range map[string]func(*world, *fakeAgent){
		"agent_rejects_orders": func(_ *world, a *fakeAgent) {
			a.mu.Lock()
			defer a.mu.Unlock()
			a.ending = true
		},
		"agent_has_ended": func(w *world, _ *fakeAgent) { w.endAgent("web-a") },
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
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
				w.stale = name == "agent_has_ended"
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
		})
	}
}

// A container beside the agent has bound the agents' socket, so the agent's log names that container's key.
func TestKeyIsUsedOnlyIfAnAgentSaysItIsItsOwn(t *testing.T) {
	for name, tt := range map[string]struct {
		says func(container string, info *api.AgentInfo)
		tls  bool
		want string // a part of the error
	}{
		"fake leader": {func(_ string, g *api.AgentInfo) { g.Leader = api.LeaderOther }, false, "another program poses as the agent"},
		"another key is that agent's own": {func(c string, g *api.AgentInfo) {
			if g.Leader = api.LeaderOther; c == "kubevpn-agent-1" {
				g.Leader, g.Key = api.LeaderSelf, "other"
			}
		}, false, "another program poses as the agent"},
		"an agent before ours leads": {func(c string, g *api.AgentInfo) {
			if c != "kubevpn-agent-1" {
				g.Leader = api.LeaderOther
			}
		}, true, ""},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t, "web-a")
				w.says = tt.says
				if _, _, err := w.Inject(t.Context(), w.pod("web-a"), workloads.Agent{Owner: "earlier"}); err != nil {
					t.Fatal(err)
				}
				var spec api.InterceptSpec
				if tt.tls {
					spec.TLS = &api.TLSTermination{}
				}
				_, _, err := begin(t, w, spec)
				if tt.want == "" && err != nil || tt.want != "" && (err == nil || !strings.Contains(err.Error(), tt.want)) {
					t.Errorf("got %v, want %q", err, tt.want)
				}
			})
		})
	}
}
