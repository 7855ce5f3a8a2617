package connection

import (
	"context"
	"errors"
	"net"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/install"
	"kubevpn/pkg/wakeup"
)

const (
	// dialTimeout limits one dial to the manager. No part of it may use up the time of the others: a pod whose node
	// died does not refuse, because the API server waits for the node and the pod exists until it is evicted.
	dialTimeout     = forwardTimeout + relocateTimeout + 10*time.Second
	forwardTimeout  = 15 * time.Second // the port-forward to the last known pod
	relocateTimeout = 5 * time.Second  // finding another pod

	// upgradeTimeout limits the move to a manager that already runs, including the time to add a gateway to it.
	upgradeTimeout = 45 * time.Second
)

// manager finds or installs the traffic manager, and dials its pod.
type manager struct {
	*shared
	prepared *Prepared
	location wakeup.Value[managerLocation]
}

// managerLocation says where the traffic manager is.
type managerLocation struct {
	namespace, pod string
	node           string             // of the pod that ensure found
	trusted        api.TrustedManager // the user trusts this manager and no other
	imageWarning   string             // about the image of the manager that ensure found; empty: none
	lease          install.Lease      // of a temporary manager
}

// ensure finds the traffic manager, or installs it.
func (m *manager) ensure(ctx context.Context) error {
	done := m.status.step("Finding the traffic manager")
	r := m.cfg.Request
	result, err := install.Ensure(ctx, m.cluster, install.Options{
		Namespace: r.ManagerNamespace, FallbackNamespace: r.Namespace, Image: r.Image, Upgrade: r.Upgrade, Keep: r.Keep,
		Progress: m.cfg.Progress, Consent: &r.Consent, Objects: r.Objects,
	})
	if err != nil {
		return err
	}
	m.location.Update(func(p *managerLocation) {
		*p = managerLocation{namespace: result.Namespace, pod: result.Pod, node: result.Node, trusted: result.Manager,
			imageWarning: result.ImageWarning, lease: result.Lease}
	})
	m.status.warn(result.Warnings...)
	verb := "found"
	if result.Installed {
		verb = "installed"
	}
	if result.Lease.UID != "" {
		verb += " while laptops use it (--keep keeps it)"
	}
	done("%s: pod %s/%s, image %s", verb, result.Namespace, result.Pod, result.Image)
	return nil
}

// Image returns the image in the template of the trusted traffic manager's Deployment. Nodes can pull it, and its
// programs speak the connection's protocol. The images of pods do not matter. Errors are *api.Error.
func (m *manager) Image(ctx context.Context) (string, error) {
	return install.Image(ctx, m.cluster, m.location.Load().trusted)
}

// NeedsPullSecret reports whether the traffic manager's pod names a Secret to pull its image. Errors are *api.Error.
func (m *manager) NeedsPullSecret(ctx context.Context) (bool, error) {
	return install.NeedsPullSecret(ctx, m.cluster, m.location.Load().trusted.Namespace)
}

// Keep makes a temporary traffic manager one that stays. Errors are *api.Error, or ctx's.
func (m *manager) Keep(ctx context.Context, progress func(api.Event)) error {
	at := m.location.Load()
	if at.lease == (install.Lease{}) {
		return nil
	}
	_, err := install.Ensure(ctx, m.cluster, install.Options{
		Namespace: at.namespace, Keep: true, Progress: progress, Objects: m.cfg.Request.Objects,
		Consent: &api.Consent{Managers: []api.TrustedManager{at.trusted}},
	})
	if err == nil {
		m.location.Update(func(p *managerLocation) { p.lease = install.Lease{} })
	}
	return err
}

// Upgrade replaces the traffic manager with one of the image, unless it runs that image. It returns when the connection
// has moved to the new manager; flows through the old one end. The connection must be connected. Errors are *api.Error,
// or ctx's.
func (m *manager) Upgrade(ctx context.Context, image string, progress func(api.Event)) error {
	at := m.location.Load()
	result, err := install.Ensure(ctx, m.cluster, install.Options{
		Namespace: at.namespace, Image: image, Upgrade: true, Progress: progress, Objects: m.cfg.Request.Objects,
		Consent: &api.Consent{Managers: []api.TrustedManager{at.trusted}},
	})
	if err != nil || !result.Installed {
		return err
	}
	m.location.Update(func(p *managerLocation) { p.pod, p.trusted = result.Pod, result.Manager })
	if old := m.current.now(); old != nil {
		if err := old.Close(); err != nil {
			m.log.Debug("closing the session", "err", err)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, upgradeTimeout)
	defer cancel()
	err = m.await(ctx, result.Pod)
	if !errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	why := "the new traffic manager does not answer"
	if e := m.status.snapshot().Error; e != nil {
		why += ": " + e.Message
	}
	return api.Errorf(api.ExitNotReady, "%s", why).
		WithHint("`kubevpn status` shows the connection; see `kubectl -n %s logs deploy/kubevpn-traffic-manager` for "+
			"the cause", at.namespace)
}

// noAnswer returns the error for a traffic manager in the namespace that sends no hello.
func noAnswer(namespace string) *api.Error {
	return api.Errorf(api.ExitNotReady, "the traffic manager does not answer").
		WithHint("see `kubectl -n %s logs deploy/kubevpn-traffic-manager` for the cause", api.ShellQuote(namespace))
}

// await waits until the manager in pod was the last to greet this laptop and packets travel: to the manager and, with
// the system netstack, through its gateway. If the connection fails meanwhile, await returns its error.
func (m *manager) await(ctx context.Context, pod string) error {
	r, err := m.status.report.Await(ctx, func(r report) bool {
		return r.shown.Status == api.StatusFailed || r.shown.Status == api.StatusConnected && m.view.Load().pod() == pod
	})
	if r.shown.Status == api.StatusFailed {
		return r.shown.Error
	}
	return err
}

// dial dials the manager for the transport: a port-forward into its pod.
func (m *manager) dial(ctx context.Context) (net.Conn, error) {
	at := m.location.Load()
	conn, pod, err := dialPod(ctx, at.pod, func(ctx context.Context, pod string) (net.Conn, error) {
		return m.portForward(ctx, podName{at.namespace, pod})
	}, func(ctx context.Context) (string, error) {
		if _, err := m.Image(ctx); err != nil { // the Deployment may be another manager's by now
			return "", err
		}
		return install.FindPod(ctx, m.cluster, at.namespace)
	})
	if pod != at.pod {
		m.location.Update(func(p *managerLocation) { p.pod = pod })
		m.log.Info("the traffic manager has another pod", "was", at.pod, "is", pod)
	}
	return conn, err
}

// portForward dials the manager in the pod, unless Prepared has done so.
func (m *manager) portForward(ctx context.Context, to podName) (net.Conn, error) {
	if conn, err := m.prepared.portForward(ctx, to); conn != nil || err != nil {
		return conn, err
	}
	return m.pods.PortForward(ctx, to.namespace, to.pod, api.ManagerPort)
}

// dialPod forwards to pod. If that fails, the pod may have been replaced: dialPod then forwards to the pod that find
// returns. It returns the pod with which the next dial begins.
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
	if e := api.AsError(findErr); e != nil && e.Code == api.ExitConsent {
		return nil, pod, e
	}
	if findErr != nil || other == pod {
		return nil, pod, err
	}
	conn, err = forward(ctx, other)
	return conn, other, err
}
