package intercept

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

// ownLocalhost is the localhost of a program to which nobody connects.
type ownLocalhost struct {
	refusal error

	mu    sync.Mutex
	ports []netip.AddrPort
	calls int
}

func (l *ownLocalhost) Localhost(_ context.Context, ports []netip.AddrPort) (net.Listener, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ports = ports
	l.calls++
	return &silent{closed: make(chan struct{})}, l.refusal
}

// leads returns an error unless these ports of localhost lead to the pod.
func (l *ownLocalhost) leads(want string) func() error {
	return func() error {
		l.mu.Lock()
		defer l.mu.Unlock()
		if got := fmt.Sprint(l.ports); got != want {
			return fmt.Errorf("%s lead to the pod, want %s", got, want)
		}
		return nil
	}
}

// silent is a listener without conns.
type silent struct {
	net.Listener
	closed chan struct{}
	once   sync.Once
}

func (l *silent) Accept() (net.Conn, error) {
	<-l.closed
	return nil, net.ErrClosed
}

func (l *silent) Close() error {
	l.once.Do(func() { close(l.closed) })
	return nil
}

// listen makes the pod listen at addresses, and its agent report it.
func (w *world) listen(pod string, at ...string) {
	a := w.agent(pod)
	a.mu.Lock()
	defer a.mu.Unlock()
	a.listens = nil
	for _, address := range at {
		a.listens = append(a.listens, netip.MustParseAddrPort(address))
	}
	for e := range a.conversations {
		a.report(e)
	}
}

func shared(names ...string) (spec corev1.PodSpec) {
	for _, n := range names {
		spec.Containers = append(spec.Containers, corev1.Container{Name: n})
	}
	return spec
}

func TestLocalhostFollowsThePod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.addPodWithSpec("web-a", shared("app", "proxy"))
		w.allowExec(true)
		l := new(ownLocalhost)
		if _, err := beginVia(t, w, ViaConfig{Egress: api.EgressNone, Localhost: l}); err != nil {
			t.Fatal(err)
		}
		testenv.Eventually(t, within, l.leads("[]"))
		w.listen("web-a", "127.0.0.1:5432", "[::1]:6379", "0.0.0.0:15020", "10.0.0.9:7", "[::]:80", "0.0.0.0:80", "127.0.0.2:9")
		testenv.Eventually(t, within,
			l.leads("[127.0.0.1:80 127.0.0.1:5432 127.0.0.1:15020 [::1]:80 [::1]:6379]"))
		w.listen("web-a")
		testenv.Eventually(t, within, l.leads("[]"))
		w.removePod("web-a")
		w.addPodWithSpec("web-b", shared("app", "proxy"))
		testenv.Eventually(t, within, func() error {
			if w.agent("web-b") == nil {
				return errors.New("it has no agent")
			}
			return nil
		})
		w.listen("web-b", "127.0.0.1:5432")
		testenv.Eventually(t, within, l.leads("[127.0.0.1:5432]"))
	})
}

func TestPortsOfTheReplacedContainerDoNotAnswer(t *testing.T) {
	state := new(api.AgentState)
	if err := json.Unmarshal([]byte(`{"listens": ["127.0.0.1:8080", "127.0.0.1:5432"]}`), state); err != nil {
		t.Fatal(err)
	}
	if got := loopbackPorts(state, []uint16{8080}); fmt.Sprint(got) != "[127.0.0.1:5432]" {
		t.Errorf("got %v", got)
	}
	if got := loopbackPorts(nil, nil); got != nil {
		t.Errorf("without a report: %v", got)
	}
}

// A container that is alone has nobody on localhost, so its pod gets no agent. Nor does one that the user cannot use.
func TestLocalhostAddsNoAgentInVain(t *testing.T) {
	for _, tt := range []struct {
		name    string
		spec    corev1.PodSpec
		mayExec bool
		want    string
	}{
		{"alone", shared("app"), true, ""},
		{"alone-without-exec", shared("app"), false, ""},
		{"without-exec", shared("app", "proxy"), false, "pods/exec"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				w := newWorld(t)
				w.addPodWithSpec("web-a", tt.spec)
				w.allowExec(tt.mayExec)
				l := new(ownLocalhost)
				_, err := beginVia(t, w, ViaConfig{Egress: api.EgressNone, Localhost: l})
				if (err == nil) != (tt.want == "") || err != nil && !strings.Contains(err.Error(), tt.want) {
					t.Errorf("got %v", err)
				}
				time.Sleep(time.Minute)
				if len(w.injected) > 0 || l.calls > 0 {
					t.Errorf("agents were added to %v, and localhost was set %d times", w.injected, l.calls)
				}
			})
		})
	}
}

// Without nf_tables on this machine, say, flows still leave from the pod.
func TestLocalhostThatFailsIsAWarning(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		w := newWorld(t)
		w.addPodWithSpec("web-a", shared("app"))
		w.allowExec(true)
		v, err := beginVia(t, w, ViaConfig{Localhost: &ownLocalhost{refusal: errors.New("no nf_tables")}})
		if err != nil {
			t.Fatal(err)
		}
		w.listen("web-a", "127.0.0.1:5432")
		testenv.Eventually(t, within, func() error {
			if warned := v.i.Status().Warnings; !slices.ContainsFunc(warned, func(s string) bool {
				return strings.Contains(s, "localhost does not answer") && strings.Contains(s, "no nf_tables")
			}) {
				return fmt.Errorf("warned of %q", warned)
			}
			return nil
		})
		testenv.Eventually(t, within, w.from(v, "web-a"))
	})
}
