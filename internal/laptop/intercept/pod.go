package intercept

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

const (
	retryMin = 500 * time.Millisecond // after a step that failed
	retryMax = 30 * time.Second

	releaseTimeout = 2 * time.Second // for a claim whose probe did not arrive
)

// errReplaced ends an attempt with an existing agent that is about to end or has ended. The next attempt adds another
// agent.
var errReplaced = errors.New("the existing agent is ending")

// phase is the progress of an attempt to intercept one pod.
type phase int

const (
	waiting  phase = iota // The pod waits for its turn, and for a node.
	adding                // The API server adds the agent's container.
	starting              // The agent has not reported its port and key yet.
	linking               // The laptop connects to the agent, claims and sends a probe.
	// A probe has arrived: requests come here while the session is attached and the agent has the claim.
	verified
	replacing // The agent rejects orders because it is ending; the next attempt adds another one.
	gone      // The pod no longer exists.
)

// String is the reason why the pod's requests do not come here.
func (p phase) String() string {
	return [...]string{"waiting for its turn", "adding the agent", "the agent is starting", "connecting to the agent",
		"the agent does not answer", "replacing the agent", "the pod no longer exists"}[p]
}

// podIntercept intercepts one pod. It makes one attempt after the other:
//
//	            add      attempt   newSession  verify
//	┌─▶ waiting ───▶ adding ───▶ starting ───▶ linking ───▶ verified    only now requests come here
//	│                               │             │            │
//	│                               │             │            ├─ newSession: another agent is the leader; still verified
//	│                               │             │            │
//	├── replacing ◀─────────────────┴─────────────┴────────────┤        applyLinkState, ended: an existing agent is ending
//	│                                                          │
//	└── a backoff ◀────────────────────────────────────────────┘        ended, in any phase: a step failed, or the agent ended
//
// run makes the attempts. In one attempt, listen reads the AgentInfo, keepLinked keeps a session with the leader,
// verify sends the probes, and one more waits for the end of the agent. They end together.
type podIntercept struct {
	i      *Intercept
	name   string
	cancel context.CancelFunc

	// Guarded by i.mu.
	allowed  bool        // it may be intercepted before the others
	pod      *corev1.Pod // the latest version
	phase    phase
	failed   error         // why it failed last
	failures int           // how often, since it was intercepted
	session  *agentSession // to the leader; nil: none
	linked   sessionState  // the state of session
	carries  *podSession   // of flows of a Via; nil: not now
	replaced []string      // containers of agents that are ending
	requests counter
}

// counter adds up the counts of a pod's consecutive agents. Each agent counts from zero.
type counter struct{ before, now uint64 }

func (c *counter) observe(n uint64) {
	if n < c.now {
		c.before += c.now
	}
	c.now = n
}

func (c *counter) total() uint64 { return c.before + c.now }

// latest returns the latest version of the pod.
func (c *podIntercept) latest() *corev1.Pod {
	c.i.mu.Lock()
	defer c.i.mu.Unlock()
	return c.pod
}

// runs reports whether the pod has an address and is not being deleted. The caller holds i.mu.
func (c *podIntercept) runs() bool { return c.pod.Status.PodIP != "" && c.pod.DeletionTimestamp == nil }

// placed reports whether the pod has a node, so that an agent can be added. An agent that is added before the pod runs
// starts right after the application, usually before the application is ready. One that is added later waits for the
// kubelet twice, up to a second each time. In sidecar mode, placed reports whether the pod has the agent. The caller
// holds i.mu.
func (c *podIntercept) placed() bool {
	if c.pod.Spec.NodeName == "" || c.pod.DeletionTimestamp != nil {
		return false
	}
	return c.i.rollout == nil || sidecarOf(c.pod, c.i.identity.hash) != ""
}

// active reports whether matching requests of the pod come here. The caller holds i.mu.
func (c *podIntercept) active() bool {
	return c.phase == verified && c.linked.claimed && c.linked.attached
}

// reason returns why the pod's requests do not come here, or "". The caller holds i.mu.
func (c *podIntercept) reason() string {
	switch {
	case c.active():
		return ""
	case c.failed != nil:
		return c.failed.Error()
	case c.linked.claimed && c.linked.away:
		return "no pod of the clone is ready"
	case c.session != nil && c.linked.err != nil:
		return c.phase.String() + ": " + c.linked.err.Error()
	case c.session == nil && c.i.rollout != nil && c.runs() && !c.placed() && c.i.rollout.created(c.pod, c.i.allPods()):
		return "the pod was created without the agent: an admission webhook or policy has removed it"
	case c.session == nil && c.i.rollout != nil && c.runs() && !c.placed():
		return "the pod predates the sidecar; waiting for its replacement"
	case c.session == nil && !c.placed():
		return "the pod is not running"
	}
	return c.phase.String()
}

// run intercepts the pod until ctx ends.
func (c *podIntercept) run(ctx context.Context) {
	wait := retryMin
	for {
		began := time.Now()
		err := c.attempt(ctx)
		if ctx.Err() != nil {
			return
		}
		c.ended(err)
		if errors.Is(err, errReplaced) {
			c.i.log.Info("adding another agent", "pod", c.name, "cause", err)
			continue
		}
		c.i.log.Warn("a pod is not intercepted", "pod", c.name, "err", err, "retryAfter", wait)
		if time.Since(began) > retryMax {
			wait = retryMin // the attempt was not a quick failure
		}
		wakeup.Pause(ctx, wait)
		wait = min(2*wait, retryMax)
	}
}

// fails records a failure. The error that an agent has told also ends the attempt, and counts once. The caller holds
// i.mu.
func (c *podIntercept) fails(err error) {
	if !errors.Is(err, c.failed) {
		c.failures++
	}
	c.failed = err
}

// failsAgain reports whether waiting for the next attempt does not help: one failure may pass, such as that of a node
// whose kubelet restarts. The caller holds i.mu.
func (c *podIntercept) failsAgain() bool {
	return c.failed != nil && (c.failures > 1 || final(c.failed))
}

// ended records the end of an attempt.
func (c *podIntercept) ended(err error) {
	c.i.set(func() {
		c.session, c.linked = nil, sessionState{}
		switch {
		case errors.Is(err, errReplaced):
			c.phase = replacing
		case errors.Is(err, client.ErrPodGone):
			c.failed, c.phase = nil, gone
		default:
			c.fails(err)
			c.phase = waiting
		}
	})
}

// attempt goes through the phases. It returns when a step fails, or when the agent or ctx ends.
func (c *podIntercept) attempt(ctx context.Context) error {
	c.i.set(func() { c.phase = waiting })
	if err := c.i.await(ctx, func() bool { return c.i.modeChosen && c.placed() }); err != nil {
		return err
	}
	agent, err := c.add(ctx)
	if err != nil {
		return err
	}
	c.i.set(func() { c.phase = starting })
	infos := make(chan api.AgentInfo)
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error { return c.listen(gctx, agent, infos) })
	g.Go(func() error { return c.keepLinked(gctx, infos) })
	g.Go(func() error { return c.verify(gctx) })
	if !agent.sidecar {
		g.Go(func() error { // ends the attempt when the agent reports that it is ending
			return cmp.Or(c.i.await(gctx, func() bool { return c.phase == replacing }), errReplaced)
		})
	}
	err = g.Wait()
	if errors.Is(err, errReplaced) {
		c.i.set(func() { c.replaced = append(c.replaced, agent.container) })
	}
	return err
}

// add waits for the pod's turn, and ensures that the pod has the laptop's agent. The turns limit concurrent requests to
// the API server. They do not include the second that the kubelet may take to report that the container runs.
func (c *podIntercept) add(ctx context.Context) (podAgent, error) {
	if err := c.i.await(ctx, func() bool { return c.allowed || c.i.othersAllowed }); err != nil {
		return podAgent{}, err
	}
	if err := c.i.slots.Acquire(ctx, 1); err != nil {
		return podAgent{}, err
	}
	defer c.i.slots.Release(1)
	c.i.set(func() { c.phase = adding })
	return c.i.ensureAgent(ctx, c.latest(), c.replaced)
}

// listen sends the agent's AgentInfo to infos until the agent's container ends. The agent reports it in two places, and
// neither can replace the other:
//
//	container's log   The kubelet authenticates it. It works for earlier agents, sidecars, after restarts, and when another
//	                  agent becomes the leader. The kubelet returns it up to a second after the start.
//	port              Only a new agent serves it, for a minute, and any container in the pod could answer. It answers as soon
//	                  as the agent runs: with two pods in a lab, an intercept took 2.8 s instead of 3.9 s (median of 8).
//
// So listen asks a new agent at its port until the log has the same. It opens the log when the pod's status reports
// that the container runs. By then the port has answered, so requests for logs do not delay pods that wait for their
// agents.
func (c *podIntercept) listen(ctx context.Context, agent podAgent, infos chan<- api.AgentInfo) error {
	asking, stop := context.WithCancel(ctx)
	var port sync.WaitGroup
	defer port.Wait()
	defer stop()
	if agent.infoPort != 0 {
		port.Go(func() { c.askPort(asking, agent.infoPort, infos) })
	}
	ctx, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	err := c.followLog(ctx, agent, func(info api.AgentInfo) {
		stop()
		if err := c.checkLeader(ctx, agent, info); err != nil {
			fail(err)
			return
		}
		sendInfo(ctx, infos, info)
	})
	if cause := context.Cause(ctx); cause != nil {
		return cause
	}
	return err
}

// leaderTimeout is how long the log of a leader that another agent names may take to show its key.
const leaderTimeout = 10 * time.Second

// checkLeader returns an error unless the log of an agent's container has announced info's key as its own: info is what
// agent's log says, which can repeat the words of any container of the pod.
func (c *podIntercept) checkLeader(ctx context.Context, agent podAgent, info api.AgentInfo) error {
	own := func(g api.AgentInfo) bool {
		return g.Key == info.Key && g.Port == info.Port && g.Leader == api.LeaderSelf
	}
	if own(info) {
		return nil
	}
	within, cancel := context.WithTimeout(ctx, leaderTimeout)
	defer cancel()
	var found atomic.Bool
	var logs sync.WaitGroup
	for _, name := range otherAgents(c.latest(), agent.container) {
		logs.Go(func() {
			log := workloads.Log{Namespace: c.i.cfg.Namespace, Pod: c.name, Container: name, Await: c.await}
			err := c.i.pods.FollowLog(within, log, func(line string) {
				if g, ok := parseInfo(line); ok && own(g) {
					found.Store(true)
					cancel()
				}
			})
			c.i.log.Debug("an agent's log has been read", "pod", c.name, "container", name, "err", err)
		})
	}
	logs.Wait()
	switch {
	case found.Load():
		return nil
	case ctx.Err() != nil:
		return context.Cause(ctx)
	}
	return api.Errorf(api.ExitInject, "another program poses as the agent in pod %s: no agent's log has the key of "+
		"the leader", c.name).
		WithHint("A container of the pod has bound the socket %s. `kubevpn reset` ends the agents.", api.AgentSocket)
}

func sendInfo(ctx context.Context, infos chan<- api.AgentInfo, info api.AgentInfo) {
	select {
	case infos <- info:
	case <-ctx.Done():
	}
}

// askPort sends the AgentInfo that the agent serves at its port to infos. It only logs errors, because the container's
// log contains the AgentInfo, too.
func (c *podIntercept) askPort(ctx context.Context, port uint16, infos chan<- api.AgentInfo) {
	line, err := c.i.pods.FirstLine(ctx, c.i.cfg.Namespace, c.name, port)
	if err != nil {
		c.i.log.Debug("the agent's port does not answer", "pod", c.name, "err", err)
		return
	}
	info, ok := parseInfo(string(line))
	if !ok || info.Error != nil {
		c.i.log.Warn("another program listens on the agent's port", "pod", c.name, "port", port)
		return
	}
	sendInfo(ctx, infos, info)
}

// await waits until ok returns true for the latest version of the pod. It calls ok with i.mu held. ctx ends when the
// pod no longer exists.
func (c *podIntercept) await(ctx context.Context, ok func(*corev1.Pod) bool) (p *corev1.Pod, err error) {
	err = c.i.await(ctx, func() bool {
		p = c.pod
		return ok(p)
	})
	return p, err
}

// followLog calls f with each AgentInfo in the agent's log, until the container ends.
func (c *podIntercept) followLog(ctx context.Context, agent podAgent, f func(api.AgentInfo)) error {
	var reported error
	log := workloads.Log{Namespace: c.i.cfg.Namespace, Pod: c.name, Container: agent.container, Await: c.await}
	err := c.i.pods.FollowLog(ctx, log, func(line string) {
		info, ok := parseInfo(line)
		switch {
		case !ok:
			c.i.log.Debug("agent log", "pod", c.name, "line", line)
		case info.Error != nil: // the agent retries, or ends
			reported = fmt.Errorf("the agent in pod %s: %w", c.name, info.Error)
			c.i.set(func() { c.fails(reported) })
		default:
			f(info)
		}
	})
	if ended, ok := errors.AsType[*workloads.ContainerEnded](err); ok {
		switch {
		case reported != nil:
			return reported
		case agent.old:
			return fmt.Errorf("%w: %w", errReplaced, err)
		}
		return api.Errorf(api.ExitInject, "the agent in pod %s ended with exit code %d (%s)", c.name, ended.ExitCode,
			ended.Reason).
			WithHint("See `kubectl -n %s logs %s -c %s` for the cause.", api.ShellQuote(c.i.cfg.Namespace),
				api.ShellQuote(c.name), api.ShellQuote(agent.container))
	}
	return err
}

// keepLinked keeps a session with the leader in the pod. It starts another when infos names another agent.
func (c *podIntercept) keepLinked(ctx context.Context, infos <-chan api.AgentInfo) error {
	var sessions sync.WaitGroup
	defer sessions.Wait()
	var now api.AgentInfo
	stop := func() {}
	defer func() { stop() }()
	for {
		select {
		case g := <-infos:
			_, speaks := api.CommonProtocol(g.Protocol, g.Oldest)
			switch {
			case !speaks:
				return api.Errorf(api.ExitIncompatible,
					"the agent in pod %s (%s) speaks protocol %d, this kubevpn speaks %d", c.name, g.Version,
					g.Protocol, api.Protocol).
					WithHint("Run `kubevpn connect --upgrade` to upgrade the traffic manager and its agents to this " +
						"version.")
			case g.Key == now.Key && g.Port == now.Port:
				continue
			}
			now = g
			stop() // does not wait: closing a session with a dead agent takes a second
			linkCtx, cancel := context.WithCancel(ctx)
			stop = cancel
			l := c.newSession(g)
			sessions.Go(func() {
				if err := l.run(linkCtx); err != nil {
					c.i.log.Error("the session with an agent failed", "pod", c.name, "err", err)
				}
			})
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// newSession returns a session with the agent that g names, and makes it the pod's.
func (c *podIntercept) newSession(g api.AgentInfo) *agentSession {
	config := c.i.identity.tlsConfig(g.Key)
	l := &agentSession{claim: c.i.claim, target: &c.i.target, record: c.i.records,
		about: api.Exchange{Namespace: c.i.cfg.Namespace, Workload: c.i.cfg.Workload, Pod: c.name,
			Match: c.i.status.Match},
		log: c.i.log.With("pod", c.name)}
	if v := c.i.via; v != nil {
		l.hello = api.AgentHello{MayExec: v.mayExec, Listens: v.localhost != nil}
		l.serve = func(ctx context.Context, s *transport.Session) { c.carry(ctx, l, s) }
	} else {
		l.serve, l.budget = c.i.server.accept, c.i.server.budget
	}
	l.dial = func(ctx context.Context) (net.Conn, error) {
		return dialAgent(ctx, config, func(ctx context.Context) (net.Conn, error) {
			to, err := c.address(g.Port)
			if err != nil {
				return nil, err
			}
			return c.i.cfg.Session.Dial(ctx, "tcp", to)
		}, func(ctx context.Context) (net.Conn, error) {
			return c.i.pods.DialPod(ctx, c.i.cfg.Namespace, c.name, g.Port)
		})
	}
	update := func(rejection *api.Error, change func(*sessionState)) {
		c.i.set(func() {
			if c.session == l {
				change(&c.linked)
				c.applyLinkState(rejection)
			}
		})
	}
	l.change = func(change func(*sessionState)) { update(nil, change) }
	l.answered = func(pods *api.ClonePods, rejection *api.Error) {
		update(rejection, func(st *sessionState) {
			st.claimed, st.err = rejection == nil, nil
			st.away = pods != nil && len(pods.Addresses) == 0
			if rejection != nil {
				st.err = rejection
			}
		})
	}
	c.i.set(func() {
		c.session, c.linked = l, sessionState{}
		if c.phase == starting {
			c.phase = linking
		}
	})
	return l
}

// address returns the pod's address with port.
func (c *podIntercept) address(port uint16) (netip.AddrPort, error) {
	addr, err := netip.ParseAddr(c.latest().Status.PodIP)
	if err != nil {
		return netip.AddrPort{}, fmt.Errorf("parsing the address of pod %s: %w", c.name, err)
	}
	return netip.AddrPortFrom(addr, port), nil
}

// applyLinkState updates the podIntercept from linked. rejection is the agent's answer if it has just rejected the
// claim; else nil. The caller holds i.mu.
func (c *podIntercept) applyLinkState(rejection *api.Error) {
	if c.active() {
		c.failed, c.failures = nil, 0
	}
	// The session claims again after a rejection. The agent reports its claims separately, possibly after its answer.
	switch {
	case rejection != nil && rejection.Code == api.ExitLost && c.i.rollout == nil:
		c.phase = replacing
	case rejection != nil && c.linked.state != nil && !c.waitsForOwnClaim():
		c.fails(rejection)
	}
	if c.linked.reset != nil {
		c.i.fail(c.linked.reset)
	}
	if mine := ownClaim(c.linked.state, c.i.claim.ID); mine != nil {
		c.requests.observe(mine.Requests)
	}
}

// waitsForOwnClaim reports whether the agent rejects the claim because it has another claim of the same key. If that
// claim's daemon was killed, the agent notices within deadAfter, and then accepts this claim. The caller holds i.mu.
func (c *podIntercept) waitsForOwnClaim() bool {
	if c.linked.claimed || c.linked.state == nil || api.AsError(c.linked.err) == nil ||
		api.AsError(c.linked.err).Code != api.ExitConflict {
		return false
	}
	return slices.ContainsFunc(c.linked.state.Claims, func(claim api.Claim) bool {
		return claim.Mine && claim.ID != c.i.claim.ID
	})
}

// verify waits until the agent sends requests here or to the clone, and probes the pod. If the probe does not arrive,
// it releases the claim.
func (c *podIntercept) verify(ctx context.Context) error {
	if err := c.i.await(ctx, func() bool {
		return c.linked.claimed && c.linked.attached && !c.linked.away && c.runs()
	}); err != nil {
		return err
	}
	var err error
	if c.i.via == nil {
		err = c.i.verifyPod(ctx, c)
	}
	if err != nil {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		bounded, cancel := context.WithTimeout(ctx, releaseTimeout)
		defer cancel()
		c.release(bounded)
		return err
	}
	c.i.set(func() {
		if c.phase != replacing {
			c.phase, c.failed, c.failures = verified, nil, 0
		}
	})
	return nil
}

// release releases the claim, or stops intercepting the pod if there is no session.
func (c *podIntercept) release(ctx context.Context) {
	c.i.mu.Lock()
	l := c.session
	c.i.mu.Unlock()
	if l == nil {
		c.cancel()
		return
	}
	if err := l.release(ctx); err != nil {
		c.i.log.Warn("cannot release a claim; the agent releases it by itself", "pod", c.name, "err", err)
	}
}
