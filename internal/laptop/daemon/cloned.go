package daemon

import (
	"context"
	"errors"
	"net/netip"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/clone"
	"kubevpn/internal/laptop/intercept"
)

// cloned is an Intercept whose requests go to a clone:
//
//	clone ── a pod is ready ─▶ intercept ─▶ begun
//	  ▲                           │ ctx ends, or either fails
//	  └── deleted ◀── left ◀──────┘
type cloned struct {
	clone     *clone.Clone
	intercept *intercept.Intercept // nil: the clone receives no requests
}

// exposes reports whether the clone is no copy, but the pod of the intercept.
func (c *cloned) exposes() bool { return c.intercept != nil && c.intercept.Exposes() }

// Begun is that of the intercept, which Run runs once the clone has begun.
func (c *cloned) Begun() <-chan struct{} {
	if c.intercept == nil {
		return c.clone.Begun()
	}
	return c.intercept.Begun()
}

func (c *cloned) Status() api.Intercept {
	var s api.Intercept
	if c.intercept != nil {
		s = c.intercept.Status()
	} else {
		s.Match = "nothing"
	}
	made := c.clone.Status()
	s.Clone = &made
	if c.exposes() {
		s.Clone, s.Exposed = nil, made.Host
	}
	if c.intercept == nil || s.State == api.InterceptStarting {
		s.State = map[api.CloneState]api.InterceptState{
			api.CloneStarting: api.InterceptStarting, api.CloneRunning: api.InterceptActive,
			api.CloneWaiting: api.InterceptWaiting,
			api.CloneDone:    api.InterceptWaiting,
			api.CloneLeaving: api.InterceptLeaving, api.CloneFailed: api.InterceptFailed,
		}[made.State]
		if c.intercept != nil && s.State == api.InterceptActive {
			s.State = api.InterceptStarting
		}
	}
	if made.LastError != "" {
		s.LastError = made.LastError
	}
	return s
}

func (c *cloned) Requests(ctx context.Context, req api.RequestsRequest, emit func(api.Record)) error {
	if c.intercept == nil {
		return api.Errorf(api.ExitWorkload, "the clone of %s receives no requests", req.Workload)
	}
	return c.intercept.Requests(ctx, req, emit)
}

func (c *cloned) Trace(ctx context.Context, order api.AgentOrder) api.InterceptTrace {
	if c.intercept == nil {
		return api.InterceptTrace{Clone: true, Pods: []api.PodTrace{}}
	}
	return c.intercept.Trace(ctx, order)
}

// onPods sends the addresses of the clone's ready pods to the agents.
func (c *cloned) onPods(pods []api.ClonePod) {
	if c.intercept == nil {
		return
	}
	var ready []netip.Addr
	for _, p := range pods {
		if ip, err := netip.ParseAddr(p.IP); err == nil && p.Ready {
			ready = append(ready, ip)
		}
	}
	c.intercept.SetClone(ready)
}

// Run ends the intercept before the clone, so that no request goes to a pod that is being deleted.
func (c *cloned) Run(ctx context.Context) error {
	g, gctx := errgroup.WithContext(ctx)
	cloneCtx, end := context.WithCancel(context.WithoutCancel(ctx))
	defer end()
	g.Go(func() error {
		err := c.clone.Run(cloneCtx)
		if err == nil && cloneCtx.Err() == nil {
			err = errors.New("the clone ended")
		}
		return err
	})
	g.Go(func() error {
		defer end()
		select {
		case <-c.clone.Begun():
		case <-gctx.Done():
			return nil
		}
		if c.intercept == nil {
			<-gctx.Done()
			return nil
		}
		return c.intercept.Run(gctx)
	})
	return g.Wait()
}
