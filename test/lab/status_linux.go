package lab

import (
	"errors"
	"fmt"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// Status is the current state of a lab.
type Status struct {
	Name       string          `json:"name"`
	Up         bool            `json:"up"` // Up has finished, and all processes are alive
	Nodes      []NodeStatus    `json:"nodes"`
	ProxyMode  ProxyMode       `json:"proxyMode"`
	Guests     bool            `json:"guests"` // nodes with ProxyIPVS run their own kernels
	IPv6       bool            `json:"ipv6"`
	Server     string          `json:"server"`
	Created    time.Time       `json:"created"`
	Dir        string          `json:"dir"`
	Kubeconfig string          `json:"kubeconfig"` // the admin's
	Processes  []ProcessStatus `json:"processes"`
}

// NodeStatus describes a node and its addresses.
type NodeStatus struct {
	Name      string         `json:"name"`
	Place     string         `json:"place"` // for `lab exec`
	Addresses []netip.Addr   `json:"addresses"`
	PodRanges []netip.Prefix `json:"podRanges"`
}

// ProcessStatus describes a process of the lab.
type ProcessStatus struct {
	Name    string `json:"name"`
	PID     int    `json:"pid"`
	Running bool   `json:"running"`
	Log     string `json:"log"`
}

// Status returns the state of the lab. The error is ErrNotUp if there is no lab or only remains of one.
func (l *Lab) Status() (Status, error) {
	s, err := readState(l.stateFile())
	if errors.Is(err, os.ErrNotExist) {
		return Status{}, fmt.Errorf("%s: %w: run 'lab up'", l.config.Name, ErrNotUp)
	}
	if err != nil {
		return Status{}, err
	}
	c := s.config(l.config.Dir)
	status := Status{
		Name: c.Name, Up: s.Ready, ProxyMode: c.ProxyMode, Guests: c.guests, IPv6: c.IPv6, Server: c.Server(),
		Created: s.Created,
		Dir:     l.dir(), Kubeconfig: l.pki(Admin + ".kubeconfig"),
	}
	for n := 1; n <= c.Nodes; n++ {
		node := NodeStatus{Name: c.NodeName(n), Place: fmt.Sprintf("node%d", n)}
		for _, f := range c.Families() {
			node.Addresses = append(node.Addresses, f.Node(n))
			node.PodRanges = append(node.PodRanges, f.PodRange(n))
		}
		status.Nodes = append(status.Nodes, node)
	}
	for _, p := range s.Processes {
		running := p.Running()
		status.Up = status.Up && running
		status.Processes = append(status.Processes, ProcessStatus{p.Name, p.PID, running, l.logFile(p.Name)})
	}
	return status, nil
}

// List returns the names of all labs whose state is in dir (default as in Config.Dir).
func List(dir string) ([]string, error) {
	c := Config{Dir: dir}.withDefaults()
	files, err := filepath.Glob(filepath.Join(c.Dir, "*", "state.json"))
	if err != nil {
		return nil, err
	}
	var names []string
	for _, f := range files {
		names = append(names, filepath.Base(filepath.Dir(f)))
	}
	slices.Sort(names)
	return names, nil
}

// String formats the status for users.
func (s Status) String() string {
	var b strings.Builder
	word := "up"
	if !s.Up {
		word = "not complete"
	}
	mode := "kube-proxy " + string(s.ProxyMode)
	if s.ProxyMode == ProxyNone {
		mode = "no kube-proxy"
	}
	if s.Guests {
		mode += ", nodes with IPVS on user-mode Linux"
	}
	fmt.Fprintf(&b, "lab %q is %s, %s\n", s.Name, word, mode)
	fmt.Fprintf(&b, "API server  %s\nkubeconfig  %s\nstate, logs %s\n\n", s.Server, s.Kubeconfig, s.Dir)
	for _, n := range s.Nodes {
		fmt.Fprintf(&b, "%-16s addresses %v, pods %v\n", n.Name, n.Addresses, n.PodRanges)
	}
	b.WriteByte('\n')
	for _, p := range s.Processes {
		state := "running"
		if !p.Running {
			state = "DEAD, see " + p.Log
		}
		fmt.Fprintf(&b, "%-26s pid %-8d %s\n", p.Name, p.PID, state)
	}
	return b.String()
}
