package dev

import (
	"context"
	"fmt"
	"net/netip"
	"slices"
	"strings"

	"github.com/miekg/dns"
	corev1 "k8s.io/api/core/v1"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/sandbox"
)

// resolve sends the name resolution for the program on the machine's network: first that of its pod by way of the
// connection, and that of this machine when the daemon has released the connection. It sends nothing after ctx ends.
func (r *Runner) resolve(ctx context.Context, p *Program, c *api.Connection, released <-chan struct{}) {
	machine, err := dns.ClientConfigFromFile("/etc/resolv.conf")
	if err != nil {
		machine = &dns.ClientConfig{Servers: []string{"127.0.0.1"}} // resolv.conf(5)
	}
	own := machineNames(machine)
	if c.DNS.Domain == "" || !c.DNS.Programs.IsValid() {
		p.names <- own
		if c.Namespace != r.target.Namespace {
			r.warn(fmt.Sprintf("short names belong to the connection's namespace %s: in %s, write NAME.%[2]s.svc",
				c.Namespace, r.target.Namespace))
		}
		return
	}
	p.names <- podNames(c.DNS, p.cfg.Pod, r.target.Namespace, own)
	go func() {
		select {
		case <-released:
			p.names <- own
		case <-ctx.Done():
		}
	}()
}

// machineNames returns the name resolution of a resolv.conf.
func machineNames(c *dns.ClientConfig) (n sandbox.Network) {
	for _, server := range c.Servers {
		if a, err := netip.ParseAddr(server); err == nil {
			n.DNS = append(n.DNS, a)
		}
	}
	n.Search = slices.DeleteFunc(slices.Clone(c.Search), func(d string) bool { return strings.Trim(d, ".") == "" })
	n.Options = []string{fmt.Sprintf("ndots:%d", c.Ndots)}
	return n
}

// podNames returns the name resolution that a pod of the namespace has, without the search domains of its node or of
// this machine: with ndots:5, a wildcard record in one of them answers for every name outside of the cluster. The
// nameserver gives names no namespace: that of systemd-resolved does not, and the daemon has one. The daemon's resolver
// for the machine uses the namespace of the connection.
func podNames(s api.DNSStatus, pod *corev1.Pod, namespace string, machine sandbox.Network) sandbox.Network {
	stub := func(a netip.Addr) bool { return a.IsLoopback() && strings.HasPrefix(a.String(), "127.0.0.5") }
	n := sandbox.Network{DNS: machine.DNS}
	if s.Mode != api.ResolverResolved || !slices.ContainsFunc(machine.DNS, stub) {
		n.DNS = []netip.Addr{s.Programs}
	}
	if pod.Spec.DNSPolicy != corev1.DNSNone {
		n.Search = []string{namespace + ".svc." + s.Domain, "svc." + s.Domain, s.Domain}
		n.Options = []string{"ndots:5"}
	}
	if own := pod.Spec.DNSConfig; own != nil {
		n.Search = append(n.Search, own.Searches...)
		for _, o := range own.Options { // of two with one name, the last applies
			option := o.Name
			if o.Value != nil {
				option += ":" + *o.Value
			}
			n.Options = append(n.Options, option)
		}
	}
	return n
}
