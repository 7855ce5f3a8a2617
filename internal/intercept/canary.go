package intercept

import (
	"bytes"
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"

	"kubevpn/internal/api"
)

const (
	canaryTimeout = 3 * time.Second
	canaryTries   = 3
	rolledTries   = 25
	canaryPause   = 200 * time.Millisecond
	causeTimeout  = 2 * time.Second
)

// A canary is a connection from the traffic manager, as any client in the cluster might make it, whose first bytes the agents
// were told of. Who answers it with the same bytes is one of them.
//
//	laptop ── control stream: these bytes ──▶ agent
//	laptop ── session ── manager dials pod IP, or ClusterIP ─▶ ... ─▶ eth0 ─▶ redirect ─▶ agent: the same bytes
//	                                                           └─▶ anything else: the agent is passed by

// verdict is what became of a canary.
type verdict int

const (
	seen    verdict = iota // an agent answered
	missed                 // something else answered
	refused                // nobody took the connection
	untried                // nothing was reached
	silent                 // likewise, for as long as was waited
)

// knock sends one canary to an address of the cluster, of which the agents at the other ends of links are told.
func (i *Intercept) knock(ctx context.Context, what string, to netip.AddrPort, links []*link) (api.Check, verdict) {
	ctx, cancel := context.WithTimeout(ctx, canaryTimeout)
	defer cancel()
	c := api.Check{What: what, Target: to.String()}
	began := time.Now()
	preface, err := announce(ctx, links)
	v := untried
	if err == nil {
		v, err = i.present(ctx, to, preface)
	}
	c.Seconds = time.Since(began).Seconds()
	c.OK = v == seen
	switch {
	case c.OK:
		c.Seen = fmt.Sprintf("came to the agent in %d ms", time.Since(began).Milliseconds())
	case errors.Is(err, context.DeadlineExceeded):
		c.Seen = "no answer"
		if v == untried {
			v = silent
		}
	default:
		c.Seen = err.Error()
	}
	return c, v
}

// announce tells the agents of a canary.
func announce(ctx context.Context, links []*link) ([]byte, error) {
	preface := make([]byte, api.CanaryLength)
	if _, err := rand.Read(preface[copy(preface, api.CanaryPrefix):]); err != nil {
		return nil, fmt.Errorf("making a canary: %w", err)
	}
	errs := make([]error, len(links))
	var told sync.WaitGroup
	for n, l := range links {
		told.Go(func() {
			if err := l.order(ctx, api.AgentOrder{Canary: &api.Canary{Preface: preface}}); err != nil {
				errs[n] = fmt.Errorf("telling the agent of a canary: %w", err)
			}
		})
	}
	told.Wait()
	if len(links) == 0 || slices.Contains(errs, nil) {
		return preface, nil
	}
	return nil, errs[0]
}

var errPassedBy = errors.New("something else than the agent answered")

// present connects, sends the canary, and looks at the answer.
func (i *Intercept) present(ctx context.Context, to netip.AddrPort, preface []byte) (verdict, error) {
	conn, err := i.cfg.Session.Dial(ctx, "tcp", to)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return refused, err // an agent accepts, whether or not the application listens
	}
	if err != nil {
		return untried, err
	}
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	answer := make([]byte, len(preface))
	_, err = conn.Write(preface)
	if err == nil {
		_, err = io.ReadFull(conn, answer)
	}
	switch {
	case ctx.Err() != nil:
		return missed, ctx.Err()
	case err == nil && !bytes.Equal(answer, preface):
		return missed, errPassedBy
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return missed, errPassedBy
	case err != nil:
		return missed, fmt.Errorf("%w: %w", errPassedBy, err)
	}
	return seen, nil
}

// tcpPort is a TCP port of pods where claimed requests arrive.
func (i *Intercept) tcpPort() (uint16, bool) {
	for _, p := range i.claim.Ports {
		if p.Protocol == "tcp" {
			return cmp.Or(p.Listen, p.Port), true
		}
	}
	return 0, false
}

// provePod sees whether connections to the pod come to its agent. Where nothing can be reached, it is not known, and said.
func (i *Intercept) provePod(ctx context.Context, c *cover) error {
	port, ok := i.tcpPort()
	if !ok {
		i.check(api.Check{What: "pod", Target: c.name, OK: true, Seen: "not tried: only UDP is claimed"})
		return nil
	}
	to, err := c.address(port)
	if err != nil {
		return err
	}
	i.mu.Lock()
	links := []*link{c.link}
	i.mu.Unlock()
	var check api.Check
	var v verdict
	for range canaryTries {
		if check, v = i.knock(ctx, "pod", to, links); v == seen || v == silent || ctx.Err() != nil {
			break
		}
		pause(ctx, canaryPause)
	}
	i.check(check)
	switch v {
	case seen:
		return nil
	case untried, silent:
		i.warn(fmt.Sprintf("whether the intercept takes the traffic of the pod %s could not be tried: %s", c.name, check.Seen))
		return nil
	}
	i.mu.Lock()
	pod := c.pod
	i.mu.Unlock()
	return i.bypassed(ctx, pod, check)
}

// proveServices sees whether the ClusterIPs of the Services that send to the pods lead to an agent.
func (i *Intercept) proveServices(ctx context.Context) error {
	targets := i.serviceTargets()
	if len(targets) == 0 {
		return nil
	}
	done := i.step("Checking that ClusterIPs lead here")
	checks := make([]api.Check, len(targets))
	verdicts := make([]verdict, len(targets))
	tries := canaryTries
	if i.rolled != nil {
		tries = rolledTries // whoever serves ClusterIPs hears of the new endpoints a moment later
	}
	var knocks sync.WaitGroup
	for n, to := range targets {
		knocks.Go(func() {
			for range tries {
				i.mu.Lock()
				var links []*link
				for _, c := range i.covers {
					if c.covered() {
						links = append(links, c.link)
					}
				}
				i.mu.Unlock()
				if checks[n], verdicts[n] = i.knock(ctx, "clusterIP", to, links); verdicts[n] == seen || verdicts[n] == silent || ctx.Err() != nil {
					return
				}
				pause(ctx, canaryPause)
			}
		})
	}
	knocks.Wait()
	if ctx.Err() != nil {
		return ctx.Err()
	}
	covered, all := i.count()
	var texts []string
	for n, check := range checks {
		i.check(check)
		texts = append(texts, check.Target+": "+check.Seen)
		switch {
		case verdicts[n] == seen:
		case verdicts[n] == missed && covered == all:
			i.mu.Lock()
			pod := i.sorted()[0].pod
			i.mu.Unlock()
			return i.bypassed(ctx, pod, check)
		default: // no endpoint is ready, or one that is not covered
			i.warn(fmt.Sprintf("no canary came through the ClusterIP %s: %s; %d of %d pods are covered", check.Target, check.Seen, covered, all))
		}
	}
	done("%s", strings.Join(texts, "; "))
	return nil
}

// serviceTargets are the ClusterIPs and ports that lead to claimed TCP ports.
func (i *Intercept) serviceTargets() []netip.AddrPort {
	var targets []netip.AddrPort
	for _, p := range i.workload.Ports() {
		if p.Protocol != "tcp" || !slices.ContainsFunc(i.claim.Ports, func(a api.AgentPort) bool { return a.Protocol == "tcp" && a.Port == p.Port }) {
			continue
		}
		for _, sp := range p.Services {
			for _, s := range i.workload.Services {
				if s.Name != sp.Service {
					continue
				}
				for _, ip := range s.Spec.ClusterIPs {
					if addr, err := netip.ParseAddr(ip); err == nil { // a headless one's is "None"
						targets = append(targets, netip.AddrPortFrom(addr, uint16(sp.Port)))
					}
				}
			}
		}
	}
	return targets
}

// check keeps what a canary saw, in the place of what one to the same address saw before.
func (i *Intercept) check(c api.Check) {
	i.mu.Lock()
	defer i.mu.Unlock()
	same := func(o api.Check) bool { return o.What == c.What && o.Target == c.Target }
	if n := slices.IndexFunc(i.status.Checks, same); n >= 0 {
		i.status.Checks[n] = c
	} else {
		i.status.Checks = append(i.status.Checks, c)
	}
	i.move()
}

// bypassed is the error of a canary that did not come, with what it may be that passes the agent by.
func (i *Intercept) bypassed(ctx context.Context, pod *corev1.Pod, c api.Check) error {
	return api.Errorf(api.ExitIntercept, "the intercept takes no traffic: a connection to %s did not come to the agent in the pod %s: %s", c.Target, pod.Name, c.Seen).
		WithHint("%s. The intercept was undone: requests go to the application.", i.cause(ctx, pod))
}

// cause names what is known to take packets before netfilter in the pod sees them.
func (i *Intercept) cause(ctx context.Context, pod *corev1.Pod) string {
	if pod.Spec.HostNetwork {
		return "The pod has its node's network (hostNetwork)"
	}
	containers := append(slices.Clone(pod.Spec.Containers), pod.Spec.InitContainers...)
	for _, c := range containers {
		if c.Name == "istio-proxy" || c.Name == "linkerd-proxy" {
			return fmt.Sprintf("The pod belongs to a service mesh, whose container %s takes its connections before the agent can", c.Name)
		}
	}
	ctx, cancel := context.WithTimeout(ctx, causeTimeout)
	defer cancel()
	cilium, err := i.pods.Kube().CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, "cilium-config", metav1.GetOptions{})
	if err != nil {
		i.log.Debug("looking for Cilium", "err", err)
	} else if replaces := cilium.Data["kube-proxy-replacement"]; (replaces == "true" || replaces == "strict") && cilium.Data["enable-host-legacy-routing"] != "true" {
		return "The cluster's network is Cilium with eBPF host routing, by the ConfigMap kube-system/cilium-config, which may take packets before netfilter in the pod sees them"
	}
	return "Something before netfilter takes the pod's packets: a mesh, or the cluster's network plugin"
}
