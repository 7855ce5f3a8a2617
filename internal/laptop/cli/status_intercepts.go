package cli

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"kubevpn/internal/api"
)

// printIntercepts writes the second table of status: a row for each intercept of this machine, followed by a row for
// each intercept of another owner on the same workload.
func (o *statusOptions) printIntercepts(w io.Writer, status api.Status, now time.Time) error {
	if len(status.Intercepts) == 0 {
		return nil
	}
	namespaces := map[string]string{}
	for _, c := range status.Connections {
		namespaces[c.ID] = c.Namespace
	}
	fmt.Fprintln(w)
	t := newTable(w, o.output.value == "wide")
	t.row([]string{"WORKLOAD", "MATCH", "PORTS", "PODS", "OWNER", "REQUESTS", "STATE"},
		[]string{"ID", "NAMESPACE", "CONNECTION", "MODE", "SINCE", "LAST ERROR"})
	for _, i := range status.Intercepts {
		name := i.Workload
		if i.Namespace != namespaces[i.Connection] {
			name += " -n " + i.Namespace // the form that `leave` accepts
		}
		intercepted, state := pods(&i), string(i.State)
		if i.Clone != nil && i.Clone.NoTraffic { // the pods of the workload do not take part
			intercepted, state = "-", string(i.Clone.State)
		}
		ports := strings.Join(api.Texts(i.Ports, portMap), ", ")
		t.row([]string{name, dash(matched(i.Match, i.Mirror)), dash(ports), intercepted, dash(i.Owner),
			fmt.Sprint(i.Requests), state},
			[]string{i.ID, i.Namespace, i.Connection, dash(i.Mode), age(i.Since, now), dash(i.LastError)})
		for _, other := range i.Others {
			state := string(api.InterceptActive)
			if other.Away {
				state = "away"
			}
			ports := strings.Join(api.Texts(other.Ports, agentPort), ", ")
			t.row([]string{name, dash(matched(other.Match, other.Mirror)), dash(ports), "-", dash(other.Owner),
				fmt.Sprint(other.Requests), state},
				[]string{"-", i.Namespace, i.Connection, "-", age(other.Since, now), dash(other.LastError)})
		}
	}
	if err := t.flush(); err != nil {
		return err
	}
	for _, i := range status.Intercepts {
		printDetails(w, i.Workload, o.interceptDetails(i))
	}
	return nil
}

// interceptDetails returns the lines below the table: warnings and errors, and with -o wide also reasons and checks.
func (o *statusOptions) interceptDetails(i api.Intercept) []string {
	var lines []string
	if o.output.value == "wide" {
		if i.ModeReason != "" {
			lines = append(lines, "agent "+i.Mode+": "+i.ModeReason)
		}
		lines = append(lines, prefixed("checked ", api.Texts(i.Checks, checkText))...)
	}
	if i.Clone != nil {
		lines = append(lines, o.cloneDetails(i.Clone)...)
	}
	for _, pod := range i.Pods {
		if !pod.Intercepted {
			lines = append(lines, fmt.Sprintf("! pod %s is not intercepted: %s", pod.Name,
				cmp.Or(pod.Reason, "not yet")))
		}
	}
	if i.LastError != "" && o.output.value != "wide" {
		lines = append(lines, "! last error: "+i.LastError)
	}
	lines = append(lines, prefixed("! ", i.Warnings)...)
	for _, other := range i.Others {
		lines = append(lines, prefixed("! "+other.Owner+": ", other.Notes)...)
	}
	return append(lines, errorLines(i.Error)...)
}

// cloneDetails returns the lines about a clone: its name and state, its host name, its file copies and its pods.
func (o *statusOptions) cloneDetails(c *api.Clone) []string {
	ready := 0
	for _, p := range c.Pods {
		if p.Ready {
			ready++
		}
	}
	lines := []string{fmt.Sprintf("clone %s, namespace %s: %s, %d/%d pods ready", c.Name, c.Namespace, c.State, ready,
		len(c.Pods))}
	if c.Host != "" {
		lines = append(lines, "name "+hostName(c))
	}
	for _, s := range c.Sync {
		line := "sync " + syncState(s)
		if s.LastError != "" {
			line = "! " + line
		}
		lines = append(lines, line)
	}
	for _, p := range c.Pods {
		if o.output.value == "wide" {
			lines = append(lines, fmt.Sprintf("pod %s: %s", strings.TrimSpace(p.Name+" "+p.IP), podState(p)))
		} else if !p.Ready {
			lines = append(lines, fmt.Sprintf("! pod %s is %s", p.Name, podState(p)))
		}
	}
	if o.output.value == "wide" {
		lines = append(lines, prefixed("note ", c.Notes)...)
	}
	return lines
}

// portMap formats a port like --port: 8080, udp/5353:53 or 80=172.17.0.5:8080.
func portMap(p api.PortMap) string {
	text := portNumber(p.Protocol, p.Local)
	if p.Host != "" {
		return portNumber(p.Protocol, p.Container) + "=" + p.Place()
	} else if p.Local != p.Container {
		text += fmt.Sprintf(":%d", p.Container)
	}
	return text
}

func agentPort(p api.AgentPort) string { return portNumber(p.Protocol, p.Port) }

// portNumber returns "8080" or "udp/53".
func portNumber(protocol string, port uint16) string {
	if protocol == "" || protocol == "tcp" {
		return fmt.Sprint(port)
	}
	return fmt.Sprintf("%s/%d", protocol, port)
}
