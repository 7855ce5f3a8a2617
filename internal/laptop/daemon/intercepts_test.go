//go:build linux

package daemon

import (
	"context"
	"crypto/elliptic"
	"encoding/json"
	"errors"
	"io"
	"slices"
	"strings"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wakeup"
)

func TestInterceptConnectsIfNecessary(t *testing.T) {
	r := start(t)
	req := interceptRequest("a", "deploy/web")
	if refused := r.mustPost(api.PathIntercept, req); refused.status != api.StatusNeedsHelper {
		t.Fatalf("without a helper: %+v", refused)
	}
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	answer := r.goPost(t.Context(), api.PathIntercept, req)
	c := wait(t, r.made, "the connection")
	close(c.connected)
	i := r.begin()
	got := wait(t, answer, "the answer")
	if len(got.events) != 4 || got.events[1].Connection == nil || got.events[1].Connection.ID != "id-a" || got.events[2].Step != "Adding the agent to deployment/web" {
		t.Errorf("events = %+v, want the connection's, then the intercept's", got.events)
	}
	if e := got.last().Intercept; e == nil || e.Workload != "deployment/web" || e.Namespace != "default" || e.Connection != "id-a" || len(e.ID) != 12 || e.Since.IsZero() {
		t.Errorf("intercept = %+v", e)
	}
	if i.conn != Connection(c) {
		t.Errorf("config = %+v", i.config)
	}
	if o := i.config; !strings.Contains(o.Owner, "@") || o.Key == nil || o.Key.Curve != elliptic.P256() {
		t.Errorf("owner = %+v", o.Owner)
	}
	wantState(t, r.intercepted(), api.InterceptActive)

	left := r.mustPost(api.PathLeave, api.LeaveRequest{Workloads: []string{"deployments.apps/web"}})
	if e := left.last(); !e.Done || e.Step != "Leaving deployment/web" || e.Intercept == nil {
		t.Errorf("leave = %+v", left.events)
	}
	wait(t, i.ended, "the intercept's end")
	if got := r.intercepted(); len(got) != 0 {
		t.Errorf("intercepts = %+v, want none", got)
	}
	if wakeup.IsClosed(c.ended) {
		t.Error("the connection has ended with the intercept")
	}
}

func TestInterceptKeepsTheSettingsOfTheConnection(t *testing.T) {
	r := start(t)
	r.connect("a")
	req := interceptRequest("a", "deployment/web")
	req.Connect.Namespace, req.Connect.Scheduler, req.Connect.Context = "shop", "lc", "other"
	req.Connect.Settings = []api.Setting{
		{Key: "scheduler", Value: "lc", Origin: api.OriginFile}, {Key: "netstack", Value: "", Origin: api.OriginFlag},
	}
	answer := r.goPost(t.Context(), api.PathIntercept, req)
	i := r.begin()
	for _, e := range wait(t, answer, "the answer").events {
		if e.Warning != "" || e.Step == "Changing the namespace" {
			t.Errorf("event %+v: the connection is not what was asked for", e)
		}
	}
	if got := r.status()[0].Namespace; got != "default" {
		t.Errorf("the connection's namespace = %s, want default", got)
	}
	if got := r.intercepted()[0].Namespace; got != "shop" || i.account.Namespace != "shop" {
		t.Errorf("the intercept's namespace = %s, want shop", got)
	}
}

func TestInterceptRejectsFlagsThatTheConnectionDoesNotHave(t *testing.T) {
	r := start(t)
	c := r.connect("a")
	req := interceptRequest("a", "deployment/web")
	req.Connect.Settings = []api.Setting{
		{Key: "scheduler", Value: "rr", Origin: api.OriginFlag}, // as the connection
		{Key: "netstack", Value: "gvisor", Origin: api.OriginFlag, Source: "--netstack"},
		{Key: "extraCIDRs", Value: "10.20.0.0/16", Origin: api.OriginFlag, Source: "--extra-cidr"},
	}
	got := r.mustPost(api.PathIntercept, req).err
	const want = "this cluster is already connected, otherwise than asked for: --netstack gvisor, and it has system; " +
		"--extra-cidr 10.20.0.0/16, and it has none"
	if got == nil || got.Code != api.ExitUsage || got.Message != want || !strings.Contains(got.Hint, "`kubevpn connect --reconnect`") {
		t.Errorf("error %+v, want %q", got, want)
	}
	if wakeup.IsClosed(c.ended) || len(r.intercepted()) != 0 {
		t.Error("the connection ended, or there is an intercept")
	}
}

func TestSecondInterceptJoinsOrReplaces(t *testing.T) {
	r := start(t)
	r.connect("a")
	req := interceptRequest("a", "deployment/web")
	first := r.intercept(req)
	req.Spec.Mode = api.ModeAuto // which is what nothing means
	got := r.mustPost(api.PathIntercept, req)
	if len(got.events) != 3 || got.events[1].Detail != "already active with these settings" || got.last().Intercept == nil {
		t.Errorf("the same again = %+v, want that it is there", got.events)
	}
	if wakeup.IsClosed(first.ended) {
		t.Fatal("the same again has ended the first")
	}
	req.Spec.Match.Path = "/api"
	second := r.intercept(req)
	if !wakeup.IsClosed(first.ended) {
		t.Error("the second began before the first had ended")
	}
	if got := second.config.Spec.Match.Path; got != "/api" {
		t.Errorf("the second one's path = %q, want /api", got)
	}
	wantState(t, r.intercepted(), api.InterceptActive)
}

func TestFailedInterceptLeavesNothing(t *testing.T) {
	conflict := api.Errorf(api.ExitConflict, "bob@desk has everything")
	r := start(t)
	c := r.connect("a")
	tests := []struct {
		name string
		req  api.InterceptRequest
		code api.ExitCode
	}{
		{"nothing", interceptRequest("a"), api.ExitUsage},
		{"unknown_type", interceptRequest("a", "deployment/web", "banana/web"), api.ExitWorkload},
		{"specification", api.InterceptRequest{Connect: request("a"), Workloads: []string{"deploy/web"}, Spec: api.InterceptSpec{Container: "nope"}}, api.ExitUsage},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := r.mustPost(api.PathIntercept, tt.req)
			e := got.err
			if e == nil {
				e = got.last().Error
			}
			if e == nil || e.Code != tt.code {
				t.Errorf("answer = %+v, want exit code %d", got, tt.code)
			}
		})
	}
	if n := len(r.intercepts); n > 0 {
		t.Errorf("%d intercepts were begun", n)
	}

	t.Run("one_of_two", func(t *testing.T) {
		answer := r.goPost(t.Context(), api.PathIntercept, interceptRequest("a", "deployment/web", "deployment/api"))
		good, bad := r.begin(), wait(t, r.intercepts, "the second")
		bad.end <- conflict
		if e := wait(t, answer, "the answer").last().Error; e == nil || e.Code != api.ExitConflict || e.Message != conflict.Message {
			t.Errorf("error = %+v, want the conflict", e)
		}
		if !wakeup.IsClosed(good.ended) {
			t.Error("the one that could be made was not undone before the answer")
		}
		if got := r.intercepted(); len(got) != 0 {
			t.Errorf("intercepts = %+v, want none", got)
		}
	})
	if wakeup.IsClosed(c.ended) {
		t.Error("the connection has ended")
	}
}

func TestStatusShowsAFailedIntercept(t *testing.T) {
	r := start(t)
	r.connect("a")
	req := interceptRequest("a", "deployment/web")
	i := r.intercept(req)
	i.end <- api.Errorf(api.ExitWorkload, "the Deployment was deleted")
	testenv.Until(t, "it has failed", func() bool { return r.intercepted()[0].State == api.InterceptFailed })
	if got := r.intercepted()[0]; got.Error == nil || got.Error.Code != api.ExitWorkload || len(got.Pods) != 1 {
		t.Errorf("intercept = %+v, want its last status and why", got)
	}
	r.intercept(req) // takes its place
	wantState(t, r.intercepted(), api.InterceptActive)
}

func TestInterceptFailsWhenItsConnectionEnds(t *testing.T) {
	r := start(t)
	c := r.connect("a")
	i := r.intercept(interceptRequest("a", "deployment/web"))
	c.end <- api.Errorf(api.ExitLost, "gone")
	wait(t, i.ended, "the intercept's end")
	testenv.Until(t, "it has failed", func() bool { return r.intercepted()[0].State == api.InterceptFailed })
	if e := r.intercepted()[0].Error; e.Message != "gone" {
		t.Errorf("error = %+v, want the connection's", e)
	}
	if left := r.mustPost(api.PathLeave, api.LeaveRequest{All: true}); !left.last().Done {
		t.Errorf("leaving what failed = %+v", left.events)
	}
	if got := r.intercepted(); len(got) != 0 {
		t.Errorf("intercepts = %+v, want none", got)
	}
}

// After Ctrl-C before the intercept is active, neither the intercept nor a connection that the request made is left.
func TestInterruptedInterceptLeavesNothing(t *testing.T) {
	for _, tt := range []struct {
		name      string
		connected bool // before
	}{{"connected_before", true}, {"connected_for_it", false}} {
		t.Run(tt.name, func(t *testing.T) {
			r := start(t)
			if tt.connected {
				r.connect("a")
			} else if err := r.handOver(); err != nil {
				t.Fatal(err)
			}
			ctx, interrupt := context.WithCancel(t.Context())
			answer := r.goPost(ctx, api.PathIntercept, interceptRequest("a", "deployment/web"))
			if !tt.connected {
				close(wait(t, r.made, "the connection").connected)
			}
			i := wait(t, r.intercepts, "the intercept")
			interrupt()
			wait(t, answer, "the request's end")
			wait(t, i.ended, "the intercept's end")
			want := 0
			if tt.connected {
				want = 1
			}
			testenv.Until(t, "nothing else is left", func() bool { return len(r.intercepted()) == 0 && len(r.status()) == want })
		})
	}
}

func TestAttachedInterceptEndsWithItsRequest(t *testing.T) {
	r := start(t)
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	req := interceptRequest("a", "deployment/web")
	req.Attached = true
	ctx, interrupt := context.WithCancel(t.Context())
	answer := r.goPost(ctx, api.PathIntercept, req)
	c := wait(t, r.made, "the connection")
	close(c.connected)
	i := r.begin()
	testenv.Until(t, "it is active", func() bool { s := r.intercepted(); return len(s) == 1 && s[0].State == api.InterceptActive })
	select {
	case got := <-answer:
		t.Fatalf("answered %+v while it is active", got)
	case <-i.ended:
		t.Fatal("it has ended")
	default:
	}
	interrupt()
	wait(t, answer, "the request's end")
	wait(t, i.ended, "the intercept's end")
	wait(t, c.ended, "the end of the connection that was made for it")
	testenv.Until(t, "the helper is closed", r.helper(0).isClosed)

	// An intercept that fails ends the request with its error.
	if err := r.handOver(); err != nil {
		t.Fatal(err)
	}
	answer = r.goPost(t.Context(), api.PathIntercept, req)
	close(wait(t, r.made, "the connection").connected)
	r.begin().end <- api.Errorf(api.ExitWorkload, "gone")
	if e := wait(t, answer, "the answer").last().Error; e == nil || e.Code != api.ExitWorkload {
		t.Errorf("error = %+v, want why it ended", e)
	}
}

// A connection without a daemon leaves no other trace of the cause.
func TestAttachedRequestReportsWhyItsConnectionFailed(t *testing.T) {
	for _, tt := range []struct {
		name string
		req  api.InterceptRequest
	}{{"connection", interceptRequest("a")}, {"intercept", interceptRequest("a", "deployment/web")}} {
		t.Run(tt.name, func(t *testing.T) {
			r := start(t)
			if err := r.handOver(); err != nil {
				t.Fatal(err)
			}
			tt.req.Attached = true
			answer := r.goPost(t.Context(), api.PathIntercept, tt.req)
			c := wait(t, r.made, "the connection")
			close(c.connected)
			if len(tt.req.Workloads) > 0 {
				r.begin()
			}
			c.end <- api.Errorf(api.ExitLost, "the manager is gone")
			if e := wait(t, answer, "the answer").last().Error; e == nil || e.Message != "the manager is gone" {
				t.Errorf("error = %+v, want the connection's", e)
			}
		})
	}
}

func TestAttachedInterceptStaysForOtherRequests(t *testing.T) {
	r := start(t)
	r.connect("a")
	req := interceptRequest("a", "deployment/web")
	req.Attached = true
	ctx, interrupt := context.WithCancel(t.Context())
	answer := r.goPost(ctx, api.PathIntercept, req)
	i := r.begin()
	req.Attached = false
	if got := r.mustPost(api.PathIntercept, req).last(); got.Intercept == nil {
		t.Fatalf("last event = %+v, want the intercept", got)
	}
	interrupt()
	wait(t, answer, "the request's end")
	if wakeup.IsClosed(i.ended) {
		t.Error("it has ended although another command has it")
	}
	wantState(t, r.intercepted(), api.InterceptActive)
}

func TestInterceptsEndBeforeTheirConnection(t *testing.T) {
	for _, tt := range []struct{ name, path string }{{"disconnect", api.PathDisconnect}, {"quit", api.PathQuit}} {
		t.Run(tt.name, func(t *testing.T) {
			r := start(t)
			var i *fakeIntercept
			left := make(chan bool, 1)
			r.onRun = func(ctx context.Context, _ *fakeConnection) error {
				context.AfterFunc(ctx, func() { left <- wakeup.IsClosed(i.ended) })
				return nil
			}
			r.connect("a")
			i = r.intercept(interceptRequest("a", "deployment/web"))
			got := r.mustPost(tt.path, api.DisconnectRequest{All: true})
			if !wait(t, left, "the connection's end") {
				t.Error("the connection was told to end while the intercept had not")
			}
			if len(got.events) != 4 || got.events[1].Step != "Leaving deployment/web" || !got.events[1].Done || !got.last().Done {
				t.Errorf("events = %+v, want leaving, then disconnecting", got.events)
			}
		})
	}
}

func TestLeaveTimesOut(t *testing.T) {
	maker := &rig{t: t, intercepts: make(chan *fakeIntercept, 1)}
	is := newIntercepts(maker, Owner{}, discard())
	is.timeout = 20 * time.Millisecond
	l := &connectionTask{task: newTask("connection", discard(), nil, nil), id: "id-a"}
	req := interceptRequest("a", "deployment/web")
	req.Spec.Container = "slow"
	result := make(chan error, 1)
	go func() { result <- is.begin(t.Context(), l, req, func(api.Event) {}) }()
	i := maker.begin()
	if err := wait(t, result, "the intercept"); err != nil {
		t.Fatal(err)
	}
	err := is.leaveConnections([]string{"id-a"}, func(api.Event) {})
	var e *api.Error
	if !errors.As(err, &e) || !strings.Contains(e.Message, "leaving deployment/web took longer") {
		t.Errorf("leave = %v, want that it took too long", err)
	}
	wantState(t, is.status(), api.InterceptLeaving)
	close(i.hold)
	is.group.Wait()
	if got := is.status(); len(got) != 0 {
		t.Errorf("intercepts = %+v, want none", got)
	}
}

func TestLeaveSelectsByNameNamespaceAndID(t *testing.T) {
	r := start(t)
	r.connect("a")
	r.intercept(interceptRequest("a", "deployment/web"))
	other := interceptRequest("a", "deployment/web")
	other.Connect.Namespace = "shop"
	r.intercept(other)
	id := r.intercepted()[1].ID
	tests := []struct {
		name string
		req  api.LeaveRequest
		code api.ExitCode
		hint string
	}{
		{"unknown", api.LeaveRequest{Workloads: []string{"deployment/api"}}, api.ExitWorkload, "kubevpn status"},
		{"other_kind", api.LeaveRequest{Workloads: []string{"sts/web"}}, api.ExitWorkload, ""},
		{"other_namespace", api.LeaveRequest{Workloads: []string{"deploy/web"}, Namespace: "dev"}, api.ExitWorkload, ""},
		{"ambiguous", api.LeaveRequest{Workloads: []string{"deploy/web"}}, api.ExitUsage, id + " (namespace shop)"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got := r.mustPost(api.PathLeave, tt.req).err
			if got == nil || got.Code != tt.code || !strings.Contains(got.Hint, tt.hint) {
				t.Errorf("error = %+v, want %d, with %q", got, tt.code, tt.hint)
			}
		})
	}
	if n := len(r.intercepted()); n != 2 {
		t.Fatalf("%d intercepts are left, want both", n)
	}
	if got := r.mustPost(api.PathLeave, api.LeaveRequest{Workloads: []string{id}}).last(); !got.Done || got.Intercept.Namespace != "shop" {
		t.Errorf("leaving by ID = %+v", got)
	}
	if got := r.mustPost(api.PathLeave, api.LeaveRequest{Workloads: []string{"deploy/web", "deployment/web"}, Namespace: "default"}); len(got.events) != 2 {
		t.Errorf("leaving by two names = %+v, want it once", got.events)
	}
	if got := r.mustPost(api.PathLeave, api.LeaveRequest{All: true}); len(got.events) != 0 {
		t.Errorf("leaving nothing = %+v, want no event", got.events)
	}
}

func TestSameWorkloadAcceptsNamesOfKubectl(t *testing.T) {
	tests := []struct {
		asked, workload string
		want            bool
	}{
		{"deployment/web", "deployment/web", true},
		{"deploy/web", "deployment/web", true},
		{"Deployments.v1.apps/web", "deployment/web", true},
		{"deployment.apps/web", "deployment/web", true},
		{"deployment/api", "deployment/web", false},
		{"sts/web", "deployment/web", false},
		{"deployments.example.com/web", "deployment/web", false},
		{"rollouts/web", "rollout.argoproj.io/web", true},
		{"rollouts.argoproj.io/web", "rollout.argoproj.io/web", true},
		{"web", "deployment/web", false},
		{"po/web", "pod/web", true},
		{"cronjobs.batch/web", "cronjob/web", true},
		{"cj/web", "cronjob/web", true},
		{"cj.apps/web", "cronjob/web", false},
	}
	for _, tt := range tests {
		t.Run(strings.ReplaceAll(tt.asked, "/", "_"), func(t *testing.T) {
			if got := sameWorkload(tt.asked, tt.workload); got != tt.want {
				t.Errorf("sameWorkload(%s, %s) = %v", tt.asked, tt.workload, got)
			}
		})
	}
}

// A client that ends the body of its request, and not its connection, receives the events of the cleanup.
func TestReleasedRequestReceivesTheCleanup(t *testing.T) {
	for _, tt := range []struct {
		name     string
		attached bool
	}{{"attached", true}, {"not_yet_begun", false}} {
		t.Run(tt.name, func(t *testing.T) {
			r := start(t)
			if err := r.handOver(); err != nil {
				t.Fatal(err)
			}
			req := interceptRequest("a", "deployment/web")
			req.Attached = tt.attached
			text, err := json.Marshal(req)
			if err != nil {
				t.Fatal(err)
			}
			body, letGo := io.Pipe()
			go letGo.Write(text)
			resp, err := r.client.Post("http://daemon"+api.PathIntercept, "application/json", body)
			if err != nil {
				t.Fatal(err)
			}
			defer resp.Body.Close()
			close(wait(t, r.made, "the connection").connected)
			events := json.NewDecoder(resp.Body)
			next := func() (e api.Event) {
				t.Helper()
				if err := events.Decode(&e); err != nil && !errors.Is(err, io.EOF) {
					t.Fatal(err)
				}
				return e
			}
			if tt.attached {
				r.begin()
				for next().Intercept == nil {
				}
			} else {
				wait(t, r.intercepts, "the intercept")
			}
			letGo.Close()
			var steps []string
			for e := next(); !e.Time.IsZero(); e = next() {
				if e.Done {
					steps = append(steps, e.Step)
				}
			}
			if want := []string{"Leaving deployment/web", "Disconnecting from cluster-id-a"}; !slices.Equal(steps, want) {
				t.Errorf("told %q, want %q", steps, want)
			}
			if len(r.intercepted()) != 0 || len(r.status()) != 0 {
				t.Errorf("left: %+v, %+v", r.intercepted(), r.status())
			}
		})
	}
}
