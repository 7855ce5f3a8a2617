package intercept

import (
	"cmp"
	"context"
	"crypto/ecdsa"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"slices"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/dynamic"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

const (
	resetTimeout = 60 * time.Second // of one pod
	endTimeout   = 5 * time.Second  // for the agents of a pod to end after the order

	resetReason = "Reset" // of an Event
)

// ResetConfig configures Reset. Reset needs no session: it reaches agents through port-forwards.
type ResetConfig struct {
	Cluster   *client.Cluster
	Namespace string
	Workload  string // TYPE/NAME
	// Image returns the image of the agent that Reset adds to pods. Reset calls it at most once, before it changes
	// anything.
	Image    func(context.Context) (string, error)
	Owner    string // the name that the owners of the removed intercepts see: user@host
	Mine     bool   // limits Reset to agents that killed daemons with this Key left in the template
	Key      *ecdsa.PrivateKey
	Progress func(api.Event)
	Logger   *slog.Logger
}

// Reset removes the intercepts of all owners from the workload, and ends the agents in its pods. It requires the right
// to patch the workload: it adds an agent of this user to each pod that has agents, and that agent orders the others to
// end. Errors are *api.Error.
func Reset(ctx context.Context, cfg ResetConfig) error {
	if err := resetAll(ctx, cfg, podsOf(cfg.Cluster), cfg.Cluster.Dynamic()); err != nil {
		return api.AsError(err)
	}
	return nil
}

type resetter struct {
	cfg      ResetConfig
	pods     pods
	identity identity
	image    string         // of the agents that reset adds
	states   workloads.Pods // updated by find
}

func resetAll(ctx context.Context, cfg ResetConfig, pods pods, objects dynamic.Interface) error {
	id, err := newIdentity(cfg.Key)
	if err != nil {
		return err
	}
	r := &resetter{cfg: cfg, pods: pods, identity: id}
	step := "Listing the agents in the pods of " + r.cfg.Workload
	r.progress(api.Event{Step: step})
	w, err := r.pods.Workload(ctx, r.cfg.Namespace, r.cfg.Workload)
	if err != nil {
		return err
	}
	if cfg.Mine {
		// An earlier daemon may have left them in the template.
		removed, err := writer{pods, objects, w}.removeAgents(ctx, id.hash)
		if err == nil && !removed {
			err = api.Errorf(api.ExitWorkload, "%s is not intercepted from here, and its template has no agent of %s",
				cfg.Workload, cfg.Owner).
				WithHint("`kubevpn status` lists intercepts; `kubevpn reset` removes intercepts of all owners")
		}
		if err == nil {
			r.progress(api.Event{Step: step, Detail: "removed the leftover agent from the template", Done: true})
		}
		return err
	}
	if err := r.pods.MayPatch(ctx, w); err != nil {
		return err
	}
	intercepted, all, stop, err := r.find(ctx, w)
	defer stop()
	if err != nil {
		return err
	}
	if slices.ContainsFunc(intercepted, func(p corev1.Pod) bool { return !hasSidecar(&p) }) {
		if r.image, err = cfg.Image(ctx); err != nil {
			return err
		}
	}
	r.progress(api.Event{Step: step, Detail: fmt.Sprintf("%d of %d pods had an agent", len(intercepted), all),
		Done: true})
	// The event comes first, so that the owners' laptops do not take the change of the template for an accident.
	events := workloads.Recorder{Kube: pods.Kube(), Logger: cfg.Logger, Workload: w, Owner: cfg.Owner}
	events.Record(ctx, resetReason, "removes the intercepts and clones of all owners from %s", w)
	if _, err := (writer{pods, objects, w}).removeAgents(ctx, ""); err != nil {
		return err
	}
	if len(intercepted) > 0 {
		if err := r.resetEach(ctx, intercepted); err != nil {
			return err
		}
	}
	return nil
}

// resetEach removes the intercepts of each pod, maxAdding at a time. The failure of one pod does not stop the others.
func (r *resetter) resetEach(ctx context.Context, intercepted []corev1.Pod) error {
	step := "Removing the intercepts of " + r.cfg.Workload
	r.progress(api.Event{Step: step})
	removed := make([][]api.Claim, len(intercepted))
	errs := make([]error, len(intercepted))
	var g errgroup.Group
	g.SetLimit(maxAdding)
	for n := range intercepted {
		g.Go(func() error {
			ctx, cancel := context.WithTimeoutCause(ctx, resetTimeout, fmt.Errorf("no answer within %v", resetTimeout))
			defer cancel()
			if removed[n], errs[n] = r.reset(ctx, &intercepted[n]); errs[n] == nil {
				r.progress(api.Event{Step: step, Detail: intercepted[n].Name})
			}
			return nil // continue with the other pods
		})
	}
	_ = g.Wait() // no function returns an error: errs has them
	if err := errors.Join(errs...); err != nil {
		return err
	}
	r.progress(api.Event{Step: step, Detail: describe(slices.Concat(removed...)), Done: true})
	return nil
}

func (r *resetter) progress(e api.Event) {
	e.Time = time.Now()
	r.cfg.Progress(e)
}

// find returns the pods with running agents, and the number of all pods. It watches the pods until the caller calls
// stop.
func (r *resetter) find(ctx context.Context,
	w *workloads.Workload) (intercepted []corev1.Pod, all int, stop func(), err error) {
	listing, end := context.WithCancelCause(ctx)
	stop = wakeup.Go(ctx, func(ctx context.Context) { end(r.pods.WatchPods(ctx, w, r.states.Update)) })
	pods, err := r.states.List(listing)
	if err != nil {
		return nil, 0, stop, context.Cause(listing)
	}
	for _, p := range pods {
		if p.DeletionTimestamp == nil && agentRuns(&p) {
			intercepted = append(intercepted, p)
		}
	}
	return intercepted, len(pods), stop, nil
}

// agentRuns reports whether an agent of any owner runs in the pod. Do not run its image elsewhere: the owner chose it.
func agentRuns(p *corev1.Pod) bool {
	return slices.ContainsFunc(slices.Concat(p.Status.EphemeralContainerStatuses, p.Status.ContainerStatuses),
		func(s corev1.ContainerStatus) bool {
			return api.IsAgent(s.Name) && s.State.Running != nil
		})
}

// hasSidecar reports whether the pod's template contains an agent. The rollout replaces such a pod.
func hasSidecar(p *corev1.Pod) bool {
	return slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return api.IsAgent(c.Name) })
}

// reset ends the agents of one pod, and returns the claims that they had. It leaves a pod with a sidecar to the
// rollout.
func (r *resetter) reset(ctx context.Context, p *corev1.Pod) ([]api.Claim, error) {
	if hasSidecar(p) {
		return nil, nil
	}
	agent, _, err := r.pods.Inject(ctx, p,
		workloads.Agent{Image: r.image, Owner: r.identity.hash, OwnerName: r.cfg.Owner})
	if errors.Is(err, client.ErrPodGone) {
		return nil, nil // its agents have ended with it
	}
	if err != nil {
		return nil, err
	}
	var claims []api.Claim
	var failed error
	ordered := false
	following, stop := context.WithCancel(ctx)
	defer stop()
	log := workloads.Log{Namespace: p.Namespace, Pod: p.Name, Container: agent, Await: r.states.Await(p)}
	ended := r.pods.FollowLog(following, log, func(line string) {
		info, ok := parseInfo(line)
		switch {
		case !ok || ordered:
		case info.Error != nil:
			failed = fmt.Errorf("the agent in pod %s: %w", p.Name, info.Error)
		default:
			ordered = true
			if claims, failed = r.order(ctx, p, info); failed != nil {
				stop()
			}
			time.AfterFunc(endTimeout, stop) // until then, wait for the end of the agents
		}
	})
	switch {
	case ordered || failed != nil:
		return claims, failed
	case ctx.Err() != nil:
		return nil, context.Cause(ctx)
	}
	return nil, ended
}

// order sends the reset order to the leader that info names, and returns the claims before the reset.
func (r *resetter) order(ctx context.Context, p *corev1.Pod, info api.AgentInfo) (claims []api.Claim, err error) {
	running, end := context.WithCancel(ctx)
	defer end()
	answered := false
	client := transport.NewClient(transport.ClientConfig{
		Dial: func(ctx context.Context) (net.Conn, error) {
			return dialTLS(ctx, r.identity.tlsConfig(info.Key), func(ctx context.Context) (net.Conn, error) {
				return r.pods.DialPod(ctx, p.Namespace, p.Name, info.Port)
			})
		},
		OnSession: func(ctx context.Context, s *transport.Session) {
			if !answered { // only the first answer counts
				claims, err = resetBy(ctx, s)
				answered = true
			}
			end()
		},
		DialTimeout: agentDialTimeout, Links: 1, Tuning: tuning(), Logger: r.cfg.Logger,
	})
	failed := client.Run(running)
	if !answered || err != nil && ctx.Err() != nil {
		return nil, fmt.Errorf("connecting to the agent in pod %s: %w", p.Name, cmp.Or(context.Cause(ctx), failed))
	}
	return claims, err
}

// resetBy sends the reset order over the session, and returns the claims before the reset.
func resetBy(ctx context.Context, s *transport.Session) ([]api.Claim, error) {
	c, err := startConversation(ctx, s, api.AgentHello{})
	if err != nil {
		return nil, err
	}
	var following sync.WaitGroup
	defer following.Wait()
	defer c.control.Close()
	states := make(chan *api.AgentState, 1)
	following.Go(func() {
		_ = c.follow(func(state *api.AgentState) { // order reports the end of the conversation
			select {
			case states <- state: // only the first report precedes the order
			default:
			}
		})
		close(states)
	})
	var claims []api.Claim
	select {
	case state, ok := <-states:
		if ok {
			claims = state.Claims
		}
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	_, err = c.order(ctx, api.AgentOrder{Reset: true})
	return claims, err
}

// describe returns text like "bob@desk: everything; ann@laptop: x-user=me".
func describe(claims []api.Claim) string {
	if len(claims) == 0 {
		return "no intercepts; the agents have ended"
	}
	var texts []string
	for _, c := range claims {
		if text := c.Owner + ": " + c.Match; !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "; ")
}
