package session

import (
	"context"
	"net"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/install"
)

// relocateTimeout bounds looking for the manager's new pod after its old one could not be dialled.
const relocateTimeout = 10 * time.Second

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
	s.mu.Unlock()
	s.warn(result.Warnings...)
	verb := "found"
	if result.Installed {
		verb = "installed"
	}
	done("%s: pod %s/%s, image %s", verb, result.Namespace, result.Pod, result.Image)
	return nil
}

// dialManager is the transport's way to the manager: a port-forward into its pod. A pod that cannot be dialled may
// have been replaced; then the one that runs now is dialled.
func (s *Session) dialManager(ctx context.Context) (net.Conn, error) {
	st := s.Status()
	conn, err := s.cluster.PortForward(ctx, st.ManagerNamespace, st.ManagerPod, api.ManagerPort)
	if err == nil {
		return conn, nil
	}
	find, cancel := context.WithTimeout(ctx, relocateTimeout)
	defer cancel()
	pod, findErr := install.FindPod(find, s.cluster, st.ManagerNamespace)
	if findErr != nil || pod == st.ManagerPod {
		return nil, err
	}
	s.mu.Lock()
	s.status.ManagerPod = pod
	s.mu.Unlock()
	s.log.Info("the traffic manager has another pod", "was", st.ManagerPod, "is", pod, "err", err)
	return s.cluster.PortForward(ctx, st.ManagerNamespace, pod, api.ManagerPort)
}
