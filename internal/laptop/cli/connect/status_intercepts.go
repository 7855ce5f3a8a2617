package connect

import (
	"cmp"
	"fmt"
	"io"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/term"
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
	t := term.NewTable(w, o.output.Wide())
	t.Row([]string{"WORKLOAD", "MATCH", "PORTS", "PODS", "OWNER", "REQUESTS", "STATE"},
		[]string{"ID", "NAMESPACE", "CONNECTION", "MODE", "SINCE", "LAST ERROR"})
	for _, i := range status.Intercepts {
		name := i.Workload
		if i.Namespace != namespaces[i.Connection] {
			name += " -n " + i.Namespace // the form that `leave` accepts
		}
		intercepted, state := term.Pods(&i), string(i.State)
		if i.Clone != nil && i.Clone.NoTraffic { // the pods of the workload do not take part
			intercepted, state = "-", string(i.Clone.State)
		}
		ports := strings.Join(api.Texts(i.Ports, term.PortMap), ", ")
		t.Row(term.OneLines([]string{name, term.Matched(i.Match, i.Mirror), ports, intercepted, i.Owner,
			fmt.Sprint(i.Requests), state}),
			term.OneLines([]string{i.ID, i.Namespace, i.Connection, i.Mode, term.Age(i.Since, now), i.LastError}))
		for _, other := range i.Others {
			state := string(api.InterceptActive)
			if other.Away {
				state = "away"
			}
			ports := strings.Join(api.Texts(other.Ports, agentPort), ", ")
			t.Row(term.OneLines([]string{name, term.Matched(other.Match, other.Mirror), ports, "", other.Owner,
				fmt.Sprint(other.Requests), state}),
				term.OneLines([]string{"", i.Namespace, i.Connection, "", term.Age(other.Since, now), other.LastError}))
		}
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, i := range status.Intercepts {
		term.PrintDetails(w, i.Workload, o.interceptDetails(i))
	}
	return nil
}

// interceptDetails returns the lines below the table: warnings and errors, and with -o wide also reasons and checks.
func (o *statusOptions) interceptDetails(i api.Intercept) []string {
	var lines []string
	if o.output.Wide() {
		if i.ModeReason != "" {
			lines = append(lines, "agent "+i.Mode+": "+i.ModeReason)
		}
		lines = append(lines, prefixed("checked ", api.Texts(i.Checks, term.CheckText))...)
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
	if i.LastError != "" && !o.output.Wide() {
		lines = append(lines, "! last error: "+i.LastError)
	}
	lines = append(lines, prefixed("! ", i.Warnings)...)
	for _, other := range i.Others {
		lines = append(lines, prefixed("! "+other.Owner+": ", other.Notes)...)
	}
	return append(lines, term.ErrorLines(i.Error)...)
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
		lines = append(lines, "name "+term.CloneHost(c))
	}
	for _, s := range c.Sync {
		line := "sync " + term.Synced(s)
		if s.LastError != "" {
			line = "! " + line
		}
		lines = append(lines, line)
	}
	for _, p := range c.Pods {
		if o.output.Wide() {
			lines = append(lines, fmt.Sprintf("pod %s: %s", strings.TrimSpace(p.Name+" "+p.IP), term.ClonePod(p)))
		} else if !p.Ready {
			lines = append(lines, fmt.Sprintf("! pod %s is %s", p.Name, term.ClonePod(p)))
		}
	}
	if o.output.Wide() {
		lines = append(lines, prefixed("note ", c.Notes)...)
	}
	return lines
}

func agentPort(p api.AgentPort) string { return term.Port(p.Protocol, p.Port) }
