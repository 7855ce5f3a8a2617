//go:build linux

package agent

import (
	"fmt"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/httpmatch"
)

func traceIDOf(n int) string { return fmt.Sprintf("%032x", n) }

// noted announces a trace ID and returns what the agent has noted.
func (m *testLaptop) noted(id string, wanted ...httpmatch.Spec) *api.AgentTrace {
	m.t.Helper()
	r, err := m.answer(api.AgentOrder{Trace: id, Wanted: wanted})
	if err != nil || r.Trace == nil {
		m.t.Fatalf("%+v, %v", r, err)
	}
	return r.Trace
}

func TestTraceTellsWhatHappenedToARequest(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice, bob := newPerson(t, "alice@laptop"), newPerson(t, "bob@desk")
		p := newPod(t, alice)
		a, b := p.connect(alice), p.connect(p.standby(bob))
		if err := a.claim("1", "x-user=me"); err != nil {
			t.Fatal(err)
		}
		if err := b.claim("1", "x-user=you"); err != nil {
			t.Fatal(err)
		}
		id := traceIDOf(1)
		if n := a.noted(id); len(n.Requests) != 0 || fmt.Sprint(n.Older) != "[10.244.9.9:40000]" {
			t.Errorf("%+v", n)
		}
		p.ask("X-User=me", "Kubevpn-Why="+id)
		p.ask("X-User=you", "Traceparent=00-"+id+"-0000000000000001-01")
		p.ask("Kubevpn-Why=" + id)
		p.ask("X-User=me")
		p.ask("X-User=me", "Kubevpn-Why="+traceIDOf(2))
		seen := a.noted(id).Requests
		var got []string
		for _, r := range seen {
			to := "application"
			if r.To >= 0 {
				to = r.Claims[r.To].Owner
			}
			for _, c := range r.Claims {
				to += fmt.Sprintf(", %s %v %v", c.Owner, c.Mine, c.Differences)
			}
			got = append(got, to)
			if r.Port != 8080 {
				t.Errorf("%+v", r)
			}
		}
		want := []string{
			`alice@laptop, alice@laptop true [], bob@desk false [header x-user is "me", not "you"]`,
			`bob@desk, alice@laptop true [header x-user is not "me"], bob@desk false []`,
			`application, alice@laptop true [header x-user is absent], bob@desk false [header x-user is absent]`,
		}
		if strings.Join(got, "\n") != strings.Join(want, "\n") {
			t.Errorf("got\n%s\nwant\n%s", strings.Join(got, "\n"), strings.Join(want, "\n"))
		}
		if _, err := b.answer(api.AgentOrder{Trace: id}); err == nil {
			t.Error("another owner got the trace")
		}
	})
}

// The agent of a hop knows which other matches of the owner a request fits there.
func TestTraceTellsWhichMatchesARequestFits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		alice := newPerson(t, "alice@laptop")
		a := newPod(t, alice)
		l := a.connect(alice)
		if err := l.claim("1", "x-team=red"); err != nil {
			t.Fatal(err)
		}
		id := traceIDOf(1)
		wanted := []httpmatch.Spec{{Headers: []httpmatch.Named{{Name: "x-user", Value: "me"}}}, {Baggage: []httpmatch.Named{{Name: "user", Value: "me"}}}}
		l.noted(id, wanted...)
		a.ask("X-User=me", "Baggage=user=me", "Kubevpn-Why="+id)
		a.ask("Baggage=user=me", "Traceparent=00-"+id+"-0000000000000001-01")
		a.ask("Kubevpn-Why=" + id)
		var got []string
		for _, r := range l.noted(id, wanted...).Requests {
			got = append(got, fmt.Sprint(r.Fits))
		}
		if want := "[x-user=me baggage user=me] [baggage user=me] []"; strings.Join(got, " ") != want {
			t.Errorf("got %s, want %s", got, want)
		}
		for n := range 2 * maxWanted {
			wanted = append(wanted, httpmatch.Spec{Path: fmt.Sprint("/", n)})
		}
		l.noted(traceIDOf(2), wanted...)
		if _, err := l.answer(api.AgentOrder{Trace: traceIDOf(3), Wanted: []httpmatch.Spec{{Path: "x"}}}); err == nil {
			t.Error("the agent accepts a match that is none")
		}
	})
}

func TestTracesAreBoundedAndExpire(t *testing.T) {
	tr := tracer{traces: make(map[string]*trace)}
	now := time.Now()
	for n := range maxTraces {
		if err := tr.announce(traceIDOf(n), "owner", nil, now); err != nil {
			t.Fatal(err)
		}
	}
	if tr.announce(traceIDOf(maxTraces), "owner", nil, now) == nil {
		t.Errorf("announce accepted more than %d traces", maxTraces)
	}
	for _, id := range []string{"", "x", strings.Repeat("g", 32), strings.Repeat("A", 32)} {
		if tr.announce(id, "owner", nil, now) == nil {
			t.Errorf("announce accepted the trace ID %q", id)
		}
	}
	if tr.expire(now.Add(traceTimeout + 1)); len(tr.traces) != 0 {
		t.Errorf("%d traces", len(tr.traces))
	}
}
