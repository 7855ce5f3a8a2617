package connection

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"kubevpn/internal/api"
)

const (
	// probeTimeout limits one check. A healthy tunnel answers in milliseconds; a resolver's retry takes 5 s.
	probeTimeout = 6 * time.Second
	// dialTime limits each attempt at a TCP connection, which sends its SYN twice in this time.
	dialTime = 1500 * time.Millisecond
)

// probeTargets are the targets of the probe.
type probeTargets struct {
	Name string       // fully qualified, without a trailing dot
	IP   []netip.Addr // what Name must resolve to; empty: anything
	// Taken says that a connection to another cluster with the same domain answers for Name. The probe then resolves IP
	// to Name, because the addresses differ.
	Taken bool
	Pod   netip.AddrPort // invalid: no pod is known
	VIP   netip.AddrPort
	DNS   netip.AddrPort // cluster DNS, to be asked for Name over UDP
}

// prober tries the tunnel as an application does: through the resolver and the kernel, into the device. It changes
// nothing.
type prober struct {
	dial     func(ctx context.Context, network, address string) (net.Conn, error)
	lookup   func(ctx context.Context, name string) ([]netip.Addr, error)
	resolver *net.Resolver // for addresses
}

// run returns its checks in the order name, pod, clusterIP, dns.
func (p prober) run(ctx context.Context, t probeTargets) []api.Check {
	checks := []func(context.Context) api.Check{
		func(ctx context.Context) api.Check {
			if t.Taken && len(t.IP) > 0 {
				return p.checkAddress(ctx, t.IP[0], t.Name)
			}
			return p.checkName(ctx, t.Name, t.IP)
		},
		func(ctx context.Context) api.Check { return p.checkTCP(ctx, "pod", t.Pod) },
		func(ctx context.Context) api.Check { return p.checkTCP(ctx, "clusterIP", t.VIP) },
		func(ctx context.Context) api.Check { return p.checkDNS(ctx, t.DNS, t.Name) },
	}
	out := make([]api.Check, len(checks))
	var wg sync.WaitGroup
	for i, check := range checks {
		wg.Go(func() {
			ctx, cancel := context.WithTimeout(ctx, probeTimeout)
			defer cancel()
			start := time.Now()
			out[i] = check(ctx)
			out[i].Seconds = time.Since(start).Seconds()
		})
	}
	wg.Wait()
	return out
}

func (p prober) checkName(ctx context.Context, name string, want []netip.Addr) api.Check {
	c := api.Check{What: "name", Target: name}
	got, err := p.lookup(ctx, name)
	if err != nil {
		c.Seen = seen(err)
		return c
	}
	var text []string
	for i := range got {
		got[i] = got[i].Unmap()
		text = append(text, got[i].String())
	}
	c.Seen = strings.Join(text, ", ")
	c.OK = len(want) == 0 || slices.ContainsFunc(got, func(a netip.Addr) bool { return slices.Contains(want, a) })
	if !c.OK {
		c.Seen += fmt.Sprintf(" (expected %s)", want[0])
	}
	return c
}

// checkAddress resolves the address of a Service to its name (PTR).
func (p prober) checkAddress(ctx context.Context, addr netip.Addr, want string) api.Check {
	c := api.Check{What: "name", Target: addr.String()}
	got, err := p.resolver.LookupAddr(ctx, addr.String())
	if err != nil {
		c.Seen = seen(err)
		return c
	}
	for i := range got {
		got[i] = strings.TrimSuffix(got[i], ".")
		c.OK = c.OK || strings.EqualFold(got[i], want)
	}
	c.Seen = strings.Join(got, ", ")
	if !c.OK {
		c.Seen += fmt.Sprintf(" (expected %s)", want)
	}
	return c
}

func (p prober) checkTCP(ctx context.Context, what string, target netip.AddrPort) api.Check {
	c := api.Check{What: what}
	if !target.IsValid() {
		// An empty namespace has no pod: not a failure, but the result says so.
		c.OK, c.Target, c.Seen = true, "none", "not tried: no running "+what+" with a TCP port is visible"
		return c
	}
	c.Target = target.String()
	start := time.Now()
	conn, err := p.connect(ctx, target)
	if err != nil {
		c.Seen = seen(err)
		// The pod itself refuses, so the tunnel reaches it.
		c.OK = what == "pod" && errors.Is(err, syscall.ECONNREFUSED)
		return c
	}
	c.OK, c.Seen = true, fmt.Sprintf("connected in %d ms", time.Since(start).Milliseconds())
	if err := conn.Close(); err != nil {
		c.Seen += ", closing: " + err.Error()
	}
	return c
}

// connect tries again from another source port while there is no answer. IPVS keeps a flow for two minutes after its
// end: meanwhile its source port cannot connect to the same endpoint directly (docs/netstacks.md).
func (p prober) connect(ctx context.Context, target netip.AddrPort) (conn net.Conn, err error) {
	for range probeTimeout / dialTime {
		attempt, cancel := context.WithTimeout(ctx, dialTime)
		conn, err = p.dial(attempt, "tcp", target.String())
		silent := attempt.Err() != nil
		cancel()
		if err == nil || !silent || ctx.Err() != nil {
			break
		}
	}
	return conn, err
}

// checkDNS asks cluster DNS over UDP, without this machine's resolver. Any answer passes, also NXDOMAIN.
func (p prober) checkDNS(ctx context.Context, server netip.AddrPort, name string) api.Check {
	c := api.Check{What: "dns"}
	if !server.IsValid() {
		c.OK, c.Target, c.Seen = true, "none", "not tried: no cluster DNS is routed into the tunnel"
		return c
	}
	c.Target = server.String()
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		if !strings.HasPrefix(network, "udp") {
			return nil, errors.New("the answer does not fit into a datagram")
		}
		return p.dial(ctx, "udp", server.String())
	}}
	start := time.Now()
	_, err := r.LookupNetIP(ctx, "ip", name+".")
	var dns *net.DNSError
	if err != nil && !(errors.As(err, &dns) && dns.IsNotFound) {
		c.Seen = seen(err)
		return c
	}
	c.OK, c.Seen = true, fmt.Sprintf("answered over UDP in %d ms", time.Since(start).Milliseconds())
	return c
}

// seen returns the last and plainest part of a network error.
func seen(err error) string {
	var dns *net.DNSError
	var network net.Error
	switch {
	case errors.Is(err, context.DeadlineExceeded), errors.As(err, &network) && network.Timeout():
		return "no answer"
	case errors.As(err, &dns):
		return dns.Err
	}
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno.Error()
	}
	return err.Error()
}

// probeError returns the error that connect shows for failed checks, or nil.
func probeError(checks []api.Check, resolver api.ResolverMode, vips bool) error {
	var failed []string
	bad := map[string]bool{}
	for _, c := range checks {
		if !c.OK {
			bad[c.What] = true
			failed = append(failed, fmt.Sprintf("%s %s: %s", c.What, c.Target, c.Seen))
		}
	}
	if len(failed) == 0 {
		return nil
	}
	e := api.Errorf(api.ExitProbe, "the tunnel is up but does not reach the cluster: %s", strings.Join(failed, "; "))
	switch {
	case bad["pod"] && bad["clusterIP"]:
		return e.WithHint(
			"Neither pods nor Services answer. A NetworkPolicy may keep the traffic manager's pod from\n" +
				"reaching them: allow egress from pods labelled\n" +
				"app.kubernetes.io/name=kubevpn in the manager's namespace. `kubevpn logs` has the details.")
	case bad["clusterIP"] && !vips:
		return e.WithHint(
			"Pods answer, ClusterIPs do not: the traffic manager may not read Services, so it dials ClusterIPs\n" +
				"as they are, and nothing serves them on its node. Ask an admin to run `kubevpn install`, which\n" +
				"lets it read Services.")
	case bad["dns"] && len(bad) == 1:
		return e.WithHint(
			"Pods, Services and names answer, cluster DNS does not over UDP. A NetworkPolicy may let the\n" +
				"traffic manager's pod reach it by TCP only, or a fragment or a long datagram is lost on the way.\n" +
				"`kubevpn logs` has the details.")
	case bad["name"] && len(bad) == 1:
		return e.WithHint(
			"Pods and Services answer, names do not. Names are resolved by way of %s; another VPN or\n"+
				"a local resolver may be in between. `kubevpn logs` has the details.", resolver)
	case bad["pod"] && len(bad) == 1:
		return e.WithHint("Services answer, this pod does not. A NetworkPolicy may refuse connections from the " +
			"traffic manager's namespace.")
	}
	return e.WithHint("`kubevpn logs` has the details.")
}
