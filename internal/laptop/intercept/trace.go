package intercept

import (
	"cmp"
	"context"
	"slices"
	"sync"

	"kubevpn/internal/api"
)

// maxTracedPods limits the pods whose agents Trace asks.
const maxTracedPods = 50

// Trace announces a trace ID to the agents of the pods, and returns the requests of that trace.
func (i *Intercept) Trace(ctx context.Context, order api.AgentOrder) api.InterceptTrace {
	var asking sync.WaitGroup
	i.mu.Lock()
	s, pods := i.status, i.sorted()
	t := api.InterceptTrace{
		Namespace: s.Namespace, Workload: s.Workload, Match: i.claim.Match, Mirror: s.Mirror, Clone: i.cfg.Clone,
		Ports: slices.Clone(s.Ports), Pods: make([]api.PodTrace, len(pods)),
		Changes: slices.Clone(i.now.changes),
	}
	for n, c := range pods {
		p, l := &t.Pods[n], c.session
		if p.Pod = c.name; !c.active() || n >= maxTracedPods {
			p.Reason = cmp.Or(c.reason(), "it is not intercepted")
			continue
		}
		asking.Go(func() {
			answer, err := l.order(ctx, order)
			if p.Trace = answer.Trace; err != nil {
				p.Error = err.Error()
			} else if p.Trace == nil {
				p.Error = "its answer has no trace"
			}
		})
	}
	i.mu.Unlock()
	if i.shortens() && s.State == api.InterceptActive && !i.records.options.Load().on {
		t.Shortcuts = i.ownAddresses()
	}
	asking.Wait()
	return t
}
