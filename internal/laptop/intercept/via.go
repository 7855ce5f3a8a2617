package intercept

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/netip"
	"slices"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	authorizationv1 "k8s.io/api/authorization/v1"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/kubectl/pkg/util/podutils"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// Via lets flows leave from inside a pod of a workload, with the identity that its peers see, and gives a program the
// pod's localhost. It is an Intercept that claims nothing: it adds its agent to one pod, and its session with the agent
// carries the flows.
//
//	a pod runs ─▶ chosen: the agent is added ─▶ session ─▶ Session returns it
//	   the pod is deleted or no longer ready, or its agent ends ─▶ the next pod; the flows of a pod end with it
//
// Call Run once. The other methods are safe for concurrent use at any time.
type Via struct {
	i         *Intercept
	egress    string                           // as in api.ConnectRequest
	localhost Localhost                        // nil: the pod's localhost is not wanted
	mayExec   bool                             // the user may exec in the pods; set by run
	replaced  []uint16                         // ports that do not answer on localhost; set by run
	session   wakeup.Value[*transport.Session] // nil: no pod carries flows now
	listens   wakeup.Value[[]netip.AddrPort]   // where the pod's loopback addresses answer
	now       *podIntercept                    // whose session it is; guarded by podSet.mu
}

// carryTimeout limits how long a flow waits for a pod. Another pod takes over within two seconds, but on a busy node
// its agent takes longer to start.
const carryTimeout = 15 * time.Second

// podSession is a session that carries flows from a pod.
type podSession struct {
	session *transport.Session
	names   *api.PodNames
}

// ViaConfig configures NewVia. It uses Cluster, Session, Namespace, Workload, Image, Objects, Owner, Key, Progress and
// Logger of Config.
type ViaConfig struct {
	Config
	Egress    string    // as in api.ConnectRequest
	Localhost Localhost // of the program; nil: it does not want that of the pod
	Replaces  string    // the container whose ports do not answer on localhost; empty: the default one
}

// NewVia returns a Via for Run. Errors are *api.Error.
func NewVia(cfg ViaConfig) (*Via, error) {
	i, err := New(cfg.Config)
	if err != nil {
		return nil, err
	}
	return newVia(i, cfg), nil
}

func newVia(i *Intercept, cfg ViaConfig) *Via {
	i.cfg.Spec.Container = cfg.Replaces
	i.via, i.claim.ID = &Via{i: i, egress: cfg.Egress, localhost: cfg.Localhost}, ""
	i.fail = func(why error) { i.log.Warn("the agent was removed; adding another one", "err", why) }
	return i.via
}

// Begun returns a channel that closes once flows can leave from a pod, or, with api.EgressNone, once localhost answers
// as far as it will.
func (v *Via) Begun() <-chan struct{} { return v.i.begun }

// Session returns the session that carries flows, as soon as there is one. It fails with EHOSTUNREACH if no pod carries
// flows for a while.
func (v *Via) Session(ctx context.Context) (*transport.Session, error) {
	bounded, cancel := context.WithTimeout(ctx, carryTimeout)
	defer cancel()
	s, err := v.session.Await(bounded, func(s *transport.Session) bool { return s != nil && s.Err() == nil })
	if err != nil && ctx.Err() == nil {
		return nil, fmt.Errorf("%s: %w", v.Status().Error, syscall.EHOSTUNREACH)
	}
	return s, err
}

// Names returns the name resolution of the pod from which flows leave, or nil if there is none, and a channel that is
// closed when another pod is chosen. The caller must not change the names.
func (v *Via) Names() (*api.PodNames, <-chan struct{}) {
	v.i.mu.Lock()
	defer v.i.mu.Unlock()
	_, changed := v.session.Get()
	if v.now == nil || v.now.carries == nil {
		return nil, changed
	}
	return v.now.carries.names, changed
}

// Status returns from which pod flows leave, or why they do not.
func (v *Via) Status() api.Via {
	v.i.mu.Lock()
	defer v.i.mu.Unlock()
	s := api.Via{Namespace: v.i.cfg.Namespace, Workload: v.i.cfg.Workload}
	if v.i.modeChosen { // the subject is known
		s.Workload = v.i.workload.String()
	}
	if v.now != nil {
		s.Pod = v.now.name
		return s
	}
	for _, c := range v.i.sorted() {
		if c.allowed {
			s.Error = c.name + ": " + c.reason()
		}
	}
	s.Error = cmp.Or(s.Error, "no pod runs")
	return s
}

// Run keeps a session with an agent in one of the pods until ctx ends, which is not an error, or until it cannot begin.
// Errors are *api.Error.
func (v *Via) Run(ctx context.Context) error {
	i := v.i
	life, end := context.WithCancel(ctx)
	defer func() {
		end()
		i.running.Wait()
		i.update(nil, nil)
	}()
	err := v.run(ctx, life)
	if ctx.Err() != nil || err == nil {
		return nil
	}
	i.mu.Lock()
	shared := slices.ContainsFunc(i.sorted(), v.wants) ||
		i.workload != nil && workloads.Shared(i.workload.Template.Spec)
	i.mu.Unlock()
	if v.egress == api.EgressNone && !shared {
		i.log.Info("the pod's localhost does not answer, and probably nothing serves there", "err", err)
		return nil
	}
	return api.AsError(err)
}

func (v *Via) run(ctx, life context.Context) error {
	i := v.i
	reading, rctx := errgroup.WithContext(ctx)
	reading.Go(func() (err error) {
		i.subject, err = i.readSubject(rctx)
		return err
	})
	reading.Go(func() error {
		v.mayExec = i.mayExec(rctx)
		return nil
	})
	if err := reading.Wait(); err != nil {
		return err
	}
	if v.egress == api.EgressAll && !v.mayExec {
		return v.mustExec("only who may lets everything leave through a pod").
			WithHint("Without --egress all, connections to the cluster leave through it.")
	}
	i.set(func() { i.modeChosen = true })
	g, ctx := errgroup.WithContext(ctx)
	g.Go(func() error {
		return i.pods.WatchPods(ctx, i.workload, func(pods []corev1.Pod) {
			i.update(pods, func(p *corev1.Pod) *podIntercept { return i.startPod(life, p) })
		})
	})
	g.Go(func() error {
		if err := v.begin(ctx); err != nil {
			return err
		}
		g.Go(func() error {
			v.serveLocalhost(ctx, sync.OnceFunc(func() { close(i.begun) }))
			return nil
		})
		return v.keep(ctx, func() bool { return false })
	})
	return g.Wait()
}

// mustExec returns the error that the user may not exec, and what that means.
func (v *Via) mustExec(so string) *api.Error {
	return api.Errorf(api.ExitPermission, "you lack the right to create pods/exec in the namespace %s: %s",
		v.i.cfg.Namespace, so)
}

// begin returns when flows can leave from a pod. It fails if no pod runs, or if all that run fail again. With
// api.EgressNone it returns as well if no pod has a localhost that the program could want.
func (v *Via) begin(ctx context.Context) error {
	i := v.i
	bounded, cancel := context.WithTimeout(ctx, beginTimeout)
	defer cancel()
	if v.egress == api.EgressNone {
		alone := false
		err := i.await(bounded, func() bool {
			alone = !slices.ContainsFunc(i.sorted(), v.wants)
			return i.listed
		})
		if err != nil || alone {
			return err
		}
		if !v.mayExec {
			return v.mustExec("what other containers of the pod serve on localhost does not answer")
		}
	}
	done := i.step("Adding the agent to a pod of %s", i.cfg.Workload)
	var failed error
	none := false
	err := v.keep(bounded, func() bool {
		failed, none = nil, i.listed && len(i.sorted()) == 0
		for _, c := range i.sorted() {
			if c.runs() && !c.failsAgain() {
				failed = nil
				break
			}
			failed = cmp.Or(failed, c.failed)
		}
		return v.now != nil || failed != nil || none
	})
	switch {
	case failed != nil:
		return failed
	case none, err != nil && ctx.Err() == nil:
		return api.Errorf(api.ExitWorkload, "connections cannot leave through %s: %s", i.cfg.Workload,
			v.Status().Error).
			WithHint("`kubectl -n %s get pods` shows its pods.", api.ShellQuote(i.cfg.Namespace))
	case err == nil:
		done("in pod %s", v.describe())
	}
	return err
}

// describe names the pod from which flows leave, and says whether it is ready.
func (v *Via) describe() string {
	v.i.mu.Lock()
	defer v.i.mu.Unlock()
	switch {
	case v.now == nil:
		return "that has just gone"
	case !podutils.IsPodReady(v.now.pod):
		return v.now.name + ", which is not ready"
	}
	return v.now.name
}

// keep chooses a pod whenever something changes, until enough returns true or ctx ends. It calls enough with mu held.
func (v *Via) keep(ctx context.Context, enough func() bool) error {
	return v.i.await(ctx, func() bool {
		v.choose()
		return enough()
	})
}

// choose makes flows leave from a pod: from the present one while that serves, else from one whose agent answers. If
// there is none, it lets the next pod have an agent. The caller holds mu.
func (v *Via) choose() {
	var pods []*podIntercept
	for _, c := range v.i.sorted() {
		if c.runs() && v.wants(c) {
			pods = append(pods, c)
		}
	}
	slices.SortStableFunc(pods, readyFirst)
	var best *podIntercept
	for _, c := range pods {
		if c.carries == nil || !c.active() {
			continue
		}
		if best == nil || c == v.now && readyFirst(c, best) == 0 {
			best = c
		}
	}
	v.use(best)
	for _, c := range pods {
		if c == best || c.allowed && c.failed == nil && (c.phase != verified || c.active()) {
			return // its agent answers, or is on the way
		}
		if !c.allowed {
			c.allowed = true
			v.i.changed.Send()
			return
		}
	}
}

// use makes flows leave from a pod; nil: from none. The caller holds mu.
func (v *Via) use(c *podIntercept) {
	if c == nil && v.now != nil {
		v.i.log.Warn("no pod carries flows", "last", v.now.name)
	}
	v.now = c
	var next *transport.Session
	var listens []netip.AddrPort
	if c != nil {
		next = c.carries.session
		listens = loopbackPorts(c.linked.state, v.replaced)
	}
	if v.session.Load() != next {
		v.session.Update(func(now **transport.Session) { *now = next })
	}
	if !slices.Equal(v.listens.Load(), listens) {
		v.listens.Update(func(now *[]netip.AddrPort) { *now = listens })
	}
}

// wants reports whether the Via needs an agent in the pod: not for the localhost of a container that is alone.
func (v *Via) wants(c *podIntercept) bool {
	return v.egress != api.EgressNone || workloads.Shared(c.pod.Spec)
}

// readyFirst sorts the pods that are ready before the others.
func readyFirst(a, b *podIntercept) int {
	switch ready := podutils.IsPodReady(a.pod); {
	case ready == podutils.IsPodReady(b.pod):
		return 0
	case ready:
		return -1
	}
	return 1
}

// mayExec reports whether the user may exec in the namespace's pods, and so reach whatever they reach.
func (i *Intercept) mayExec(ctx context.Context) bool {
	ctx, cancel := context.WithTimeout(ctx, causeTimeout)
	defer cancel()
	review := &authorizationv1.SelfSubjectAccessReview{Spec: authorizationv1.SelfSubjectAccessReviewSpec{
		ResourceAttributes: &authorizationv1.ResourceAttributes{Namespace: i.cfg.Namespace, Verb: "create",
			Resource: "pods", Subresource: "exec"},
	}}
	reviews := i.pods.Kube().AuthorizationV1().SelfSubjectAccessReviews()
	answer, err := reviews.Create(ctx, review, metav1.CreateOptions{})
	if err != nil {
		i.log.Info("cannot ask whether you may exec in pods", "err", err)
		return false
	}
	return answer.Status.Allowed
}

// carry makes the session carry flows while it lasts. It is agentSession.serve.
func (c *podIntercept) carry(ctx context.Context, l *agentSession, s *transport.Session) {
	report, err := l.order(ctx, api.AgentOrder{Names: true})
	if err == nil && report.Names == nil {
		err = errors.New("it says nothing")
	}
	if ctx.Err() != nil {
		return
	}
	if err != nil {
		c.i.set(func() { c.fails(fmt.Errorf("asking the agent in pod %s for the pod's names: %w", c.name, err)) })
		return
	}
	now := &podSession{s, report.Names}
	c.i.set(func() { c.carries = now })
	<-ctx.Done()
	c.i.set(func() {
		if c.carries == now {
			c.carries = nil
		}
	})
}
