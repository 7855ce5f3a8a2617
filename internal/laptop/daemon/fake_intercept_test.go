//go:build linux

package daemon

import (
	"context"
	"strings"
	"sync"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/intercept"
)

// fakeIntercept is ready when the test closes ready, and ends with its context or with an error that the test sends.
type fakeIntercept struct {
	config  intercept.Config
	conn    Connection
	account api.ConnectRequest
	rig     *rig
	ready   chan struct{}
	end     chan error
	ended   chan struct{}
	hold    chan struct{} // if not nil, Run returns no sooner than it is closed

	mu    sync.Mutex
	state api.InterceptState
}

func (i *fakeIntercept) Begun() <-chan struct{} { return i.ready }

func (i *fakeIntercept) Trace(_ context.Context, order api.AgentOrder) api.InterceptTrace {
	return api.InterceptTrace{Workload: i.config.Workload, Pods: []api.PodTrace{{Pod: order.Trace}}}
}

func (i *fakeIntercept) become(state api.InterceptState) {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.state = state
}

func (i *fakeIntercept) Run(ctx context.Context) error {
	defer close(i.ended)
	if i.hold != nil {
		defer func() { <-i.hold }()
	}
	i.config.Progress(api.Event{Step: "Adding the agent to " + i.config.Workload})
	if i.rig.onIntercept != nil {
		if err := i.rig.onIntercept(ctx, i); err != nil {
			return err
		}
	}
	i.rig.intercepts <- i
	select {
	case err := <-i.end:
		return err
	case <-ctx.Done():
		return ctx.Err()
	}
}

func (i *fakeIntercept) Status() api.Intercept {
	i.mu.Lock()
	defer i.mu.Unlock()
	return api.Intercept{
		State: i.state, Mode: api.ModeEphemeral, Match: "everything", Ports: i.config.Spec.Ports, Pods: []api.InterceptedPod{{Name: "web-1", Intercepted: true}},
	}
}

// Requests records one request for POST /NAME of the workload, and then follows.
func (i *fakeIntercept) Requests(ctx context.Context, req api.RequestsRequest, emit func(api.Record)) error {
	emit(api.Record{Exchange: &api.Exchange{Workload: i.config.Workload, Request: api.ExchangeRequest{Method: "POST"}}})
	if req.Follow {
		<-ctx.Done()
	}
	return nil
}

// Workload accepts deployments by two names.
func (r *rig) Workload(_ context.Context, _ api.ConnectRequest, workload string) (string, error) {
	kind, name, _ := strings.Cut(workload, "/")
	if kind != "deploy" && kind != "deployment" {
		return "", api.Errorf(api.ExitWorkload, "the cluster has no resource type %q", kind)
	}
	return "deployment/" + name, nil
}

func (r *rig) NewIntercept(account api.ConnectRequest, c Connection, cfg intercept.Config) (Intercept, error) {
	if cfg.Spec.Container == "nope" {
		return nil, api.Errorf(api.ExitUsage, "no such container")
	}
	i := &fakeIntercept{
		config: cfg, conn: c, account: account, rig: r, ready: make(chan struct{}), end: make(chan error, 1), ended: make(chan struct{}), state: api.InterceptStarting,
	}
	if cfg.Spec.Container == "slow" {
		i.hold = make(chan struct{})
	}
	return i, nil
}

// intercept makes an intercept on an existing connection.
func (r *rig) intercept(req api.InterceptRequest) *fakeIntercept {
	r.t.Helper()
	answer := r.goPost(r.t.Context(), api.PathIntercept, req)
	i := r.begin()
	if got := wait(r.t, answer, "the answer").last(); got.Intercept == nil || got.Intercept.State != api.InterceptActive {
		r.t.Fatalf("last event = %+v, want an intercept that is active", got)
	}
	return i
}

// begin waits until an intercept runs, and makes it ready.
func (r *rig) begin() *fakeIntercept {
	r.t.Helper()
	i := wait(r.t, r.intercepts, "the intercept")
	i.become(api.InterceptActive)
	close(i.ready)
	return i
}

func interceptRequest(connection string, workloads ...string) api.InterceptRequest {
	return api.InterceptRequest{Connect: request(connection), Workloads: workloads}
}

func (r *rig) intercepted() []api.Intercept { return fetch[api.Status](r, api.PathStatus).Intercepts }

func wantState(t *testing.T, got []api.Intercept, want api.InterceptState) {
	t.Helper()
	if len(got) != 1 || got[0].State != want {
		t.Errorf("intercepts = %+v, want one that is %s", got, want)
	}
}
