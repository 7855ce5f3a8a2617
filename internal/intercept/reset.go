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

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
	"kubevpn/pkg/transport"
)

const (
	resetTimeout  = 60 * time.Second // of one pod
	farewellAfter = 5 * time.Second  // what the agents of a pod may take to end, once they were told to
)

// ResetConfig is what Reset needs. There is no session: agents are reached by port-forwards.
type ResetConfig struct {
	Cluster   *cluster.Cluster
	Namespace string
	Workload  string // TYPE/NAME
	Image     string // of the agent; empty: of the one that runs in the pod
	Owner     string // what those who are told call us: user@host
	Mine      bool   // only what earlier daemons of Owner's left in the template, as they were killed
	Key       *ecdsa.PrivateKey
	Progress  func(api.Event)
	Logger    *slog.Logger
}

// Reset removes all intercepts of the workload, whoever made them, and has the agents of its pods end. Whoever may change the
// workload may do that: an agent of the user's own is added to each pod that has agents, and gives the order. Errors are
// *api.Error.
func Reset(ctx context.Context, cfg ResetConfig) error {
	if err := resetAll(ctx, cfg, cfg.Cluster, restObjects{cfg.Cluster.Kube().CoreV1().RESTClient()}); err != nil {
		return api.AsError(err)
	}
	return nil
}

type resetter struct {
	cfg      ResetConfig
	pods     pods
	identity identity
}

func resetAll(ctx context.Context, cfg ResetConfig, pods pods, objects objects) error {
	id, err := newIdentity(cfg.Key)
	if err != nil {
		return err
	}
	r := resetter{cfg: cfg, pods: pods, identity: id}
	step := "Looking for agents in the pods of " + r.cfg.Workload
	r.tell(api.Event{Step: step})
	w, err := r.pods.Workload(ctx, r.cfg.Namespace, r.cfg.Workload)
	if err != nil {
		return err
	}
	if cfg.Mine {
		removed, err := (writer{pods, objects, w}).remove(ctx, func(_, name string) bool { return name == cfg.Owner })
		if err == nil && !removed {
			err = api.Errorf(api.ExitWorkload, "%s is not intercepted from here, and its template has no agent of %s", cfg.Workload, cfg.Owner).
				WithHint("`kubevpn status` shows what is intercepted; `kubevpn reset` removes what others have")
		}
		if err == nil {
			r.tell(api.Event{Step: step, Detail: "the template had one that was left there; it is removed", Done: true})
		}
		return err
	}
	if err := r.pods.MayPatch(ctx, w); err != nil {
		return err
	}
	intercepted, all, err := r.find(ctx, w)
	if err != nil {
		return err
	}
	r.tell(api.Event{Step: step, Detail: fmt.Sprintf("%d of %d pods had an agent", len(intercepted), all), Done: true})
	if err := (writer{pods, objects, w}).rollBack(ctx, ""); err != nil {
		return err
	}
	if len(intercepted) == 0 {
		return nil
	}

	step = "Removing the intercepts of " + r.cfg.Workload
	r.tell(api.Event{Step: step})
	removed := make([][]api.Claim, len(intercepted))
	errs := make([]error, len(intercepted))
	var g errgroup.Group
	g.SetLimit(turns)
	for n := range intercepted {
		g.Go(func() error {
			ctx, cancel := context.WithTimeoutCause(ctx, resetTimeout, fmt.Errorf("no answer within %v", resetTimeout))
			defer cancel()
			if removed[n], errs[n] = r.reset(ctx, &intercepted[n]); errs[n] == nil {
				r.tell(api.Event{Step: step, Detail: intercepted[n].Name})
			}
			return nil // the other pods are reset all the same
		})
	}
	g.Wait()
	if err := errors.Join(errs...); err != nil {
		return err
	}
	r.tell(api.Event{Step: step, Detail: describe(slices.Concat(removed...)), Done: true})
	return nil
}

func (r *resetter) tell(e api.Event) {
	e.Time = time.Now()
	r.cfg.Progress(e)
}

// find gives the pods that have agents that have not ended, and how many pods there are.
func (r *resetter) find(ctx context.Context, w *cluster.Workload) (intercepted []corev1.Pod, all int, err error) {
	enough := errors.New("enough") // of the watch: its first list is whole
	watching, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	err = r.pods.WatchPods(watching, w, func(pods []corev1.Pod) {
		if watching.Err() != nil {
			return
		}
		all = len(pods)
		for _, p := range pods {
			if p.DeletionTimestamp == nil && runningAgent(&p) != "" {
				intercepted = append(intercepted, p)
			}
		}
		cancel(enough)
	})
	if errors.Is(context.Cause(watching), enough) {
		err = nil
	}
	return intercepted, all, err
}

// runningAgent is the image of an agent that runs in the pod, whoever's; "": there is none.
func runningAgent(p *corev1.Pod) (image string) {
	runs := func(name string, statuses []corev1.ContainerStatus) bool {
		return isAgent(name) &&
			slices.ContainsFunc(statuses, func(s corev1.ContainerStatus) bool { return s.Name == name && s.State.Running != nil })
	}
	for _, c := range p.Spec.EphemeralContainers {
		if runs(c.Name, p.Status.EphemeralContainerStatuses) {
			return c.Image
		}
	}
	for _, c := range p.Spec.Containers {
		if runs(c.Name, p.Status.ContainerStatuses) {
			return c.Image
		}
	}
	return ""
}

// reset has the agents of one pod end, and gives what others had claimed. A pod with an agent in its template is about to go.
func (r *resetter) reset(ctx context.Context, p *corev1.Pod) ([]api.Claim, error) {
	if slices.ContainsFunc(p.Spec.Containers, func(c corev1.Container) bool { return isAgent(c.Name) }) {
		return nil, nil
	}
	agent, _, err := r.pods.Inject(ctx, p, cluster.Agent{Image: cmp.Or(r.cfg.Image, runningAgent(p)), Owner: r.identity.hash, OwnerName: r.cfg.Owner})
	if errors.Is(err, cluster.ErrPodGone) {
		return nil, nil // and its agents with it
	}
	if err != nil {
		return nil, err
	}
	ctx, cancel := context.WithCancel(ctx)
	var listening sync.WaitGroup
	defer listening.Wait()
	defer cancel()
	greetings, ended := make(chan api.AgentGreeting, 1), make(chan error, 1)
	listening.Go(func() {
		ended <- r.pods.FollowLog(ctx, p.Namespace, p.Name, agent, func(line string) {
			if g, ok := parseGreeting(line); ok {
				select {
				case <-greetings: // the latest is the one
				default:
				}
				greetings <- g
			}
		})
	})
	var refusal error
	for {
		select {
		case g := <-greetings:
			if g.Error != nil {
				refusal = fmt.Errorf("the agent in the pod %s: %w", p.Name, g.Error)
				continue
			}
			claims, err := r.order(ctx, p, g)
			if err != nil {
				return nil, err
			}
			select { // they end as they were told
			case <-ended:
			case <-time.After(farewellAfter):
			case <-ctx.Done():
			}
			return claims, nil
		case err := <-ended:
			if refusal != nil {
				err = refusal
			}
			return nil, err
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
	}
}

// order gives the order to the primary that the greeting names.
func (r *resetter) order(ctx context.Context, p *corev1.Pod, g api.AgentGreeting) ([]api.Claim, error) {
	type answer struct {
		claims []api.Claim
		err    error
	}
	answers := make(chan answer, 1)
	ctx, cancel := context.WithCancel(ctx)
	client := transport.NewClient(transport.ClientConfig{
		Dial: func(ctx context.Context) (net.Conn, error) {
			return secure(ctx, r.identity.towards(g.Key), func(ctx context.Context) (net.Conn, error) {
				return r.pods.DialPod(ctx, p.Namespace, p.Name, g.Port)
			})
		},
		OnSession: func(ctx context.Context, s *transport.Session) {
			claims, err := resetBy(ctx, s)
			select {
			case answers <- answer{claims, err}:
			default: // it was given once
			}
		},
		DialTimeout: carrierTimeout, Links: 1, Tuning: tuning(), Logger: r.cfg.Logger,
	})
	running := make(chan error, 1)
	go func() { running <- client.Run(ctx) }()
	defer func() {
		cancel()
		<-running
	}()
	select {
	case a := <-answers:
		return a.claims, a.err
	case err := <-running:
		running <- err
		return nil, fmt.Errorf("reaching the agent in the pod %s: %w", p.Name, err)
	case <-ctx.Done():
		return nil, fmt.Errorf("reaching the agent in the pod %s: %w", p.Name, context.Cause(ctx))
	}
}

// resetBy orders the reset over the session, and gives the claims that there were.
func resetBy(ctx context.Context, s *transport.Session) ([]api.Claim, error) {
	c, err := talk(ctx, s)
	if err != nil {
		return nil, err
	}
	var following sync.WaitGroup
	defer following.Wait()
	defer c.control.Close()
	states := make(chan *api.AgentState, 1)
	following.Go(func() {
		c.follow(func(state *api.AgentState) { // that it ends shows in order
			select {
			case states <- state: // the first: what there is before the order
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
	return claims, c.order(ctx, api.AgentOrder{Reset: true})
}

// describe is "bob@desk: everything; ann@laptop: x-user=me".
func describe(claims []api.Claim) string {
	if len(claims) == 0 {
		return "there were none; the agents have ended"
	}
	var texts []string
	for _, c := range claims {
		if text := c.Owner + ": " + c.Match; !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, "; ")
}
