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

	// greetPatience is how long an agent's log is not asked for, because its port may answer before.
	greetPatience = 2 * time.Second
)

// errSpent ends an attempt with an agent that was there, and is about to end or has ended: another one takes its place.
var errSpent = errors.New("the agent that was there ends")

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
	ending   bool        // the agent takes no orders any more
	spent    []string    // containers of agents that were found so
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
		spent := errors.Is(err, errSpent)
		c.set(func() {
			c.link, c.linked, c.proved, c.ending = nil, linkState{}, false, false
			if spent {
				c.step = "the agent is being replaced"
				return
			}
			c.failed = err
			if errors.Is(err, cluster.ErrPodGone) { // that will show
				c.failed, c.step = nil, "the pod has gone"
			}
		})
		if spent {
			c.i.log.Info("another agent is needed", "pod", c.name, "why", err)
			continue
		}
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
	if !agent.sidecar {
		g.Go(func() error { return c.seeEnding(gctx) })
	}
	err = g.Wait()
	if errors.Is(err, errSpent) {
		c.set(func() { c.spent = append(c.spent, agent.container) })
	}
	return err
}

// seeEnding ends the attempt when the agent says that it is about to end.
func (c *cover) seeEnding(ctx context.Context) error {
	if err := c.i.await(ctx, func() bool { return c.ending }); err != nil {
		return err
	}
	return errSpent
}

// add waits for the cover's turn, has our agent in the pod, and gives its container's name. A turn is for the API server's
// sake: the kubelet then takes up to a second to say that the container runs, and that all pods may wait for together.
func (c *cover) add(ctx context.Context) (podAgent, error) {
	select {
	case <-c.allowed:
	case <-c.i.open:
	case <-ctx.Done():
		return podAgent{}, ctx.Err()
	}
	select {
	case c.i.slots <- struct{}{}:
		defer func() { <-c.i.slots }()
	case <-ctx.Done():
		return podAgent{}, ctx.Err()
	}
	c.set(func() { c.step = "the agent is being added" })
	return c.i.ensureAgent(ctx, c.seen(), c.spent)
}

// listen hands over the agent's greetings, until its container ends: the first one from the port where it greets, if that is
// sooner than the log, and all from the log.
func (c *cover) listen(ctx context.Context, agent podAgent, greetings chan<- api.AgentGreeting) error {
	hearing, enough := context.WithCancel(ctx)
	var ear sync.WaitGroup
	defer ear.Wait()
	defer enough()
	if agent.greet != 0 {
		heard := make(chan bool, 1)
		ear.Go(func() { heard <- c.hear(hearing, agent.greet, greetings) })
		if err := c.spareLog(ctx, agent.container, heard); err != nil {
			return err
		}
	}
	return c.followLog(ctx, agent, func(g api.AgentGreeting) {
		enough()
		select {
		case greetings <- g:
		case <-ctx.Done():
		}
	})
}

// spareLog waits until the log has to be followed: nothing was heard, the agent is in trouble, or there is time for it. A log
// is three requests, and with many pods those would go before what the pods' coverage waits for.
func (c *cover) spareLog(ctx context.Context, agent string, heard <-chan bool) error {
	bounded, cancel := context.WithTimeout(ctx, greetPatience)
	defer cancel()
	var trouble sync.WaitGroup
	defer trouble.Wait()
	inTrouble := make(chan struct{})
	trouble.Go(func() {
		if c.i.await(bounded, func() bool { return troubled(c.pod, agent) }) == nil {
			close(inTrouble)
		}
	})
	defer cancel()
	select {
	case ok := <-heard:
		if !ok {
			return ctx.Err()
		}
		select {
		case <-c.i.begun:
		case <-inTrouble:
		case <-bounded.Done():
		}
	case <-inTrouble:
	case <-bounded.Done():
	}
	return ctx.Err()
}

// troubled reports whether the pod's status says that the container has ended, or does not start.
func troubled(p *corev1.Pod, container string) bool {
	for _, s := range p.Status.EphemeralContainerStatuses {
		if s.Name != container {
			continue
		}
		w := s.State.Waiting
		return s.State.Terminated != nil || w != nil && w.Reason != "" && w.Reason != "ContainerCreating" && w.Reason != "PodInitializing"
	}
	return false
}

// hear hands over the greeting that the agent says at its port, and reports whether there was one.
func (c *cover) hear(ctx context.Context, greet uint16, greetings chan<- api.AgentGreeting) bool {
	line, err := c.i.pods.FirstLine(ctx, c.i.cfg.Namespace, c.name, greet)
	if err != nil {
		c.i.log.Debug("the agent's port does not greet", "pod", c.name, "err", err)
		return false
	}
	g, ok := parseGreeting(string(line))
	if !ok || g.Error != nil {
		c.i.log.Warn("the port where the agent greets is somebody else's", "pod", c.name, "port", greet)
		return false
	}
	select {
	case greetings <- g:
		return true
	case <-ctx.Done():
		return false
	}
}

// followLog tells the greetings in the agent's log, until the container ends.
func (c *cover) followLog(ctx context.Context, agent podAgent, greeted func(api.AgentGreeting)) error {
	var refusal error
	err := c.i.pods.FollowLog(ctx, c.i.cfg.Namespace, c.name, agent.container, func(line string) {
		g, ok := parseGreeting(line)
		switch {
		case !ok:
			c.i.log.Debug("the agent says", "pod", c.name, "line", line)
		case g.Error != nil: // it may find a way yet; else it ends
			refusal = fmt.Errorf("the agent in the pod %s: %w", c.name, g.Error)
			c.set(func() { c.failed = refusal })
		default:
			greeted(g)
		}
	})
	if over := (*cluster.ContainerEnded)(nil); errors.As(err, &over) {
		switch {
		case refusal != nil:
			return refusal
		case agent.old:
			return fmt.Errorf("%w: %w", errSpent, err)
		}
		return api.Errorf(api.ExitInject, "the agent in the pod %s has ended, with exit code %d (%s)", c.name, over.ExitCode, over.Reason).
			WithHint("`kubectl -n %s logs %s -c %s` says more.", c.i.cfg.Namespace, c.name, agent.container)
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
	l := &link{claim: c.i.claim, target: c.i.target, serve: c.i.server.accept, log: c.i.log.With("pod", c.name)}
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
	switch {
	case c.linked.refused && api.AsError(c.linked.err).Code == api.ExitLost && !c.i.sidecar():
		c.ending = true
	case c.linked.refused && c.linked.state != nil && !c.waitsForOwn():
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
