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
	// answerPatience is how long who has taken the connection may take to answer, and answerTrips the same in times of what it
	// took to connect: an agent answers at once, other servers wait for more than a canary.
	answerPatience = time.Second
	answerTrips    = 4
	packetTimeout  = 700 * time.Millisecond // a datagram may be lost, and is sent again
	canaryTries    = 3
	rolledTries    = 25
	canaryPause    = 200 * time.Millisecond
	causeTimeout   = 2 * time.Second
)

// A canary is a connection from the traffic manager, as any client in the cluster might make it, whose first bytes the agents
// were told of. Who answers it with the same bytes is one of them. By UDP it is a datagram of these bytes.
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

// target is where a canary goes.
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

// knock sends one canary to an address of the cluster, of which the agents at the other ends of links are told.
func (i *Intercept) knock(ctx context.Context, what string, to target, links []*link) (api.Check, verdict) {
	timeout := canaryTimeout
	if to.protocol == "udp" {
		timeout = packetTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, timeout)
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

// knocks sends canaries until one is seen, or no more need be tried. By TCP silence is an answer.
func (i *Intercept) knocks(ctx context.Context, what string, to target, tries int, links func() []*link) (c api.Check, v verdict) {
	for range tries {
		if c, v = i.knock(ctx, what, to, links()); v == seen || v == silent && to.protocol == "tcp" || ctx.Err() != nil {
			break
		}
		pause(ctx, canaryPause)
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
func (i *Intercept) present(ctx context.Context, to target, preface []byte) (verdict, error) {
	began := time.Now()
	conn, err := i.cfg.Session.Dial(ctx, to.protocol, to.addr)
	if errors.Is(err, syscall.ECONNREFUSED) {
		return refused, err // an agent accepts, whether or not the application listens
	}
	if err != nil {
		return untried, err
	}
	defer conn.Close()
	ctx, cancel := context.WithTimeout(ctx, max(answerPatience, answerTrips*time.Since(began)))
	defer cancel()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	answer := make([]byte, len(preface))
	_, err = conn.Write(preface)
	switch {
	case err != nil:
	case to.protocol == "udp": // whatever it is, it is one datagram
		var n int
		n, err = conn.Read(answer)
		answer = answer[:n]
	default:
		_, err = io.ReadFull(conn, answer)
	}
	switch {
	case ctx.Err() != nil && to.protocol == "udp": // nobody says whether it came anywhere
		return untried, ctx.Err()
	case ctx.Err() != nil:
		return missed, ctx.Err()
	case errors.Is(err, syscall.ECONNREFUSED): // a datagram
		return refused, err
	case err == nil && !bytes.Equal(answer, preface):
		return missed, errPassedBy
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF):
		return missed, errPassedBy
	case err != nil:
		return missed, fmt.Errorf("%w: %w", errPassedBy, err)
	}
	return seen, nil
}

// arrivals are a TCP and a UDP port of pods where claimed requests arrive, if there are.
func (i *Intercept) arrivals() []api.AgentPort {
	var ports []api.AgentPort
	for _, protocol := range []string{"tcp", "udp"} {
		if n := slices.IndexFunc(i.claim.Ports, func(p api.AgentPort) bool { return p.Protocol == protocol }); n >= 0 {
			p := i.claim.Ports[n]
			ports = append(ports, api.AgentPort{Protocol: protocol, Port: cmp.Or(p.Listen, p.Port)})
		}
	}
	return ports
}

// provePod sees whether connections to the pod come to its agent. Where nothing can be reached, it is not known, and said.
func (i *Intercept) provePod(ctx context.Context, c *cover) error {
	ports := i.arrivals()
	errs := make([]error, len(ports))
	var proofs sync.WaitGroup
	for n, p := range ports {
		proofs.Go(func() { errs[n] = i.provePort(ctx, c, p) })
	}
	proofs.Wait()
	return cmp.Or(errs...)
}

func (i *Intercept) provePort(ctx context.Context, c *cover, p api.AgentPort) error {
	to, err := c.address(p.Port)
	if err != nil {
		return err
	}
	i.mu.Lock()
	links := []*link{c.link}
	i.mu.Unlock()
	check, v := i.knocks(ctx, "pod", target{p.Protocol, to}, canaryTries, func() []*link { return links })
	i.check(check)
	switch v {
	case seen:
		return nil
	case untried, silent:
		i.warn(fmt.Sprintf("whether the intercept takes the %s traffic of the pod %s could not be tried: %s", strings.ToUpper(p.Protocol), c.name, check.Seen))
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
	links := func() []*link {
		i.mu.Lock()
		defer i.mu.Unlock()
		var links []*link
		for _, c := range i.covers {
			if c.covered() {
				links = append(links, c.link)
			}
		}
		return links
	}
	var knocking sync.WaitGroup
	for n, to := range targets {
		knocking.Go(func() { checks[n], verdicts[n] = i.knocks(ctx, "clusterIP", to, tries, links) })
	}
	knocking.Wait()
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

// serviceTargets are the ClusterIPs and ports that lead to claimed ports.
func (i *Intercept) serviceTargets() []target {
	var targets []target
	for _, p := range i.workload.Ports() {
		if !slices.ContainsFunc(i.claim.Ports, func(a api.AgentPort) bool { return a.Protocol == p.Protocol && a.Port == p.Port }) {
			continue
		}
		for _, sp := range p.Services {
			for _, s := range i.workload.Services {
				if s.Name != sp.Service {
					continue
				}
				for _, ip := range s.Spec.ClusterIPs {
					if addr, err := netip.ParseAddr(ip); err == nil { // a headless one's is "None"
						targets = append(targets, target{p.Protocol, netip.AddrPortFrom(addr, uint16(sp.Port))})
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
	return api.Errorf(api.ExitIntercept, "the intercept takes no traffic: what was sent to %s did not come to the agent in the pod %s: %s", c.Target, pod.Name, c.Seen).
		WithHint("%s. The intercept was undone: requests go to the application.", strings.Join(i.causes(ctx, pod), ". "))
}

// meshes are known by the containers that they put into pods.
var meshes = map[string]string{
	"istio-proxy": "Istio", "linkerd-proxy": "Linkerd", "kuma-sidecar": "Kuma", "consul-dataplane": "Consul", "osm-envoy": "Open Service Mesh",
}

// ambient is the annotation of a pod whose connections a proxy on its node takes.
const ambient = "ambient.istio.io/redirection"

// causes name what is known to take packets before the agent does.
func (i *Intercept) causes(ctx context.Context, pod *corev1.Pod) []string {
	var causes []string
	for _, c := range slices.Concat(pod.Spec.Containers, pod.Spec.InitContainers) {
		if mesh, ok := meshes[c.Name]; ok {
			causes = append(causes, fmt.Sprintf("The pod belongs to a service mesh, %s, whose container %s takes its connections before the agent does; "+
				"with --mode sidecar the agent comes after it, for what is sent to Services", mesh, c.Name))
		}
	}
	if pod.Annotations[ambient] == "enabled" {
		causes = append(causes, "The pod belongs to a service mesh, Istio in ambient mode, which takes its connections before the agent does")
	}
	ctx, cancel := context.WithTimeout(ctx, causeTimeout)
	defer cancel()
	cilium, err := i.pods.Kube().CoreV1().ConfigMaps(metav1.NamespaceSystem).Get(ctx, "cilium-config", metav1.GetOptions{})
	if err != nil {
		i.log.Debug("looking for Cilium", "err", err)
	} else if replaces := cilium.Data["kube-proxy-replacement"]; (replaces == "true" || replaces == "strict") && cilium.Data["enable-host-legacy-routing"] != "true" {
		causes = append(causes, "The cluster's network is Cilium with eBPF host routing, by the ConfigMap kube-system/cilium-config, which may take packets before netfilter in the pod sees them")
	}
	if len(causes) == 0 {
		causes = append(causes, "Something before netfilter takes the pod's packets, or has them pass it: a mesh, rules of the pod's own, or the cluster's network plugin")
	}
	return causes
}
