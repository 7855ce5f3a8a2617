package daemon

import (
	"context"
	"net/http"
	"sync"
	"time"

	"kubevpn/internal/api"
)

// traceTimeout limits the wait for agents.
const traceTimeout = time.Second

func (d *daemon) handleTrace(w http.ResponseWriter, r *http.Request) {
	var req api.TraceRequest
	if !d.read(w, r, &req) {
		return
	}
	ctx, cancel := context.WithTimeout(r.Context(), traceTimeout)
	defer cancel()
	d.answer(w, http.StatusOK, d.connections.intercepts.trace(ctx, req.Trace))
}

// trace asks the agents of all intercepts for what they noted of a trace ID.
func (is *intercepts) trace(ctx context.Context, id string) []api.InterceptTrace {
	all := is.filter(func(*interceptTask) bool { return true })
	traces := make([]api.InterceptTrace, len(all))
	var asking sync.WaitGroup
	for n, t := range all {
		asking.Go(func() {
			i := t.intercept.Trace(ctx, id)
			i.Connection, i.Namespace, i.Workload = t.key.connection, t.key.namespace, t.key.workload
			traces[n] = i
		})
	}
	asking.Wait()
	return traces
}
