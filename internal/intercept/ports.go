package intercept

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/workloads"
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
		if ports[n].Name != "" {
			continue
		}
		if i := slices.IndexFunc(known, func(p workloads.Port) bool {
			return p.Port == ports[n].Container && p.Protocol == ports[n].Protocol
		}); i >= 0 {
			ports[n].Name = known[i].Name
		}
	}
	return ports, c.Name, nil
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
		if p.Local != p.Container {
			texts[i] += fmt.Sprintf(" to %d", p.Local)
		}
	}
	return strings.Join(texts, ", ")
}
