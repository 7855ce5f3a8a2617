package daemon

import (
	"context"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
)

// requests emits what is recorded of the requests of the intercepts that req names. It returns an error if one ends
// before ctx does.
func (is *intercepts) requests(ctx context.Context, req api.RequestsRequest, emit func(api.Record)) error {
	found, err := is.named(api.LeaveRequest{
		Connection: req.Connection, Namespace: req.Namespace, Workloads: []string{req.Workload},
	})
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	for _, t := range found { // two if both this machine and a clone are targets
		g.Go(func() error {
			ctx, cancel := context.WithCancel(ctx)
			defer cancel()
			defer context.AfterFunc(t.over, cancel)()
			err := t.intercept.Requests(ctx, req, emit)
			if err == nil && req.Follow && t.isOver() {
				return api.Errorf(api.ExitLost, "the intercept of %s ended", t.key.workload).
					WithHint("`kubevpn status` shows the intercepts of this machine")
			}
			return err
		})
	}
	return g.Wait()
}

// traceTimeout limits the wait for agents.
const traceTimeout = time.Second

// trace asks the agents of all intercepts for what they noted of a trace ID.
func (is *intercepts) trace(ctx context.Context, req api.TraceRequest) ([]api.InterceptTrace, error) {
	ctx, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	all := is.filter(func(*interceptTask) bool { return true })
	traces := make([]api.InterceptTrace, len(all))
	var asking sync.WaitGroup
	for n, t := range all {
		asking.Go(func() {
			i := t.intercept.Trace(ctx, req.Trace)
			i.Connection, i.Namespace, i.Workload = t.key.connection, t.key.namespace, t.key.workload
			traces[n] = i
		})
	}
	asking.Wait()
	return traces, nil
}
