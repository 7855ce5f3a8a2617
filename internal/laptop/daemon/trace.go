package daemon

import (
	"context"
	"sync"
	"time"

	"kubevpn/internal/api"
)

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
