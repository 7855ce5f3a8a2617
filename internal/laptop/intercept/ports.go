package intercept

import (
	"cmp"
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
	"kubevpn/internal/kube/workloads"
)

// choosePorts returns the ports to intercept, and the container that serves them: the ports in spec, or all ports of
// the container. A port without a local port gets the same number on the laptop.
func choosePorts(w *workloads.Workload, spec api.InterceptSpec) (ports []api.PortMap, container string, err error) {
	requested := make([]uint16, 0, len(spec.Ports))
	for _, p := range spec.Ports {
		p.Protocol = cmp.Or(p.Protocol, "tcp")
		if p.Container == 0 {
			if p, err = named(w, p); err != nil {
				return nil, "", err
			}
		}
		p.Local = cmp.Or(p.Local, p.Container)
		ports, requested = append(ports, p), append(requested, p.Container)
	}
	c, err := w.Container(spec.Container, requested...)
	if err != nil {
		return nil, "", err
	}
	known := w.PortsOf(c.Name)
	if len(ports) == 0 {
		for _, p := range known {
			ports = append(ports, api.PortMap{Protocol: p.Protocol, Container: p.Port, Name: p.Name, Local: p.Port})
		}
	}
	if spec.Observe { // requests are recorded on TCP ports only
		ports = slices.DeleteFunc(ports, func(p api.PortMap) bool { return p.Protocol != "tcp" })
	}
	if len(ports) == 0 {
		return nil, "", api.Errorf(api.ExitWorkload,
			"the container %s of %s declares no port, and no Service sends to one", c.Name, w).
			WithHint("Name the port that it listens on: --port 8080")
	}
	for n := range ports {
		if p := portOf(known, ports[n]); p != nil {
			ports[n].Name = cmp.Or(ports[n].Name, p.Name)
		}
	}
	return ports, c.Name, nil
}

// portOf returns the port of a workload that a PortMap intercepts, or nil.
func portOf(known []workloads.Port, m api.PortMap) *workloads.Port {
	return api.Find(known, func(p workloads.Port) bool { return p.Port == m.Container && p.Protocol == m.Protocol })
}

// named resolves a port that the user gave by its name.
func named(w *workloads.Workload, requested api.PortMap) (api.PortMap, error) {
	var names []string
	for _, p := range w.Ports() {
		if p.Name == requested.Name && p.Protocol == requested.Protocol {
			requested.Container = p.Port
			return requested, nil
		}
		if p.Name != "" {
			names = append(names, p.Name)
		}
	}
	e := api.Errorf(api.ExitWorkload, "the pods of %s declare no %s port %q", w, strings.ToUpper(requested.Protocol),
		requested.Name)
	if len(names) > 0 {
		return requested, e.WithHint("They declare %s.", strings.Join(names, ", "))
	}
	return requested, e.WithHint("Give its number.")
}

// portsText returns text like "tcp 8080, udp 53 to 5353".
func portsText(ports []api.PortMap) string {
	texts := make([]string, len(ports))
	for i, p := range ports {
		texts[i] = fmt.Sprintf("%s %d", p.Protocol, p.Container)
		if p.Host != "" {
			texts[i] += " to " + p.Place()
		} else if p.Local != p.Container {
			texts[i] += fmt.Sprintf(" to %d", p.Local)
		}
	}
	return strings.Join(texts, ", ")
}

// placeTimeout limits the check of the hosts that the user named.
const placeTimeout = 2 * time.Second

// errLoop is why the laptop does not dial an address: the request may return to the intercept.
var errLoop = errors.New("the connection leads into the cluster there, and the requests may return to the workload")

// placeDialer returns a dialer that does not dial through the connection: there may be the workload itself.
func (i *Intercept) placeDialer() *net.Dialer {
	return &net.Dialer{Control: func(_, address string, _ syscall.RawConn) error {
		at, err := netip.ParseAddrPort(address)
		if err != nil || at.Addr().IsLoopback() {
			return err
		}
		for _, network := range i.cfg.Session.Status().CIDRs {
			if network.Contains(at.Addr().Unmap()) {
				return fmt.Errorf("%v: %w", at, errLoop)
			}
		}
		return nil
	}}
}

// checkPlaces returns an error if a host that the user named cannot be the place of a program. If none listens yet, it
// warns.
func (i *Intercept) checkPlaces(ctx context.Context, ports []api.PortMap) error {
	dialer := i.placeDialer()
	dialer.Timeout = placeTimeout
	for _, p := range ports {
		if p.Host == "" {
			continue
		}
		conn, err := dialer.DialContext(ctx, p.Protocol, p.Place())
		if err == nil {
			conn.Close()
		} else if unknown := (*net.DNSError)(nil); errors.Is(err, errLoop) || errors.As(err, &unknown) {
			return api.Errorf(api.ExitUsage, "requests cannot go to %s: %w", p.Place(), err).
				WithHint("Name a host that this machine reaches without the cluster. `kubevpn clone` sends requests " +
					"to a copy in the cluster.")
		} else {
			i.warn(fmt.Sprintf("no program answers at %s now: %v", p.Place(), err))
		}
	}
	return nil
}
