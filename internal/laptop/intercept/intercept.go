package intercept

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"crypto/rand"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/dynamic"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podconn"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/protocol/interceptor"
	"kubevpn/pkg/wakeup"
)

const (
	maxAdding = 8 // the intercept adds agents to this many pods at a time

	// firstPodTimeout is how long the intercept waits for one of the first pods before it tries the next one.
	firstPodTimeout = 20 * time.Second
	// podTimeout is how long interceptFirst waits for a pod that runs.
	podTimeout = 10 * time.Second
	// beginTimeout is how long waitForPods waits for the other pods after the first one is intercepted.
	beginTimeout = 20 * time.Second

	// ownClaimTimeout is how long a claim waits for an overlapping one of the same key: agents notice within deadAfter
	// that a daemon was killed.
	ownClaimTimeout = 2 * deadAfter

	leaveTimeout = 4 * time.Second // for all releases; closing the sessions may take another second
)

// Session is the connection to the cluster that an intercept uses: a *connection.Connection.
type Session interface {
	Status() api.Connection
	// Dial connects to an address in the cluster through the traffic manager.
	Dial(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)
	// Image returns the traffic manager's image, which contains the agent.
	Image(ctx context.Context) (string, error)
	// NeedsPullSecret reports whether the manager's own pod needs a Secret to pull Image.
	NeedsPullSecret(ctx context.Context) (bool, error)
	// SetShortcuts replaces where flows of programs of this machine do not go to the cluster; nil removes it.
	SetShortcuts(intercept string, to map[netip.AddrPort]shortcut)
}

// pods reads and changes a workload and its pods with the user's own rights. podsOf returns one.
type pods interface {
	Workload(ctx context.Context, namespace, typeAndName string) (*workloads.Workload, error)
	MayPatch(ctx context.Context, w *workloads.Workload) error
	WatchPods(ctx context.Context, w *workloads.Workload, f func([]corev1.Pod)) error
	// MayInject returns nil if the API server would allow Inject.
	MayInject(ctx context.Context, pod *corev1.Pod, a workloads.Agent) error
	// Inject adds an agent to the pod unless its owner has one there, and returns its container's name.
	Inject(ctx context.Context, pod *corev1.Pod, a workloads.Agent) (container string, added bool, err error)
	// FirstLine returns the first line that a server on a loopback port of the pod sends. It waits until one listens.
	FirstLine(ctx context.Context, namespace, pod string, port uint16) ([]byte, error)
	FollowLog(ctx context.Context, log workloads.Log, line func(string)) error
	DialPod(ctx context.Context, namespace, pod string, port uint16) (net.Conn, error)
	Kube() kubernetes.Interface
	ExplainContext(ctx context.Context, err error) error
}

// podsOf returns the pods of a cluster.
func podsOf(c *client.Cluster) pods {
	return struct {
		workloads.Client
		*podconn.Dialer
	}{workloads.New(c), podconn.New(c)}
}

// Config configures an Intercept.
type Config struct {
	Cluster   *client.Cluster // with the account of the user who intercepts
	Session   Session
	Namespace string
	Workload  string // TYPE/NAME
	Spec      api.InterceptSpec
	// ModeSource is api.Setting.Source of Spec.Mode; empty: "--mode".
	ModeSource string
	Objects    api.Objects
	Clone      bool              // requests go to the pods that SetClone sets, not to this laptop
	Exposed    *Exposed          // the pods of Workload were made of it: they have the agent, and no application
	Image      string            // of the agent; empty: the traffic manager's
	Owner      string            // the name that others see: user@host
	Key        *ecdsa.PrivateKey // authenticates the owner to the agents
	// Dial connects to the programs that receive the requests, at loopback addresses. Nil dials on this machine,
	// and the hosts that Spec names.
	Dial     func(ctx context.Context, network, address string) (net.Conn, error)
	Progress func(api.Event) // safe for concurrent use; does not block
	Logger   *slog.Logger
}

// Intercept brings the traffic of one workload to this laptop. Call Run once. The other methods are safe for concurrent
// use at any time.
type Intercept struct {
	cfg      Config
	short    interceptor.Stats // of requests that take a shortcut
	log      *slog.Logger
	identity identity
	pods     pods
	target   wakeup.Value[*api.ClonePods] // of the requests: a clone's pods, immutable; nil: this laptop
	records  *records
	claim    api.ClaimOrder // the same for every pod; read and rollOut set the ports

	objects dynamic.Interface
	via     *Via // of which it is a part; nil: it claims

	subject          // set by read
	server  *server  // set by read
	rollout *rollout // set by rollOut: the change of the template; nil: the agents are ephemeral containers

	begun     chan struct{}
	slots     *semaphore.Weighted
	fail      context.CancelCauseFunc // ends run: somebody has removed all intercepts of the workload; set by run
	eventSent bool                    // the API server has accepted an Event about the begin; set by run
	running   sync.WaitGroup          // the podIntercepts' goroutines

	podSet
	status api.Intercept // without what Status computes from the pods; guarded by podSet.mu
	now    found         // what follow has found; guarded by podSet.mu
	slow   *api.Error    // what the rollout waits for; guarded by podSet.mu

	// Guarded by podSet.mu:
	modeChosen    bool
	othersAllowed bool // all pods may be intercepted
}

// New returns an Intercept for Run. Errors are *api.Error.
func New(cfg Config) (*Intercept, error) {
	return newIntercept(cfg, podsOf(cfg.Cluster), cfg.Cluster.Dynamic())
}

func newIntercept(cfg Config, pods pods, objects dynamic.Interface) (*Intercept, error) {
	m, err := httpmatch.New(cfg.Spec.Match)
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "%w", err)
	}
	id, err := newIdentity(cfg.Key)
	if err != nil {
		return nil, api.AsError(err)
	}
	now := time.Now()
	i := &Intercept{
		cfg: cfg, log: cfg.Logger.With("workload", cfg.Namespace+"/"+cfg.Workload), identity: id,
		pods: pods, objects: objects, records: newRecords(cfg.Spec.Record),
		claim: api.ClaimOrder{
			ID: strings.ToLower(rand.Text()[:12]), Match: cfg.Spec.Match, Mirror: cfg.Spec.Mirror,
			Observe: cfg.Spec.Observe, Flush: cfg.Spec.Flush, Cache: cfg.Spec.Cache, Since: now, TLS: cfg.Spec.TLS,
		},
		begun: make(chan struct{}), slots: semaphore.NewWeighted(maxAdding),
		podSet: podSet{byUID: make(map[types.UID]*podIntercept)},
		status: api.Intercept{
			Namespace: cfg.Namespace, Workload: cfg.Workload, State: api.InterceptStarting,
			Mode: cmp.Or(cfg.Spec.Mode, api.ModeAuto), Match: m.String(), AddHeaders: cfg.Spec.Match.Added(),
			Mirror: cfg.Spec.Mirror,
			Ports:  slices.Clone(cfg.Spec.Ports),
		},
	}
	if cfg.Clone {
		i.target.Update(func(now **api.ClonePods) { *now = &api.ClonePods{Addresses: []netip.Addr{}} })
	}
	return i, nil
}

// Begun returns a channel that closes once probes have reached the agents of the existing pods, or when no pod runs and
// the intercept waits for one.
func (i *Intercept) Begun() <-chan struct{} { return i.begun }

// Exposes reports whether the pods were made for this intercept.
func (i *Intercept) Exposes() bool { return i.cfg.Exposed != nil }

// Run intercepts until ctx ends, which is not an error, or until it fails. It then releases its claims, for at most
// five seconds: agents that have not answered release their claims by themselves. Errors are *api.Error.
func (i *Intercept) Run(ctx context.Context) error {
	// life is the context of the podIntercepts. It outlives ctx, because leave needs their sessions.
	life, end := context.WithCancel(context.WithoutCancel(ctx))
	err := i.run(ctx, life)
	if ctx.Err() != nil {
		err = nil
	}
	i.leave(ctx, err)
	end()
	i.running.Wait()
	i.update(nil, nil)
	if err == nil {
		return nil // not a nil *api.Error in an error
	}
	return api.AsError(err)
}

func (i *Intercept) run(ctx, life context.Context) error {
	if err := i.read(ctx); err != nil {
		return err
	}
	inner, fail := context.WithCancelCause(ctx)
	defer fail(nil)
	i.fail = fail
	g, gctx := errgroup.WithContext(inner)
	g.Go(func() error {
		return i.pods.WatchPods(gctx, i.workload, func(pods []corev1.Pod) {
			i.update(pods, func(p *corev1.Pod) *podIntercept { return i.startPod(life, p) })
		})
	})
	g.Go(func() error {
		if err := i.checkPermissions(gctx); err != nil {
			return err
		}
		if err := i.begin(gctx); err != nil {
			return err
		}
		i.eventSent = i.events().Record(gctx, "InterceptBegan", "intercepts requests of %s", i.workload)
		if i.shortens() {
			g.Go(func() error { return i.followShortcuts(gctx) })
		}
		return i.follow(gctx)
	})
	err := g.Wait()
	if ctx.Err() == nil && inner.Err() != nil {
		return context.Cause(inner)
	}
	return err
}

// subject is what the intercept reads before it changes anything.
type subject struct {
	workload  *workloads.Workload
	container string        // of the ports
	ports     []api.PortMap // to intercept
	image     string        // of the agent
	private   bool          // pulling the image needs a Secret
}

// read reads the subject, and sets what follows from it.
func (i *Intercept) read(ctx context.Context) error {
	s, err := i.readSubject(ctx)
	if err != nil {
		return err
	}
	served := s.ports
	if i.cfg.Spec.Observe {
		served = nil
	}
	dial := i.cfg.Dial
	if dial == nil {
		dial = i.placeDialer().DialContext
	}
	if err := i.checkPlaces(ctx, served); err != nil {
		return err
	}
	i.subject, i.server = s, newServer(served, dial, i.log)
	for _, p := range s.ports {
		i.claim.Ports = append(i.claim.Ports, api.AgentPort{Protocol: p.Protocol, Port: p.Container})
	}
	i.set(func() { i.status.Ports = s.ports })
	return nil
}

// readSubject reads the workload and finds the agent's image, at the same time.
func (i *Intercept) readSubject(ctx context.Context) (s subject, err error) {
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error { return i.readWorkload(ctx, &s) })
	if s.image = i.cfg.Image; s.image == "" {
		g.Go(func() (err error) {
			s.image, err = i.cfg.Session.Image(ctx)
			return err
		})
		g.Go(func() (err error) {
			s.private, err = i.cfg.Session.NeedsPullSecret(ctx)
			return err
		})
	}
	err = g.Wait()
	return s, err
}

// readWorkload reads the workload, and chooses the ports to intercept.
func (i *Intercept) readWorkload(ctx context.Context, s *subject) (err error) {
	if i.via != nil {
		if s.workload, err = i.pods.Workload(ctx, i.cfg.Namespace, i.cfg.Workload); err != nil {
			return err
		}
		s.container, i.via.replaced, err = i.via.program(s.workload)
		return err
	}
	done := i.step("Reading %s", i.cfg.Workload)
	if s.workload, err = i.pods.Workload(ctx, i.cfg.Namespace, i.cfg.Workload); err != nil {
		return err
	}
	if s.workload.IsScheduled() {
		return api.Errorf(api.ExitWorkload, "%s is a CronJob and receives no requests", s.workload).
			WithHint("`kubevpn clone` runs its job in the cluster, `kubevpn dev` on this machine")
	}
	if i.cfg.Exposed != nil {
		s.ports, s.container = i.cfg.Spec.Ports, exposingAgent
		done("%s", portsText(s.ports))
		return nil
	}
	if s.ports, s.container, err = choosePorts(s.workload, i.cfg.Spec); err != nil {
		return err
	}
	i.warn(s.workload.Notes...)
	done("container %s, %s", s.container, portsText(s.ports))
	return nil
}

// checkPermissions returns nil if the user may intercept the workload. The intercept changes no pod before it returns.
func (i *Intercept) checkPermissions(ctx context.Context) error {
	done := i.step("Checking permissions")
	if err := i.pods.MayPatch(ctx, i.workload); err != nil {
		return err
	}
	done("allowed")
	return nil
}

// startPod starts to intercept a pod, until life ends.
func (i *Intercept) startPod(life context.Context, p *corev1.Pod) *podIntercept {
	ctx, cancel := context.WithCancel(life)
	c := &podIntercept{i: i, name: p.Name, cancel: cancel, pod: p}
	i.running.Go(func() { c.run(ctx) })
	return c
}

// begin intercepts the existing pods, probes them, and closes begun.
func (i *Intercept) begin(ctx context.Context) error {
	if err := i.chooseMode(ctx); err != nil {
		return err
	}
	i.set(func() { i.modeChosen = true })
	if i.rollout == nil {
		return i.interceptPods(ctx)
	}
	watched, stop := context.WithCancelCause(ctx)
	defer wakeup.Go(watched, func(ctx context.Context) {
		if obstacle := i.watchObstacles(ctx); obstacle != nil {
			stop(obstacle)
		}
	})()
	err := i.interceptPods(watched)
	if watched.Err() != nil && ctx.Err() == nil {
		return context.Cause(watched)
	}
	return err
}

// interceptPods intercepts the existing pods, once the mode is chosen.
func (i *Intercept) interceptPods(ctx context.Context) error {
	done := i.step("Intercepting the pods of %s", i.cfg.Workload)
	first, err := i.interceptFirst(ctx)
	if err != nil {
		return err
	}
	i.set(func() { i.othersAllowed = true })
	if first == nil {
		i.warn(fmt.Sprintf("no pod of %s runs; the intercept waits for one", i.cfg.Workload))
		i.setBegun()
		return nil
	}
	if err := i.waitForPods(ctx); err != nil {
		return err
	}
	intercepted, all := i.count()
	done("%d of %d", intercepted, all)
	if i.rollout != nil {
		if intercepted < all { // the next step would cut Services off from pods without an agent
			return i.unfinished()
		}
		if err := i.rollout.redirectServices(ctx, true); err != nil {
			return err
		}
	}
	if err := i.verifyServices(ctx); err != nil {
		return err
	}
	i.setBegun()
	i.log.Info("the intercept has started", "intercepted", intercepted, "pods", all)
	return nil
}

func (i *Intercept) setBegun() {
	i.set(func() { i.status.State = api.InterceptActive })
	close(i.begun)
}

// unfinished is the error of a rollout that takes too long.
func (i *Intercept) unfinished() error {
	cause := cmp.Or(i.Status().LastError, "no pod has it")
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.slow != nil {
		cause = i.slow.Message
	}
	return api.Errorf(api.ExitInject, "the rollout of the agent did not finish within %v: %s", rolloutTimeout, cause).
		WithHint("`kubectl -n %s describe %s` shows the cause. kubevpn has undone the rollout.", i.cfg.Namespace,
			i.cfg.Workload)
}

// interceptFirst intercepts one pod after the other, in the order of their names, until one succeeds. It returns nil
// without an error if no pod runs.
func (i *Intercept) interceptFirst(ctx context.Context) (*podIntercept, error) {
	deadline := time.Now().Add(podTimeout)
	if i.rollout != nil {
		deadline = time.Now().Add(rolloutTimeout)
	}
	tried := make(map[*podIntercept]bool)
	var failed error
	for {
		var next *podIntercept
		bounded, cancel := context.WithDeadline(ctx, deadline)
		err := i.await(bounded, func() bool {
			next = nil
			for _, c := range i.sorted() {
				if !tried[c] && c.runs() && c.placed() {
					next = c
					break
				}
			}
			return next != nil || i.listed && failed != nil
		})
		cancel()
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case err != nil:
			if _, all := i.count(); i.rollout != nil && all > 0 {
				return nil, i.unfinished()
			}
			return nil, nil
		case next == nil:
			return nil, failed // every pod that runs has failed
		}
		tried[next] = true
		i.set(func() { next.allowed = true })
		intercepted, cause := i.waitForPod(ctx, next)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case intercepted:
			return next, nil
		case cause == nil: // the pod no longer exists
			continue
		}
		if final(cause) {
			return nil, cause
		}
		i.log.Warn("cannot intercept the first pod", "pod", next.name, "err", cause)
		failed = cmp.Or(failed, cause)
	}
}

// waitForPod waits until the pod is intercepted, fails again (cause is its error), or the pod no longer exists.
func (i *Intercept) waitForPod(ctx context.Context, c *podIntercept) (intercepted bool, cause error) {
	timeout, warned := firstPodTimeout, false
	for {
		bounded, cancel := context.WithTimeout(ctx, timeout)
		var waitsForOwn bool
		err := i.await(bounded, func() bool {
			waitsForOwn = c.waitsForOwnClaim() && !warned
			return c.phase == verified || c.failsAgain() || i.byUID[c.pod.UID] != c || waitsForOwn
		})
		cancel()
		i.mu.Lock()
		intercepted, cause = c.phase == verified, c.failed
		if err != nil && ctx.Err() == nil {
			cause = api.Errorf(api.ExitInject, "the agent in pod %s does not answer: %s", c.name, c.reason())
			switch {
			case c.waitsForOwnClaim():
				cause = c.linked.err
			case c.linked.away:
				cause = api.Errorf(api.ExitNotReady, "no pod of the clone stays ready").
					WithHint("`kubevpn clone --no-traffic` starts it without requests; `kubectl logs` then shows why.")
			}
		}
		i.mu.Unlock()
		if !waitsForOwn {
			return intercepted, cause
		}
		i.warn("your other intercept already receives these requests; waiting until the agent notices that its " +
			"daemon was killed")
		timeout, warned = ownClaimTimeout, true
	}
}

// final reports whether an error applies to all pods.
func final(err error) bool {
	switch api.AsError(err).Code {
	case api.ExitConflict, api.ExitIntercept, api.ExitPermission:
		return true
	}
	return false
}

// waitForPods waits until each pod that runs is intercepted or fails again, for a limited time.
func (i *Intercept) waitForPods(ctx context.Context) error {
	timeout := beginTimeout
	if i.rollout != nil {
		timeout = rolloutTimeout
	}
	bounded, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	reported := 0
	err := i.await(bounded, func() bool {
		intercepted, settled := 0, true
		for _, c := range i.byUID {
			if c.active() {
				intercepted++
			} else if (c.runs() || i.rollout != nil) && !c.failsAgain() { // a rollout ends with the pods that start
				settled = false
			}
		}
		if intercepted > reported && !settled {
			reported = intercepted
			i.cfg.Progress(api.Event{Time: time.Now(), Step: "Intercepting the pods of " + i.cfg.Workload,
				Detail: fmt.Sprintf("%d of %d", intercepted, len(i.byUID))})
		}
		return settled
	})
	if err != nil && ctx.Err() == nil {
		return nil // Status has the reasons of the others
	}
	return err
}

// leave releases all claims, and removes the sidecar from the template. cause is the error that ended the intercept, or
// nil. The error may say that the intercept is undone, so the state is failed only at the end.
func (i *Intercept) leave(ctx context.Context, cause error) {
	var pods []*podIntercept
	i.set(func() {
		i.status.State, i.status.Error, pods = api.InterceptLeaving, api.AsError(cause), i.sorted()
	})
	if cause != nil {
		defer i.set(func() { i.status.State = api.InterceptFailed })
	}
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	var releases sync.WaitGroup
	for _, c := range pods {
		releases.Go(func() { c.release(bounded) })
	}
	if i.eventSent {
		releases.Go(func() {
			i.events().Record(bounded, "InterceptEnded", "no longer intercepts requests of %s", i.workload)
		})
	}
	releases.Wait()
	if i.rollout == nil {
		return
	}
	if err := i.rollout.undo(bounded); err != nil {
		i.log.Error("cannot remove the agent from the template", "err", err)
		i.warn(fmt.Sprintf("cannot remove the agent from the template of %s: %v; run `kubevpn reset %s`",
			i.cfg.Workload, err, i.cfg.Workload))
	}
}

// events returns a Recorder of Events, which all users of the namespace can read. So they do not contain the match.
func (i *Intercept) events() workloads.Recorder {
	return workloads.Recorder{Kube: i.pods.Kube(), Logger: i.log, Workload: i.workload, Owner: i.cfg.Owner}
}

// step reports that a step begins. The returned function reports its end.
func (i *Intercept) step(format string, args ...any) (done func(format string, args ...any)) {
	return api.BeginStep(i.cfg.Progress, i.log, format, args...)
}

// warn reports new warnings to the user, and keeps them in the status.
func (i *Intercept) warn(warnings ...string) {
	for _, w := range warnings {
		i.mu.Lock()
		known := slices.Contains(i.status.Warnings, w)
		if !known {
			i.status.Warnings = append(i.status.Warnings, w)
		}
		i.mu.Unlock()
		if !known {
			i.log.Warn(w)
			i.cfg.Progress(api.Event{Time: time.Now(), Warning: w})
		}
	}
}
