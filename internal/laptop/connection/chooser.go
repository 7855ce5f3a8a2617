package connection

import (
	"context"
	"errors"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/pkg/wakeup"
)

// gatewayGrace limits the absence of a gateway while its pod stays: the gateway reconnects to a manager that has
// restarted in the pod.
const gatewayGrace = 5 * time.Second

// chooser chooses the netstack, and keeps the gateway that the system netstack needs.
//
//	look ─▶ choose ─▶ gateway wanted? ─▶ obtain ─▶ adopt ─▶ watch: gateway gone?
//	                                                 ▲          │ --netstack system: obtain
//	                              the checks fail ───┘          ▼ auto: adopt gvisor
type chooser struct {
	*shared
	manager *manager
	looked  wakeup.Value[*looked] // nil until look has ended
	facts   facts                 // used by establish, then by watch

	// Tests replace these functions.
	image       func(context.Context) (string, error) // of a gateway that is added
	mayAdd, add func(context.Context, install.GatewayOptions) error
}

func newChooser(s *shared, m *manager) *chooser {
	return &chooser{
		shared: s, manager: m, image: m.Image,
		mayAdd: func(ctx context.Context, o install.GatewayOptions) error {
			return install.MayAddGateway(ctx, s.cluster, o)
		},
		add: func(ctx context.Context, o install.GatewayOptions) error {
			return install.AddGateway(ctx, s.cluster, o)
		},
	}
}

// looked is what look found.
type looked struct {
	proxy   client.KubeProxy
	pod     string // in which a gateway could be added; empty: look did not ask
	refusal error  // why it may not be added there; nil: it may
}

// look finds out how ClusterIPs are served and, if the choice depends on it, whether the traffic manager's pod may have
// a gateway. It runs while the session opens. A choice that the user has made does not wait for it.
func (c *chooser) look(ctx context.Context, proxy func(ctx context.Context, node string) client.KubeProxy) {
	at := c.manager.location.Load()
	l := &looked{proxy: proxy(ctx, at.node)}
	f := facts{Asked: c.cfg.netstack(), Proxy: l.proxy}
	if f.Asked == api.NetstackAuto && f.asksGateway() {
		l.pod, l.refusal = at.pod, c.mayAdd(ctx, c.gatewayIn(at.pod))
	}
	c.status.change(func(r *report) { r.shown.ProxyMode = string(l.proxy.Mode) })
	c.looked.Update(func(now **looked) { *now = l })
	c.changed.Raise() // the status describes how Services are reached
}

// awaitLook returns what look found.
func (c *chooser) awaitLook(ctx context.Context) (*looked, error) {
	return c.looked.Await(ctx, func(l *looked) bool { return l != nil })
}

// choose chooses the netstack, and obtains the gateway if that netstack may need one.
func (c *chooser) choose(ctx context.Context) error {
	done := c.status.step("Choosing the netstack")
	f := facts{Asked: c.cfg.netstack()}
	if f.Asked == api.NetstackAuto {
		l, err := c.awaitLook(ctx)
		if err != nil {
			return err
		}
		f.Proxy = l.proxy.Proven(c.view.Load().state.NodeServes, c.manager.location.Load().node)
		c.status.change(func(r *report) { r.shown.ProxyMode = string(f.Proxy.Mode) })
	}
	if v := c.view.Load(); f.asksGateway() && v.state.GVisorOnly {
		f.Refusal = api.Errorf(api.ExitNetstack, "the traffic manager limits what laptops reach")
	} else if f.asksGateway() {
		if err := c.obtain(ctx); err != nil {
			if ctx.Err() != nil {
				return ctx.Err()
			}
			f.Refusal = c.cluster.Explain(err)
		}
	}
	c.facts = f
	d := choose(f)
	if d.Err != nil {
		return d.Err
	}
	if c.via != nil {
		d.Reason = "connections leave through a pod"
	}
	c.adopt(d)
	done("%s: %s", d.Netstack, d.Reason)
	return nil
}

// adopt puts a decision into effect for packets. The caller has routes apply its addresses and MTU.
func (c *chooser) adopt(d decision) {
	c.packets.steer(func(s *steering) { s.system = d.Netstack == api.NetstackSystem })
	if d.Netstack != api.NetstackSystem {
		c.hosts.endWhole()
	}
	c.status.change(func(r *report) { r.shown.Netstack, r.shown.NetstackReason = d.Netstack, d.Reason })
}

// obtain returns when the traffic manager has a gateway that serves this laptop. With --netstack system, it relabels a
// namespace that kubevpn created and whose pod security rejects the gateway. Otherwise it never changes the namespace.
func (c *chooser) obtain(ctx context.Context) error {
	v := c.view.Load()
	if v.gatewayServes() || v.state.Gateway != nil && c.awaitGateway(ctx) { // it is about to learn of the lease
		return nil
	}
	o := c.gatewayIn(c.view.Load().pod())
	if !o.Relabel {
		if err := c.may(ctx, o); err != nil {
			return err
		}
	}
	image, err := c.image(ctx)
	if err != nil {
		return err
	}
	ready := make(chan struct{})
	o.Image, o.Ready = image, ready
	defer wakeup.Go(ctx, func(ctx context.Context) {
		if _, err := c.view.Await(ctx, view.gatewayServes); err == nil {
			close(ready)
		}
	})()
	return c.add(ctx, o)
}

// gatewayIn returns the options for a gateway in the pod.
func (c *chooser) gatewayIn(pod string) install.GatewayOptions {
	at := c.manager.location.Load()
	return install.GatewayOptions{
		Namespace: at.namespace, Pod: pod, Image: at.trusted.Image, Relabel: c.cfg.netstack() == api.NetstackSystem,
		Progress: c.cfg.Progress,
	}
}

// may returns nil if a gateway may be added. It uses the answer that look got, unless another pod has greeted this
// laptop since.
func (c *chooser) may(ctx context.Context, o install.GatewayOptions) error {
	if l := c.looked.Load(); l != nil && l.pod == o.Pod {
		return l.refusal
	}
	return c.mayAdd(ctx, o)
}

// awaitGateway reports whether the gateway serves this laptop within gatewayGrace.
func (c *chooser) awaitGateway(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, gatewayGrace)
	defer cancel()
	_, err := c.view.Await(ctx, view.gatewayServes)
	return err == nil
}

// watch keeps the system netstack working until ctx ends or the connection uses gvisor. A manager in a new pod has no
// gateway: with --netstack system, watch adds one there; otherwise the connection continues with gvisor.
func (c *chooser) watch(ctx context.Context) error {
	for c.status.netstack() == api.NetstackSystem {
		v, err := c.view.Await(ctx, func(v view) bool { return !v.gatewayServes() })
		if err != nil {
			return err
		}
		if v.pod() == v.gatewayPod && c.awaitGateway(ctx) {
			continue
		}
		if ctx.Err() != nil {
			return ctx.Err()
		}
		if err := c.replace(ctx); err != nil {
			return err
		}
	}
	return nil
}

// replace obtains another gateway, or changes to gvisor. Its error ends the connection.
func (c *chooser) replace(ctx context.Context) error {
	f := c.facts
	if c.cfg.netstack() != api.NetstackSystem {
		f.Refusal = api.Errorf(api.ExitNetstack, "the gateway in the traffic manager's pod is gone")
		d := choose(f)
		c.adopt(d)
		c.status.warn("the netstack is now " + d.Netstack + ": " + f.Refusal.Message)
		c.changed.Raise()
		return nil
	}
	pod := c.view.Load().pod()
	c.log.Warn("the gateway is gone; adding another", "pod", pod)
	err := c.obtain(ctx)
	if err == nil || ctx.Err() != nil {
		return ctx.Err()
	}
	if errors.Is(err, install.ErrPodGone) {
		c.log.Info("waiting for the pod's replacement", "err", err)
		_, err := c.view.Await(ctx, func(v view) bool { return v.pod() != pod })
		return err
	}
	f.Refusal = c.cluster.Explain(err)
	return choose(f).Err
}
