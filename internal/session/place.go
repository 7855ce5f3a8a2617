package session

import (
	"context"
	"errors"
	"net"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/install"
)

const (
	// dialTimeout bounds a carrier's dial; no part of it may use up what the others need. A pod whose node has died
	// does not refuse: the API server waits for the node, and the pod is there until it is evicted.
	dialTimeout     = forwardTimeout + relocateTimeout + 10*time.Second
	forwardTimeout  = 15 * time.Second // the port-forward to the pod that was used before
	relocateTimeout = 5 * time.Second  // looking for another pod
)

func (s *Session) ensureManager(ctx context.Context) error {
	done := s.step("Finding the traffic manager")
	r := s.cfg.Request
	result, err := install.Ensure(ctx, s.cluster, install.Options{
		Namespace: r.ManagerNamespace, FallbackNamespace: r.Namespace, Image: r.Image, Upgrade: r.Upgrade,
		Progress: s.cfg.Progress,
	})
	if err != nil {
		return err
	}
	s.mu.Lock()
	s.status.ManagerNamespace, s.status.ManagerPod = result.Namespace, result.Pod
	s.imageWarning = result.ImageWarning
	s.mu.Unlock()
	s.warn(result.Warnings...)
	verb := "found"
	if result.Installed {
		verb = "installed"
	}
	done("%s: pod %s/%s, image %s", verb, result.Namespace, result.Pod, result.Image)
	return nil
}

// upgradeTimeout bounds moving the session to a manager that runs already, to which a gateway may have to be added.
const upgradeTimeout = 45 * time.Second

// Upgrade replaces the traffic manager with one of the image, unless it runs that, and returns when the session has
// moved to it. What is open through the old one ends. The session must be connected. Errors are *api.Error, or ctx's.
func (s *Session) Upgrade(ctx context.Context, image string, progress func(api.Event)) error {
	namespace := s.Status().ManagerNamespace
	result, err := install.Ensure(ctx, s.cluster, install.Options{Namespace: namespace, Image: image, Upgrade: true, Progress: progress})
	if err != nil || !result.Installed {
		return err
	}
	s.mu.Lock()
	s.status.ManagerPod = result.Pod
	s.mu.Unlock()
	if old := s.current.now(); old != nil {
		if err := old.Close(); err != nil {
			s.log.Debug("closing the session", "err", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, upgradeTimeout)
	defer cancel()
	err = s.awaitManager(ctx, result.Pod)
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	why := "the new traffic manager does not answer"
	if e := s.Status().Error; e != nil {
		why += ": " + e.Message
	}
	return api.Errorf(api.ExitNotReady, "%s", why).
		WithHint("`kubevpn status` shows what the session does; `kubectl -n %s logs deploy/kubevpn-traffic-manager` may tell why.", namespace)
}

// awaitManager waits until the manager in pod is the last that has greeted us, and packets have a way to it and, with the
// system netstack, through its gateway. When the session ends it returns why.
func (s *Session) awaitManager(ctx context.Context, pod string) error {
	var ended *api.Error
	err := s.await(ctx, func() bool {
		if s.status.Status == api.StatusFailed {
			ended = s.status.Error
			return true
		}
		return s.greeting != nil && s.greeting.Pod == pod && s.status.Status == api.StatusConnected
	})
	if ended != nil {
		return ended
	}
	return err
}

// dialManager is the transport's way to the manager: a port-forward into its pod.
func (s *Session) dialManager(ctx context.Context) (net.Conn, error) {
	st := s.Status()
	conn, pod, err := dialPod(ctx, st.ManagerPod, func(ctx context.Context, pod string) (net.Conn, error) {
		return s.cluster.PortForward(ctx, st.ManagerNamespace, pod, api.ManagerPort)
	}, func(ctx context.Context) (string, error) {
		return install.FindPod(ctx, s.cluster, st.ManagerNamespace)
	})
	if pod != st.ManagerPod {
		s.mu.Lock()
		s.status.ManagerPod = pod
		s.mu.Unlock()
		s.log.Info("the traffic manager has another pod", "was", st.ManagerPod, "is", pod)
	}
	return conn, err
}

// dialPod forwards to pod. One that cannot be dialled may have been replaced; then the one that find gives is dialled,
// and is the one to begin with from then on.
func dialPod(ctx context.Context, pod string, forward func(context.Context, string) (net.Conn, error),
	find func(context.Context) (string, error)) (net.Conn, string, error) {
	first, cancel := context.WithTimeout(ctx, forwardTimeout)
	defer cancel()
	conn, err := forward(first, pod)
	if err == nil {
		return conn, pod, nil
	}
	looking, cancel := context.WithTimeout(ctx, relocateTimeout)
	defer cancel()
	other, findErr := find(looking)
	if findErr != nil || other == pod {
		return nil, pod, err
	}
	conn, err = forward(ctx, other)
	return conn, other, err
}
