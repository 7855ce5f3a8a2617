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
	"kubevpn/internal/kube/podenv"
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
	n.Search = []string{namespace + ".svc." + s.Domain, "svc." + s.Domain, s.Domain}
	n.Options = []string{"ndots:5"}
	configure(&n, pod)
	return n
}

// configure applies the pod's own settings to the name resolution of other pods of its namespace.
func configure(n *sandbox.Network, pod *corev1.Pod) {
	if pod.Spec.DNSPolicy == corev1.DNSNone {
		n.Search, n.Options = nil, nil
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
}

// podPlace is the network of a program that is in place of a pod: its names are the pod's, as far as its spec says,
// unless the connection knows what they are.
type podPlace struct {
	sandbox.Place
	pod *corev1.Pod
}

func (p podPlace) SetNetwork(ctx context.Context, n sandbox.Network) error {
	if n.Hosts == "" {
		n.Search, n.Options = slices.Clone(n.Search), slices.Clone(n.Options)
		configure(&n, p.pod)
		n.Hosts = hostsFile(p.pod)
	}
	return p.Place.SetNetwork(ctx, n)
}

// hostsFile returns the hosts file of a pod, as the kubelet writes it, without the pod's own lines.
// https://github.com/kubernetes/kubernetes/blob/v1.36.0/pkg/kubelet/kubelet_pods.go, managedHostsFileContent
func hostsFile(pod *corev1.Pod) string {
	text := "# Kubernetes-managed hosts file.\n127.0.0.1\tlocalhost\n::1\tlocalhost ip6-localhost ip6-loopback\n" +
		"fe00::0\tip6-localnet\nfe00::0\tip6-mcastprefix\nfe00::1\tip6-allnodes\nfe00::2\tip6-allrouters\n"
	if len(pod.Spec.HostAliases) > 0 {
		text += "\n# Entries added by HostAliases.\n"
	}
	for _, a := range pod.Spec.HostAliases {
		if ip, err := netip.ParseAddr(a.IP); err == nil { // else it is not an API server's
			text += ip.String() + "\t" + strings.Join(strings.Fields(strings.Join(a.Hostnames, " ")), "\t") + "\n"
		}
	}
	return text
}

// hostname returns the host name of a program with a network of its own, which is the pod's; "": this machine's.
func hostname(cfg Config) string {
	if cfg.Network == nil {
		return ""
	}
	return podenv.Hostname(cfg.Pod)
}
