package intercept

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sync/errgroup"
	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/kubernetes"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/workloads"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

const (
	probeTimeout = 3 * time.Second
	// An agent answers a probe at once; other servers wait for more bytes. So an answer may take answerTimeout, or
	// answerTrips times as long as it took to connect.
	answerTimeout     = time.Second
	answerTrips       = 4
	packetTimeout     = 700 * time.Millisecond // a datagram may be lost, and is sent again
	probeTries        = 3
	rolloutProbeTries = 25
	probePause        = 200 * time.Millisecond
	causeTimeout      = 2 * time.Second
)

// A probe is a connection from the traffic manager, like that of any client in the cluster. The laptop announces the
// first bytes of a probe to the agents. An answer with these bytes comes from an agent. A UDP probe is a datagram of
// these bytes.
//
//	laptop ── control stream: these bytes ──▶ agent
//	laptop ── session ── manager dials pod IP, or ClusterIP ─▶ ... ─▶ eth0 ─▶ redirect ─▶ agent: the same bytes
//	                                                           └─▶ anything else: the connection bypasses the agent

// verdict is the result of a probe.
type verdict int

const (
	probeReached  verdict = iota // an agent answered
	probeBypassed                // something other than an agent answered
	probeRefused                 // nothing listens
	probeUnknown                 // the probe could not connect
	probeTimedOut                // the probe timed out before it connected
)

// target is the destination of a probe.
type target struct {
	protocol string // "tcp" or "udp"
	addr     netip.AddrPort
}

// String is "10.96.0.1:80" or "udp 10.96.0.1:53".
func (t target) String() string {
	if t.protocol == "tcp" {
		return t.addr.String()
	}
	return t.protocol + " " + t.addr.String()
}

// prober sends probes.
type prober struct {
	// dial connects to an address in the cluster through the traffic manager.
	dial func(ctx context.Context, network string, addr netip.AddrPort) (net.Conn, error)
}

// send announces one probe over the sessions, and sends it to an address in the cluster.
func (pr prober) send(ctx context.Context, what string, to target, sessions []*agentSession) (api.Check, verdict) {
	timeout := probeTimeout
	if to.protocol == "udp" {
		timeout = packetTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
	defer cancel()
	c := api.Check{What: what, Target: to.String()}
	began := time.Now()
	preface, err := announceProbe(ctx, sessions)
	v := probeUnknown
	if err == nil {
		v, err = pr.exchange(ctx, to, preface)
	}
	c.Seconds = time.Since(began).Seconds()
	c.OK = v == probeReached
	switch {
	case c.OK:
		c.Seen = fmt.Sprintf("reached the agent in %d ms", time.Since(began).Milliseconds())
	case transport.CodeOf(err) == transport.CodeTimeout:
		c.Seen = "no answer"
		if v == probeUnknown {
			v = probeTimedOut
		}
	default:
		c.Seen = err.Error()
	}
	return c, v
}

// untilReached sends at most tries probes, until an agent answers one. It does not repeat a TCP probe that timed
// out.
func (pr prober) untilReached(ctx context.Context, what string, to target, tries int,
	sessions func() []*agentSession) (c api.Check, v verdict) {
	for range tries {
		if c, v = pr.send(ctx, what, to, sessions()); v == probeReached ||
			v == probeTimedOut && to.protocol == "tcp" || ctx.Err() != nil {
			break
		}
		wakeup.Pause(ctx, probePause)
	}
	return c, v
}

// announceProbe announces a probe to the agents, and returns its first bytes. It fails if no agent accepts.
func announceProbe(ctx context.Context, sessions []*agentSession) ([]byte, error) {
	preface := make([]byte, api.ProbeLength)
	rand.Read(preface[copy(preface, api.ProbePrefix):]) // it never fails
	errs := wakeup.All(sessions, func(l *agentSession) error {
		if _, err := l.order(ctx, api.AgentOrder{Probe: &api.Probe{Preface: preface}}); err != nil {
			return fmt.Errorf("announcing a probe to the agent: %w", err)
		}
		return nil
	})
	if len(sessions) == 0 || slices.Contains(errs, nil) {
		return preface, nil
	}
	return nil, errs[0]
}

var errBypassed = errors.New("something other than the agent answered")

// exchange connects, sends the probe, and compares the answer.
func (pr prober) exchange(ctx context.Context, to target, preface []byte) (verdict, error) {
	began := time.Now()
	conn, err := pr.dial(ctx, to.protocol, to.addr)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return probeRefused, err // an agent accepts, whether or not the application listens
	}
	if err != nil {
		return probeUnknown, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, max(answerTimeout, answerTrips*time.Since(began)))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	answer := make([]byte, len(preface))
	_, err = conn.Write(preface)
	switch {
	case err != nil:
	case to.protocol == "udp": // the answer is one datagram
		var n int
		n, err = conn.Read(answer)
		answer = answer[:n]
	default:
		_, err = io.ReadFull(conn, answer)
	}
	switch {
	case ctx.Err() != nil && to.protocol == "udp": // UDP does not report whether anything received it
		return probeUnknown, ctx.Err()
	case ctx.Err() != nil:
		return probeBypassed, ctx.Err()
	case errors.Is(err, syscall.ECONNREFUSED): // a datagram
		return probeRefused, err
	case err == nil && bytes.Equal(answer, preface):
		return probeReached, nil
	case err == nil, errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return probeBypassed, errBypassed
	}
	return probeBypassed, fmt.Errorf("%w: %w", errBypassed, err)
}

// verifyPod checks with probes that connections to the pod reach its agent, as those of clients which have its address
// from a headless Service do. If no address can be reached, it warns that the result is unknown.
func (i *Intercept) verifyPod(ctx context.Context, c *podIntercept) error {
	var targets []target
	for _, ip := range c.latest().Status.PodIPs {
		addr, err := netip.ParseAddr(ip.IP)
		if err != nil {
			return fmt.Errorf("parsing the address of pod %s: %w", c.name, err)
		}
		for _, p := range i.claim.Ports {
			targets = append(targets, target{p.Protocol, netip.AddrPortFrom(addr, cmp.Or(p.Listen, p.Port))})
		}
	}
	var probing errgroup.Group
	for _, to := range targets {
		probing.Go(func() error { return i.verifyTarget(ctx, c, to) })
	}
	return probing.Wait()
}

func (i *Intercept) verifyTarget(ctx context.Context, c *podIntercept, to target) error {
	i.mu.Lock()
	sessions := []*agentSession{c.session}
	i.mu.Unlock()
	what := "pod"
	if i.rollout != nil {
		what = "agent" // no client connects to its port by itself; verifyServices checks their ways
	}
	pr := prober{i.cfg.Session.Dial}
	check, v := pr.untilReached(ctx, what, to, probeTries, func() []*agentSession { return sessions })
	i.recordCheck(check)
	switch v {
	case probeReached:
		return nil
	case probeUnknown, probeTimedOut:
		i.warn(fmt.Sprintf("cannot check whether the agent receives the %s traffic of pod %s: %s",
			strings.ToUpper(to.protocol), c.name, check.Seen))
		return nil
	}
	return i.errorBypassed(ctx, c.latest(), check)
}

// verifyServices checks with probes that the ClusterIPs of the workload's Services reach an agent.
func (i *Intercept) verifyServices(ctx context.Context) error {
	targets := i.serviceTargets()
	if len(targets) == 0 {
		return nil
	}
	if i.cfg.Exposed != nil {
		if silent := i.silentPort(ctx); silent != nil { // a probe would only find that there is no endpoint
			i.warn(fmt.Sprintf("nothing listens on %s: the Service has no endpoint until your program does",
				silent.Where()))
			return nil
		}
	}
	done := i.step("Checking ClusterIPs")
	checks := make([]api.Check, len(targets))
	verdicts := make([]verdict, len(targets))
	tries := probeTries
	if i.rollout != nil || i.cfg.Exposed != nil {
		tries = rolloutProbeTries // kube-proxy updates its endpoints a moment after the pods are ready
	}
	pr := prober{i.cfg.Session.Dial}
	var probing sync.WaitGroup
	for n, to := range targets {
		probing.Go(func() {
			checks[n], verdicts[n] = pr.untilReached(ctx, "clusterIP", to, tries, i.activeSessions)
		})
	}
	probing.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	intercepted, all := i.count()
	var texts []string
	for n, check := range checks {
		i.recordCheck(check)
		texts = append(texts, check.Target+": "+check.Seen)
		switch {
		case verdicts[n] == probeReached:
		case verdicts[n] == probeBypassed && intercepted == all:
			i.mu.Lock()
			pod := i.sorted()[0].pod
			i.mu.Unlock()
			return i.errorBypassed(ctx, pod, check)
		default: // no endpoint is ready, or one is not intercepted
			i.warn(fmt.Sprintf("no agent answered a probe to the ClusterIP %s: %s; %d of %d pods are intercepted",
				check.Target, check.Seen, intercepted, all))
		}
	}
	done("%s", strings.Join(texts, "; "))
	return nil
}

// recordCheck adds c to the status. It replaces an earlier check of the same address.
func (i *Intercept) recordCheck(c api.Check) {
	i.mu.Lock()
	defer i.mu.Unlock()
	same := func(o api.Check) bool { return o.What == c.What && o.Target == c.Target }
	if n := slices.IndexFunc(i.status.Checks, same); n >= 0 {
		i.status.Checks[n] = c
	} else {
		i.status.Checks = append(i.status.Checks, c)
	}
	i.changed.Send()
}

// errorBypassed returns the error of a probe that did not reach the agent, with the likely causes.
func (i *Intercept) errorBypassed(ctx context.Context, pod *corev1.Pod, c api.Check) error {
	causes := sidecarCauses(pod)
	if i.rollout == nil {
		causes = ephemeralCauses(ctx, i.pods.Kube(), i.log, pod)
	}
	return api.Errorf(api.ExitIntercept,
		"the intercept receives no traffic: a probe to %s did not reach the agent in pod %s: %s", c.Target, pod.Name,
		c.Seen).
		WithHint("%s. kubevpn has undone the intercept: requests go to the application.",
			strings.Join(causes, ". "))
}

// sidecarCauses returns what may keep connections from a sidecar in this pod.
func sidecarCauses(pod *corev1.Pod) []string {
	if mesh, _ := workloads.Mesh(pod); mesh != "" {
		return []string{fmt.Sprintf("The pod belongs to a service mesh, %s, which receives its connections before the "+
			"agent, and may reject those from outside the mesh, such as the probe", mesh)}
	}
	return []string{"Connections do not arrive at the agent's port: the cause may be a controller that has restored " +
		"the Service's target port, a service mesh, or the cluster's network plugin"}
}

// ephemeralCauses returns what may keep packets from an ephemeral agent in this pod.
func ephemeralCauses(ctx context.Context, kube kubernetes.Interface, log *slog.Logger, pod *corev1.Pod) []string {
	var causes []string
	switch mesh, container := workloads.Mesh(pod); {
	case container != "":
		causes = append(causes, fmt.Sprintf("The pod belongs to a service mesh, %s, and its container %s receives "+
			"connections before the agent; with --mode sidecar the agent receives requests to Services after it", mesh,
			container))
	case mesh != "":
		causes = append(causes, fmt.Sprintf("The pod belongs to a service mesh, %s, which receives its connections "+
			"before the agent", mesh))
	}
	ctx, cancel := context.WithTimeout(ctx, causeTimeout)
	defer cancel()
	cilium, err := kube.CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, "cilium-config",
		metav1.GetOptions{})
	if err != nil {
		log.Debug("cannot read the ConfigMap kube-system/cilium-config", "err", err)
	} else if replaces := cilium.Data["kube-proxy-replacement"]; (replaces == "true" || replaces == "strict") &&
		cilium.Data["enable-host-legacy-routing"] != "true" {
		causes = append(causes, "The ConfigMap kube-system/cilium-config enables Cilium with eBPF host routing, "+
			"whose packets may bypass netfilter in the pod")
	}
	if len(causes) == 0 {
		causes = append(causes, "The pod's packets bypass the agent's netfilter rules: the cause may be a service "+
			"mesh, rules of the pod, or the cluster's network plugin")
	}
	return causes
}
