package daemon

import (
	"context"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// traceTimeout limits the wait for agents.
const traceTimeout = time.Second

// trace asks the agents of all intercepts for what they noted of a trace ID.
func (is *intercepts) trace(ctx context.Context, req api.TraceRequest) ([]api.InterceptTrace, error) {
	ctx, cancel := context.WithTimeout(ctx, traceTimeout)
	defer cancel()
	all := is.filter(func(*interceptTask) bool { return true })
	order := api.AgentOrder{Trace: req.Trace}
	for _, t := range all {
		order.Wanted = append(order.Wanted, t.spec.Match)
	}
	return wakeup.All(all, func(t *interceptTask) api.InterceptTrace {
		i := t.intercept.Trace(ctx, order)
		i.Connection, i.Namespace, i.Workload = t.key.connection, t.key.namespace, t.key.workload
		return i
	}), nil
}
