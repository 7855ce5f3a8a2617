package intercept

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

const (
	retryMin = 500 * time.Millisecond // after a step that failed
	retryMax = 30 * time.Second

	releaseTimeout = 2 * time.Second // of a claim that turned out to take nothing
)

// cover is one pod of the workload; the package comment draws its states.
type cover struct {
	i       *Intercept
	name    string
	cancel  context.CancelFunc
	allowed chan struct{} // closed: it may go before the others

	// Guarded by i.mu.
	pod      *corev1.Pod // as it was seen last
	step     string      // what it waits for
	failed   error       // why it is not covered, of the last attempt
	link     *link       // to the primary; nil: none
	linked   linkState   // what is known of link
	proved   bool        // a canary came
	requests counter
}

func newCover(i *Intercept, p *corev1.Pod, cancel context.CancelFunc) *cover {
	return &cover{i: i, name: p.Name, cancel: cancel, allowed: make(chan struct{}), pod: p}
}

// counter adds up what several agents of one pod have counted, one after the other, each from nothing.
type counter struct{ before, now uint64 }

func (c *counter) see(n uint64) {
	if n < c.now {
		c.before += c.now
	}
	c.now = n
}

func (c *counter) total() uint64 { return c.before + c.now }

// set changes what is guarded by i.mu.
func (c *cover) set(change func()) {
	c.i.mu.Lock()
	defer c.i.mu.Unlock()
	change()
	c.i.move()
}

// seen is the pod as it was seen last.
func (c *cover) seen() *corev1.Pod {
	c.i.mu.Lock()
	defer c.i.mu.Unlock()
	return c.pod
}

// runs reports whether the pod has a network; i.mu is held.
func (c *cover) runs() bool { return c.pod.Status.PodIP != "" && c.pod.DeletionTimestamp == nil }

// placed reports whether an agent can be added: the pod has a node. An agent that was added before the pod runs starts right
// after the application, and is seldom later than its readiness; one that is added afterwards waits for the kubelet twice,
// up to a second each time. i.mu is held.
func (c *cover) placed() bool {
	if c.pod.Spec.NodeName == "" || c.pod.DeletionTimestamp != nil {
		return false
	}
	return !c.i.sidecar() || sidecarOf(c.pod, c.i.identity.hash) != ""
}

// covered reports whether matching requests of the pod come here; i.mu is held.
func (c *cover) covered() bool { return c.proved && c.linked.claimed && c.linked.attached }

// reason is why the pod is not covered; i.mu is held.
func (c *cover) reason() string {
	switch {
	case c.covered():
		return ""
	case c.failed != nil:
		return c.failed.Error()
	case c.link != nil && c.linked.err != nil:
		return c.step + ": " + c.linked.err.Error()
	case c.link == nil && c.i.sidecar() && c.runs() && !c.placed():
		return "it is of before the agent came into the template"
	case c.link == nil && !c.placed():
		return "it does not run"
	}
	return c.step
}

// run covers the pod until ctx ends.
func (c *cover) run(ctx context.Context) {
	wait := retryMin
	for {
		began := time.Now()
		err := c.attempt(ctx)
		if ctx.Err() != nil {
			return
		}
		c.set(func() {
			c.failed, c.link, c.linked, c.proved = err, nil, linkState{}, false
			if errors.Is(err, cluster.ErrPodGone) { // that will show
				c.failed, c.step = nil, "the pod has gone"
			}
		})
		c.i.log.Warn("a pod is not covered", "pod", c.name, "err", err, "again", wait)
		if time.Since(began) > retryMax {
			wait = retryMin // it was covered, or tried hard
		}
		pause(ctx, wait)
		wait = min(2*wait, retryMax)
	}
}

// attempt goes through the steps, and returns when one fails, the agent ends, or ctx does.
func (c *cover) attempt(ctx context.Context) error {
	c.set(func() { c.step = "waits for its turn" })
	if err := c.i.await(ctx, func() bool { return c.i.status.ModeReason != "" && c.placed() }); err != nil {
		return err
	}
	agent, err := c.add(ctx)
	if err != nil {
		return err
	}
	c.set(func() { c.step = "the agent starts" })
	greetings := make(chan api.AgentGreeting)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.listen(gctx, agent, greetings) })
	g.Go(func() error { return c.keepLinked(gctx, greetings) })
	g.Go(func() error { return c.prove(gctx) })
	return g.Wait()
}

// add waits for the cover's turn, has our agent in the pod, and gives its container's name. A turn is for the API server's
// sake: the kubelet then takes up to a second to say that the container runs, and that all pods may wait for together.
func (c *cover) add(ctx context.Context) (agent string, err error) {
	select {
	case <-c.allowed:
	case <-c.i.open:
	case <-ctx.Done():
		return "", ctx.Err()
	}
	select {
	case c.i.slots <- struct{}{}:
		defer func() { <-c.i.slots }()
	case <-ctx.Done():
		return "", ctx.Err()
	}
	c.set(func() { c.step = "the agent is being added" })
	return c.i.ensureAgent(ctx, c.seen())
}

// listen hands over the greetings in the agent's log, until the container ends.
func (c *cover) listen(ctx context.Context, agent string, greetings chan<- api.AgentGreeting) error {
	var refusal error
	err := c.i.pods.FollowLog(ctx, c.i.cfg.Namespace, c.name, agent, func(line string) {
		g, ok := parseGreeting(line)
		if !ok {
			c.i.log.Debug("the agent says", "pod", c.name, "line", line)
			return
		}
		if g.Error != nil { // it may find a way yet; else it ends
			refusal = fmt.Errorf("the agent in the pod %s: %w", c.name, g.Error)
			c.set(func() { c.failed = refusal })
			return
		}
		select {
		case greetings <- g:
		case <-ctx.Done():
		}
	})
	if over := (*cluster.ContainerEnded)(nil); errors.As(err, &over) {
		if refusal != nil {
			return refusal
		}
		return api.Errorf(api.ExitInject, "the agent in the pod %s has ended, with exit code %d (%s)", c.name, over.ExitCode, over.Reason).
			WithHint("`kubectl -n %s logs %s -c %s` says more.", c.i.cfg.Namespace, c.name, agent)
	}
	return err
}

// keepLinked keeps a link to the primary agent of the pod, which is another one whenever there is another greeting.
func (c *cover) keepLinked(ctx context.Context, greetings <-chan api.AgentGreeting) error {
	var links sync.WaitGroup
	defer links.Wait()
	var now api.AgentGreeting
	stop := func() {}
	defer func() { stop() }()
	for {
		select {
		case g := <-greetings:
			switch {
			case g.Protocol != api.Protocol:
				return api.Errorf(api.ExitIncompatible, "the agent in the pod %s (%s) speaks protocol %d, this kubevpn speaks %d", c.name, g.Version, g.Protocol, api.Protocol).
					WithHint("`kubevpn connect --upgrade` brings the traffic manager, and agents with it, to this version.")
			case g.Key == now.Key && g.Port == now.Port:
				continue
			}
			now = g
			stop() // it takes a second where nobody answers; the new link does not wait
			linkCtx, cancel := context.WithCancel(ctx)
			stop = cancel
			l := c.newLink(g)
			links.Go(func() {
				if err := l.run(linkCtx); err != nil {
					c.i.log.Error("the link to an agent", "pod", c.name, "err", err)
				}
			})
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// newLink makes the link to the agent that the greeting names, and takes it for the cover's.
func (c *cover) newLink(g api.AgentGreeting) *link {
	config := c.i.identity.towards(g.Key)
	l := &link{claim: c.i.claim, serve: c.i.server.accept, log: c.i.log.With("pod", c.name)}
	l.dial = func(ctx context.Context) (net.Conn, error) {
		return carrier(ctx, config, func(ctx context.Context) (net.Conn, error) {
			to, err := c.address(g.Port)
			if err != nil {
				return nil, err
			}
			return c.i.cfg.Session.Dial(ctx, "tcp", to)
		}, func(ctx context.Context) (net.Conn, error) {
			return c.i.pods.DialPod(ctx, c.i.cfg.Namespace, c.name, g.Port)
		})
	}
	l.change = func(change func(*linkState)) {
		c.set(func() {
			if c.link == l {
				change(&c.linked)
				c.learn()
			}
		})
	}
	c.set(func() { c.link, c.linked, c.step = l, linkState{}, "the agent is being reached" })
	return l
}

// address is a port of the pod.
func (c *cover) address(port uint16) (netip.AddrPort, error) {
	addr, err := netip.ParseAddr(c.seen().Status.PodIP)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("the address of the pod %s: %w", c.name, err)
	}
	return netip.AddrPortFrom(addr, port), nil
}

// learn takes what the link says; i.mu is held.
func (c *cover) learn() {
	if c.covered() {
		c.failed = nil
	}
	// It is claimed again and again. What the agent has is told apart from its answer, and may come later.
	if c.linked.refused && c.linked.state != nil && !c.waitsForOwn() {
		c.failed = c.linked.err
	}
	c.linked.refused = false
	if c.linked.reset != nil {
		select {
		case c.i.reset <- c.linked.reset:
		default: // one is enough
		}
	}
	if mine := c.mine(); mine != nil {
		c.requests.see(mine.Requests)
	}
}

// mine is the claim as the agent has it, or nil; i.mu is held.
func (c *cover) mine() *api.Claim {
	if c.linked.state == nil {
		return nil
	}
	for n := range c.linked.state.Claims {
		if claim := &c.linked.state.Claims[n]; claim.Mine && claim.ID == c.i.claim.ID {
			return claim
		}
	}
	return nil
}

// waitsForOwn reports whether the claim is refused while one of the same user's on the same machine is being held, which
// has ended without leaving: that is for a minute at most. i.mu is held.
func (c *cover) waitsForOwn() bool {
	if c.linked.claimed || c.linked.state == nil || api.AsError(c.linked.err) == nil || api.AsError(c.linked.err).Code != api.ExitConflict {
		return false
	}
	for _, claim := range c.linked.state.Claims {
		if !claim.Mine && claim.Away && claim.Owner == c.i.cfg.Owner {
			return true
		}
	}
	return false
}

// prove waits until the pod's requests are claimed, and sees whether they come. Where they do not, it takes the claim back.
func (c *cover) prove(ctx context.Context) error {
	if err := c.i.await(ctx, func() bool { return c.linked.claimed && c.linked.attached && c.runs() }); err != nil {
		return err
	}
	if err := c.i.provePod(ctx, c); err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		bounded, cancel := context.WithTimeout(ctx, releaseTimeout)
		defer cancel()
		c.release(bounded)
		return err
	}
	c.set(func() { c.proved, c.failed, c.step = true, nil, "the agent does not answer" })
	return nil
}

// release has the agent let go of the claim, or ends the attempt to get one.
func (c *cover) release(ctx context.Context) {
	c.i.mu.Lock()
	l := c.link
	c.i.mu.Unlock()
	if l == nil {
		c.cancel()
		return
	}
	if err := l.release(ctx); err != nil {
		c.i.log.Warn("leaving a pod; its agent lets go by itself", "pod", c.name, "err", err)
	}
}
