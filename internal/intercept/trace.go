package intercept

import (
	"context"
	"slices"
	"sync"

	"kubevpn/internal/api"
)

// maxTracedPods limits the pods whose agents Trace asks.
const maxTracedPods = 50

// Trace announces a trace ID to the agents of the pods, and returns the requests of that trace.
func (i *Intercept) Trace(ctx context.Context, id string) api.InterceptTrace {
	i.mu.Lock()
	s := i.status
	t := api.InterceptTrace{
		Namespace: s.Namespace, Workload: s.Workload, Match: i.claim.Match, Mirror: s.Mirror,
		Clone: i.cfg.Clone, Ports: slices.Clone(s.Ports), Pods: []api.PodTrace{},
	}
	var links []*link
	for _, c := range i.sorted() {
		p := api.PodTrace{Pod: c.name}
		var l *link
		if c.active() && len(t.Pods) < maxTracedPods {
			l = c.link
		} else if p.Reason = c.reason(); p.Reason == "" {
			p.Reason = "it is not intercepted"
		}
		t.Pods, links = append(t.Pods, p), append(links, l)
	}
	i.mu.Unlock()
	var asking sync.WaitGroup
	for n, l := range links {
		if l == nil {
			continue
		}
		asking.Go(func() {
			p := &t.Pods[n]
			var err error
			switch p.Trace, err = l.trace(ctx, id); {
			case err != nil:
				p.Error = err.Error()
			case p.Trace == nil:
				p.Error = "its answer has no trace"
			}
		})
	}
	asking.Wait()
	return t
}
