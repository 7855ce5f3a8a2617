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
	corev1 "k8s.io/api/core/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/pkg/match"
)

const (
	turns = 8 // pods to which an agent is being added at one time

	// leadPatience is how long the others wait for one pod to be covered before the next one may try.
	leadPatience = 20 * time.Second
	// podPatience is how long a workload may be without a pod that runs before the intercept is said to wait for one.
	podPatience = 10 * time.Second
	// beginPatience is how long the intercept waits for the pods that were there when it began.
	beginPatience = 20 * time.Second

	// holdPatience is how long a claim is waited for whose owner, ourselves, has died: agents hold it for a minute.
	holdPatience = 70 * time.Second

	leaveTimeout = 4 * time.Second // for all releases; what is closed after that may take a second more
)

// Session is the connection to the cluster that an intercept uses: a *session.Session.
type Session interface {
	Status() api.Connection
	// Dial connects to an address of the cluster as a flow of the laptop does.
	Dial(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)
	// Image is the traffic manager's, which has the agent in it, too.
	Image(ctx context.Context) (string, error)
}

// pods is what an intercept does with a workload and its pods, with the user's own rights: a *cluster.Cluster.
type pods interface {
	Workload(ctx context.Context, namespace, typeAndName string) (*cluster.Workload, error)
	MayPatch(ctx context.Context, w *cluster.Workload) error
	WatchPods(ctx context.Context, w *cluster.Workload, f func([]corev1.Pod)) error
	// MayInject returns nil if Inject would be admitted.
	MayInject(ctx context.Context, pod *corev1.Pod, a cluster.Agent) error
	// Inject adds an agent to the pod, unless its owner has one there, and gives its container's name.
	Inject(ctx context.Context, pod *corev1.Pod, a cluster.Agent) (container string, added bool, err error)
	// FirstLine is what somebody in the pod says at a port of its loopback address, as soon as there is somebody.
	FirstLine(ctx context.Context, namespace, pod string, port uint16) ([]byte, error)
	FollowLog(ctx context.Context, namespace, pod, container string, line func(string)) error
	DialPod(ctx context.Context, namespace, pod string, port uint16) (net.Conn, error)
	Kube() kubernetes.Interface
	Explain(err error) *api.Error
}

// Config is what New needs.
type Config struct {
	Cluster   *cluster.Cluster // under the account of whoever asks for the intercept
	Session   Session
	Namespace string
	Workload  string // TYPE/NAME
	Spec      api.InterceptSpec
	Clone     bool              // requests go to pods of the cluster in place of this laptop: SetClone
	Image     string            // of the agent; empty: the traffic manager's
	Owner     string            // what the agents call us: user@host
	Key       *ecdsa.PrivateKey // by which they know us
	// Dial connects to the programs that requests are for, at addresses of their loopback. Nil: those of this machine.
	Dial     func(ctx context.Context, network, address string) (net.Conn, error)
	Progress func(api.Event) // may be called concurrently; never blocks for long
	Logger   *slog.Logger
}

// Intercept is one workload whose traffic comes to this laptop. Run is called once; the other methods may be called at any
// time, concurrently.
type Intercept struct {
	cfg      Config
	log      *slog.Logger
	identity identity
	pods     pods
	target   *cloneTarget
	claim    api.ClaimOrder // as every pod gets it; look fills in the ports

	objects objects

	workload  *cluster.Workload // of look
	container string            // likewise
	image     string            // of mayBegin
	server    *server           // of look
	rolled    *sidecarPlan      // of chooseMode: what was done to the template; nil: nothing

	podPatience time.Duration

	begun chan struct{}
	open  chan struct{}  // closed: any pod may be covered
	slots chan struct{}  // one value for each pod to which an agent is being added
	reset chan error     // buffered 1: somebody has removed all intercepts of the workload
	going sync.WaitGroup // covers

	mu     sync.Mutex
	moved  chan struct{} // closed and replaced when anything below, or of a cover, has changed
	status api.Intercept // what does not change with the pods
	listed bool
	covers map[types.UID]*cover
	past   uint64 // requests that pods had which are gone
}

// New makes an intercept that does nothing yet. Errors are *api.Error.
func New(cfg Config) (*Intercept, error) {
	return newIntercept(cfg, cfg.Cluster, restObjects{cfg.Cluster.Kube().CoreV1().RESTClient()})
}

func newIntercept(cfg Config, pods pods, objects objects) (*Intercept, error) {
	m, err := match.New(matchSpec(cfg.Spec.Match))
	if err != nil {
		return nil, api.Errorf(api.ExitUsage, "%w", err)
	}
	switch cfg.Spec.Mode {
	case "", api.ModeAuto, api.ModeEphemeral, api.ModeSidecar:
	default:
		return nil, api.Errorf(api.ExitUsage, "there is no mode %q", cfg.Spec.Mode).
			WithHint("use --mode with one of %s, %s, %s", api.ModeAuto, api.ModeEphemeral, api.ModeSidecar)
	}
	id, err := newIdentity(cfg.Key)
	if err != nil {
		return nil, api.AsError(err)
	}
	now := time.Now()
	i := &Intercept{
		cfg: cfg, log: cfg.Logger.With("workload", cfg.Namespace+"/"+cfg.Workload), identity: id,
		target: newCloneTarget(cfg.Clone),
		claim: api.ClaimOrder{
			ID: strings.ToLower(rand.Text()[:12]), Match: cfg.Spec.Match, Mirror: cfg.Spec.Mirror, Flush: cfg.Spec.Flush, Since: now, TLS: cfg.Spec.TLS,
		},
		podPatience: podPatience, begun: make(chan struct{}), open: make(chan struct{}), slots: make(chan struct{}, turns), reset: make(chan error, 1),
		moved: make(chan struct{}), covers: make(map[types.UID]*cover),
		status: api.Intercept{
			Connection: cfg.Session.Status().ID, Namespace: cfg.Namespace, Workload: cfg.Workload, State: api.InterceptStarting,
			Mode: cmp.Or(cfg.Spec.Mode, api.ModeAuto), Match: m.String(), Mirror: cfg.Spec.Mirror, Ports: slices.Clone(cfg.Spec.Ports),
			Owner: cfg.Owner, Since: now,
		},
	}
	i.pods, i.objects = pods, objects
	i.status.ID = i.claim.ID
	return i, nil
}

func matchSpec(m api.MatchSpec) match.Spec {
	s := match.Spec{Path: m.Path, Methods: m.Methods}
	for _, h := range m.Headers {
		s.Headers = append(s.Headers, match.Header{Name: h.Name, Value: h.Value})
	}
	return s
}

// Begun is closed once the pods that were there are covered, and were seen to take traffic; or there is no pod to cover, and
// the intercept waits for one.
func (i *Intercept) Begun() <-chan struct{} { return i.begun }

// Run intercepts until ctx ends, which is not an error, or it cannot be done. It then leaves, which takes five seconds at
// most: what has not answered by then is let go of by the agents themselves. Errors are *api.Error.
func (i *Intercept) Run(ctx context.Context) error {
	life, end := context.WithCancel(context.WithoutCancel(ctx)) // of covers: it outlives ctx, so that there are links to leave by
	err := i.run(ctx, life)
	if ctx.Err() != nil {
		err = nil
	}
	i.leave(ctx, err)
	end()
	i.going.Wait()
	i.mu.Lock()
	for uid, c := range i.covers { // nothing is covered any more
		i.past += c.requests.total()
		delete(i.covers, uid)
	}
	i.mu.Unlock()
	if err == nil {
		return nil // not a *api.Error that is nil
	}
	return api.AsError(err)
}

func (i *Intercept) run(ctx, life context.Context) error {
	if err := i.look(ctx); err != nil {
		return err
	}
	g, gctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return i.pods.WatchPods(gctx, i.workload, func(pods []corev1.Pod) { i.update(life, pods) })
	})
	g.Go(func() error {
		if err := i.mayBegin(gctx); err != nil {
			return err
		}
		return i.begin(gctx)
	})
	g.Go(func() error { return i.seeRemoved(gctx) })
	g.Go(func() error {
		select {
		case err := <-i.reset:
			return err
		case <-gctx.Done():
			return gctx.Err()
		}
	})
	return g.Wait()
}

// look reads the workload, and finds out which of its ports are meant.
func (i *Intercept) look(ctx context.Context) error {
	done := i.step("Looking at %s", i.cfg.Workload)
	w, err := i.pods.Workload(ctx, i.cfg.Namespace, i.cfg.Workload)
	if err != nil {
		return err
	}
	if w.Recurs() {
		return api.Errorf(api.ExitWorkload, "no requests are for %s: its pods come by the clock, and end", w).
			WithHint("`kubevpn clone` runs one of them, `kubevpn dev` a program in the place of one.")
	}
	ports, container, err := choosePorts(w, i.cfg.Spec)
	if err != nil {
		return err
	}
	i.warn(w.Notes...)
	done("container %s, %s", container, portsText(ports))
	i.workload, i.container, i.server = w, container, newServer(ports, i.cfg.Dial, i.log)
	for _, p := range ports {
		i.claim.Ports = append(i.claim.Ports, api.AgentPort{Protocol: p.Protocol, Port: p.Container})
	}
	i.mu.Lock()
	i.status.Ports = ports
	i.move()
	i.mu.Unlock()
	return nil
}

// mayBegin asks whether the workload may be intercepted, and for the agent's image. Until it has returned, no pod is touched.
func (i *Intercept) mayBegin(ctx context.Context) error {
	done := i.step("Asking for the right to change %s", i.cfg.Workload)
	asked, actx := errgroup.WithContext(ctx)
	asked.Go(func() error { return i.pods.MayPatch(actx, i.workload) })
	if i.image = i.cfg.Image; i.image == "" {
		asked.Go(func() (err error) {
			i.image, err = i.cfg.Session.Image(actx)
			return err
		})
	}
	if err := asked.Wait(); err != nil {
		return err
	}
	done("granted")
	return nil
}

// update takes the workload's pods, as they are. The covers of new ones live as long as life does.
func (i *Intercept) update(life context.Context, pods []corev1.Pod) {
	i.mu.Lock()
	defer i.mu.Unlock()
	there := make(map[types.UID]bool, len(pods))
	for n := range pods {
		p := &pods[n]
		c := i.covers[p.UID]
		switch {
		case p.Status.Phase == corev1.PodSucceeded || p.Status.Phase == corev1.PodFailed:
			continue
		case p.DeletionTimestamp != nil && (c == nil || !c.covered()): // one that is covered may still serve
			continue
		case c == nil:
			ctx, cancel := context.WithCancel(life)
			c = newCover(i, p, cancel)
			i.covers[p.UID] = c
			i.going.Go(func() { c.run(ctx) })
		}
		c.pod = p
		there[p.UID] = true
	}
	for uid, c := range i.covers {
		if !there[uid] {
			i.past += c.requests.total()
			c.cancel()
			delete(i.covers, uid)
		}
	}
	i.listed = true
	i.move()
}

// begin covers the pods that are there, and says when that is done. Then it has nothing more to do.
func (i *Intercept) begin(ctx context.Context) error {
	if err := i.chooseMode(ctx); err != nil {
		return err
	}
	done := i.step("Covering the pods of %s", i.cfg.Workload)
	first, err := i.lead(ctx)
	if err != nil {
		return err
	}
	close(i.open)
	if first == nil {
		i.warn(fmt.Sprintf("no pod of %s runs: the intercept waits for one", i.cfg.Workload))
		close(i.begun)
		return nil
	}
	if err := i.settle(ctx); err != nil {
		return err
	}
	covered, all := i.count()
	done("%d of %d", covered, all)
	if i.rolled != nil {
		if covered < all { // Services would lead past pods without an agent
			return api.Errorf(api.ExitInject, "the rollout of the agent did not come to its end within %v: %s", rolloutPatience, i.Status().LastError).
				WithHint("`kubectl -n %s describe %s` may say why. It was undone.", i.cfg.Namespace, i.cfg.Workload)
		}
		if err := i.redirectServices(ctx, true); err != nil {
			return err
		}
	}
	if err := i.proveServices(ctx); err != nil {
		return err
	}
	close(i.begun)
	i.log.Info("the intercept has begun", "covered", covered, "pods", all)
	return nil
}

// lead lets one pod after the other be covered, in the order of their names, until one is. It gives nil without an error
// where none runs.
func (i *Intercept) lead(ctx context.Context) (*cover, error) {
	patience := time.Now().Add(i.podPatience)
	if i.rolled != nil {
		patience = time.Now().Add(rolloutPatience)
	}
	tried := make(map[*cover]bool)
	var failed error
	for {
		var next *cover
		bounded, cancel := context.WithDeadline(ctx, patience)
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
			return nil, nil
		case next == nil:
			return nil, failed // of all that run
		}
		tried[next] = true
		close(next.allowed)
		covered, why := i.follow(ctx, next)
		switch {
		case ctx.Err() != nil:
			return nil, ctx.Err()
		case covered:
			return next, nil
		case why == nil: // the pod has gone
			continue
		}
		if final(why) {
			return nil, why
		}
		i.log.Warn("the first pod", "pod", next.name, "err", why)
		failed = cmp.Or(failed, why)
	}
}

// follow waits until the pod is covered, or it is known why not, or the pod has gone.
func (i *Intercept) follow(ctx context.Context, c *cover) (covered bool, why error) {
	patience := leadPatience
	for {
		bounded, cancel := context.WithTimeout(ctx, patience)
		var held bool
		err := i.await(bounded, func() bool {
			held = c.waitsForOwn() && patience == leadPatience
			return c.proved || c.failed != nil || i.covers[c.pod.UID] != c || held
		})
		cancel()
		i.mu.Lock()
		covered, why = c.proved, c.failed
		if err != nil && ctx.Err() == nil {
			why = api.Errorf(api.ExitInject, "the agent in the pod %s does not answer: %s", c.name, c.reason())
			if refused := c.linked.err; c.waitsForOwn() {
				why = refused
			}
		}
		i.mu.Unlock()
		if !held {
			return covered, why
		}
		i.warn("an earlier intercept of yours ended without leaving: it is let go of within a minute, and waited for")
		patience = holdPatience
	}
}

// final reports whether an error of one pod is one of them all.
func final(err error) bool {
	switch api.AsError(err).Code {
	case api.ExitConflict, api.ExitIntercept, api.ExitPermission:
		return true
	}
	return false
}

// settle waits until each pod that runs is covered, or it is known why not.
func (i *Intercept) settle(ctx context.Context) error {
	patience := beginPatience
	if i.rolled != nil {
		patience = rolloutPatience
	}
	bounded, cancel := context.WithTimeout(ctx, patience)
	defer cancel()
	said := 0
	err := i.await(bounded, func() bool {
		covered, settled := 0, true
		for _, c := range i.covers {
			if c.covered() {
				covered++
			} else if c.runs() && c.failed == nil {
				settled = false
			}
		}
		if covered > said && !settled {
			said = covered
			i.tell(fmt.Sprintf("Covering the pods of %s", i.cfg.Workload), "%d of %d", covered, len(i.covers))
		}
		return settled
	})
	if err != nil && ctx.Err() == nil {
		return nil // Status says what the others wait for
	}
	return err
}

// count gives how many pods are covered, and how many there are.
func (i *Intercept) count() (covered, all int) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for _, c := range i.covers {
		if c.covered() {
			covered++
		}
	}
	return covered, len(i.covers)
}

// sorted gives the covers in the order of their pods' names; i.mu is held.
func (i *Intercept) sorted() []*cover {
	all := make([]*cover, 0, len(i.covers))
	for _, c := range i.covers {
		all = append(all, c)
	}
	slices.SortFunc(all, func(a, b *cover) int { return cmp.Compare(a.name, b.name) })
	return all
}

// leave takes back what the agents were told.
func (i *Intercept) leave(ctx context.Context, why error) {
	i.mu.Lock()
	i.status.State = api.InterceptLeaving
	if why != nil {
		i.status.State, i.status.Error = api.InterceptFailed, api.AsError(why)
	}
	covers := i.sorted()
	i.move()
	i.mu.Unlock()
	bounded, cancel := context.WithTimeout(context.WithoutCancel(ctx), leaveTimeout)
	defer cancel()
	var releases sync.WaitGroup
	for _, c := range covers {
		releases.Go(func() { c.release(bounded) })
	}
	releases.Wait()
	if err := i.rollBack(bounded); err != nil {
		i.log.Error("taking the agent out of the template", "err", err)
		i.warn(fmt.Sprintf("the agent stays in the template of %s: %v; `kubevpn reset %s` removes it", i.cfg.Workload, err, i.cfg.Workload))
	}
}

// await waits until ok, which is called with mu held, holds.
func (i *Intercept) await(ctx context.Context, ok func() bool) error {
	for {
		i.mu.Lock()
		there, moved := ok(), i.moved
		i.mu.Unlock()
		if there {
			return nil
		}
		select {
		case <-moved:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// move wakes those who await. Call with mu held.
func (i *Intercept) move() {
	close(i.moved)
	i.moved = make(chan struct{})
}

// step reports that a step begins; the function that it returns reports its end.
func (i *Intercept) step(format string, args ...any) (done func(format string, args ...any)) {
	name := fmt.Sprintf(format, args...)
	i.log.Info(name)
	i.cfg.Progress(api.Event{Time: time.Now(), Step: name})
	return func(format string, args ...any) {
		detail := fmt.Sprintf(format, args...)
		i.log.Info(name, "result", detail)
		i.cfg.Progress(api.Event{Time: time.Now(), Step: name, Detail: detail, Done: true})
	}
}

// tell reports what is seen of a step that goes on.
func (i *Intercept) tell(step, format string, args ...any) {
	i.cfg.Progress(api.Event{Time: time.Now(), Step: step, Detail: fmt.Sprintf(format, args...)})
}

// warn tells the user, and keeps it in the status.
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
