package daemon

import (
	"context"

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
