package connection

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"slices"
	"strings"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
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
	return wakeup.All(checks, func(check func(context.Context) api.Check) api.Check {
		ctx, cancel := context.WithTimeout(ctx, probeTimeout)
		defer cancel()
		start := time.Now()
		out := check(ctx)
		out.Seconds = time.Since(start).Seconds()
		return out
	})
}

func (p prober) checkName(ctx context.Context, name string, want []netip.Addr) api.Check {
	got, err := p.lookup(ctx, name)
	return resolved(name, texts(got), err, texts(want)...)
}

func texts(addrs []netip.Addr) []string {
	return api.Texts(addrs, func(a netip.Addr) string { return a.Unmap().String() })
}

// checkAddress resolves the address of a Service to its name (PTR).
func (p prober) checkAddress(ctx context.Context, addr netip.Addr, want string) api.Check {
	got, err := p.resolver.LookupAddr(ctx, addr.String())
	for i := range got {
		got[i] = strings.TrimSuffix(got[i], ".")
	}
	return resolved(addr.String(), got, err, want)
}

// resolved returns the check of what a resolver answers. Any of want passes; without one, anything does.
func resolved(target string, got []string, err error, want ...string) api.Check {
	c := api.Check{What: "name", Target: target}
	if err != nil {
		c.Seen = transport.Describe(err)
		return c
	}
	c.Seen = strings.Join(got, ", ")
	c.OK = len(want) == 0 || slices.ContainsFunc(got, func(answer string) bool {
		return slices.ContainsFunc(want, func(w string) bool { return strings.EqualFold(answer, w) })
	})
	if !c.OK {
		c.Seen += fmt.Sprintf(" (expected %s)", want[0])
	}
	return c
}

func (p prober) checkTCP(ctx context.Context, what string, target netip.AddrPort) api.Check {
	refused := false
	c := reached(what, target, "no running "+what+" with a TCP port is visible", "connected", func() error {
		conn, err := p.connect(ctx, target)
		if err != nil {
			refused = errors.Is(err, syscall.ECONNREFUSED)
			return err
		}
		conn.Close()
		return nil
	})
	c.OK = c.OK || what == "pod" && refused // the pod itself refuses, so the tunnel reaches it
	return c
}

// reached returns the check of a target. Without one, such as in an empty namespace, nothing has failed, and the result
// says what is missing. done says what try did.
func reached(what string, target netip.AddrPort, missing, done string, try func() error) api.Check {
	if !target.IsValid() {
		return api.Check{What: what, OK: true, Target: "none", Seen: "not tried: " + missing}
	}
	c := api.Check{What: what, Target: target.String()}
	start := time.Now()
	if err := try(); err != nil {
		c.Seen = transport.Describe(err)
		return c
	}
	c.OK, c.Seen = true, fmt.Sprintf("%s in %d ms", done, time.Since(start).Milliseconds())
	return c
}

// connect tries again from another source port while there is no answer. IPVS keeps a flow for two minutes after its
// end: meanwhile its source port cannot connect to the same endpoint directly (docs/netstacks.md).
func (p prober) connect(ctx context.Context, target netip.AddrPort) (conn net.Conn, err error) {
	for range probeTimeout / dialTime {
		attempt, cancel := context.WithTimeout(ctx, dialTime)
		conn, err = p.dial(attempt, "tcp", target.String())
		cancel()
		if err == nil || transport.CodeOf(err) != transport.CodeTimeout || ctx.Err() != nil {
			break
		}
	}
	return conn, err
}

// checkDNS asks cluster DNS over UDP, without this machine's resolver. Any answer passes, also NXDOMAIN.
func (p prober) checkDNS(ctx context.Context, server netip.AddrPort, name string) api.Check {
	r := net.Resolver{PreferGo: true, Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
		if !strings.HasPrefix(network, "udp") {
			return nil, errors.New("the answer does not fit into a datagram")
		}
		return p.dial(ctx, "udp", server.String())
	}}
	return reached("dns", server, "no cluster DNS is routed into the tunnel", "answered over UDP", func() error {
		_, err := r.LookupNetIP(ctx, "ip", name+".")
		var dns *net.DNSError
		if errors.As(err, &dns) && dns.IsNotFound {
			return nil
		}
		return err
	})
}

// probeError returns the error that connect shows for failed checks, or nil.
func probeError(checks []api.Check, resolver api.ResolverMode, vips bool) error {
	all := failed(checks)
	if len(all) == 0 {
		return nil
	}
	bad := map[string]bool{}
	for _, c := range all {
		bad[c.What] = true
	}
	e := api.Errorf(api.ExitProbe, "the tunnel is up but does not reach the cluster: %s", describe(all))
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
