package connect

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"
	"time"

	"github.com/dustin/go-humanize"
	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/wakeup"
)

type statusOptions struct {
	f      *command.Factory
	output *term.Format
	watch  bool
}

func newStatus(f *command.Factory) *cobra.Command {
	o := &statusOptions{f: f, output: term.NewObjectFormat("table", "wide")}
	cmd := &cobra.Command{
		Use:   "status",
		Short: "Show the connections, intercepts and clones",
		Long: "Show the connections of this machine, the workloads whose requests go to this machine, and the\n" +
			"clones. The command asks only the daemon on this machine. It does not start the daemon and does\n" +
			"not contact a cluster.",
		Example: command.Examples(
			"Show the connections", "kubevpn status",
			"Also show devices, networks, name resolution and checks", "kubevpn status -o wide",
			"Print again after each change", "kubevpn status --watch",
			"Print the state of the first connection, for a script",
			"kubevpn status -o jsonpath='{.connections[0].status}'",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	cmd.Flags().BoolVarP(&o.watch, "watch", "w", false, "print the status again after each change, until Ctrl-C")
	o.output.AddTo(cmd)
	return cmd
}

func (o *statusOptions) run(ctx context.Context) error {
	status, err := o.f.Status(ctx)
	if err != nil {
		return err
	}
	if status.Version != version.Full() {
		fmt.Fprintf(o.f.Errout,
			"! the daemon is kubevpn %s, this is %s; `kubevpn quit` stops it and ends its connections\n",
			status.Version, version.Full())
	}
	if err := o.print(o.f.Out, status, time.Now()); err != nil || !o.watch {
		return err
	}
	return o.follow(ctx, status)
}

// watchInterval is the pause between two requests of --watch, which the daemon answers from memory.
const watchInterval = time.Second

// follow prints the status after each change until Ctrl-C. Measurements and ages are no changes.
func (o *statusOptions) follow(ctx context.Context, status api.Status) error {
	start := time.Now()
	shown, err := o.withoutMeasurements(status, start)
	for err == nil && wakeup.Pause(ctx, watchInterval) {
		if status, err = o.f.Status(ctx); ctx.Err() != nil {
			return nil
		}
		text := shown
		if err == nil {
			text, err = o.withoutMeasurements(status, start)
		}
		if err != nil || text == shown {
			continue
		}
		shown = text
		if o.output.ForPeople() {
			fmt.Fprintln(o.f.Out)
		}
		err = o.print(o.f.Out, status, time.Now())
	}
	return err
}

// withoutMeasurements returns the output of print without measurements, which change all the time.
func (o *statusOptions) withoutMeasurements(status api.Status, now time.Time) (string, error) {
	status.Connections = slices.Clone(status.Connections)
	for n := range status.Connections {
		c := &status.Connections[n]
		c.Seconds, c.Transports = 0, slices.Clone(c.Transports)
		for m := range c.Transports {
			t := &c.Transports[m]
			t.Seconds, t.Sent, t.Received = 0, 0, 0
		}
	}
	var b strings.Builder
	err := o.print(&b, status, now)
	return b.String(), err
}

func (o *statusOptions) print(w io.Writer, status api.Status, now time.Time) error {
	if !o.output.ForPeople() {
		return o.output.Print(w, status, statusNames(status)...)
	}
	if len(status.Connections) == 0 && len(status.Intercepts) == 0 && len(status.Projects) == 0 {
		fmt.Fprintln(w, "not connected")
		return nil
	}
	t := term.NewTable(w, o.output.Wide())
	t.Row([]string{"ID", "CLUSTER", "NAMESPACE", "STATUS", "NETSTACK", "TRANSPORT", "SINCE"},
		[]string{"DEVICE", "ADDRESSES", "NETWORKS", "DNS", "SERVICES", "MANAGER"})
	for _, c := range status.Connections {
		t.Row(term.OneLines([]string{c.ID, c.Cluster, c.Namespace, string(c.Status), c.Netstack, c.Transport,
			term.Age(c.Since, now)}),
			term.OneLines([]string{c.Device, api.Join(c.Addresses), api.Join(c.CIDRs), string(c.DNS.Mode), c.Services,
				manager(c)}))
	}
	if err := t.Flush(); err != nil {
		return err
	}
	for _, c := range status.Connections {
		term.PrintDetails(w, c.ID, o.details(c))
	}
	if o.output.Wide() && status.Machine != "" {
		term.PrintDetails(w, "machine", []string{status.Machine + ": docs/platforms.md says what differs"})
	}
	if o.output.Wide() && status.Helper != "" {
		term.PrintDetails(w, "root helper", []string{"started by: " + status.Helper})
	}
	for _, p := range status.Projects {
		term.PrintDetails(w, p.Name, append(api.Texts(p.Entries, func(e api.ProjectEntry) string {
			return strings.TrimSpace(fmt.Sprintf("%s %s: %s for %s %s", e.Kind, e.Name, e.State, term.Age(e.Since, now),
				api.OneLine(e.Detail)))
		}), "output: "+p.Log))
	}
	return o.printIntercepts(w, status, now)
}

// statusNames returns the lines of -o name.
func statusNames(status api.Status) []string {
	return append(api.Texts(status.Connections, func(c api.Connection) string { return "connection/" + c.ID }),
		api.Texts(status.Intercepts, func(i api.Intercept) string { return "intercept/" + i.ID })...)
}

// details returns the lines below the table: warnings and errors, and with -o wide also reasons and checks.
func (o *statusOptions) details(c api.Connection) []string {
	var lines []string
	if c.Via != nil {
		lines = append(lines, "connections leave "+viaText(c.Via))
	}
	for _, m := range c.Mappings {
		lines = append(lines, fmt.Sprintf("%v of the cluster is %v on this machine", m.Cluster, m.Local))
	}
	if o.output.Wide() {
		if c.NetstackReason != "" {
			lines = append(lines, "netstack "+c.Netstack+": "+c.NetstackReason)
		}
		lines = append(lines, api.Texts(c.Transports, describeTransport)...)
		if c.ProxyMode != "" {
			lines = append(lines, "kube-proxy "+c.ProxyMode)
		}
		if len(c.AllowInbound) > 0 {
			lines = append(lines, "other laptops may connect to "+api.Join(c.AllowInbound))
		}
		for _, s := range c.Settings {
			if s.Origin != api.OriginDefault {
				lines = append(lines, fmt.Sprintf("setting %s %s: from the %s, %s", s.Key, term.Dash(s.Value), s.Origin,
					s.Source))
			}
		}
		lines = append(lines, describeDomains(c.DNS)...)
		if n := c.DNS.StaleAnswers; n > 0 {
			lines = append(lines, fmt.Sprintf("%d DNS answers were up to 30 s older than their TTL, because the "+
				"connection was interrupted", n))
		}
		lines = append(lines, prefixed("checked ", api.Texts(c.Checks, term.CheckText))...)
	}
	lines = append(lines, unroutedHosts(c.DNS.Hosts)...)
	return slices.Concat(lines, prefixed("! ", c.Warnings), term.ErrorLines(c.Error))
}

// prefixed returns the texts behind a prefix.
func prefixed(prefix string, texts []string) []string {
	return api.Texts(texts, func(text string) string { return prefix + text })
}

// describeDomains returns lines about names that are resolved differently because the user said so.
func describeDomains(s api.DNSStatus) (lines []string) {
	if s.Alias != "" {
		lines = append(lines, "names NAME.NAMESPACE."+s.Alias+" are always of this cluster")
	}
	lines = slices.Concat(lines, prefixed("cluster DNS answers names under ", s.ExtraDomains),
		prefixed("this machine's nameservers answer names under ", s.ExcludeDomains))
	for _, h := range s.Hosts {
		if h.Routed {
			lines = append(lines, fmt.Sprintf("routed %v: %s", h.Address, h.Name))
		}
	}
	return lines
}

// unroutedHosts returns a line for each of the first term.MaxShown hosts without a route.
func unroutedHosts(hosts []api.Host) (lines []string) {
	for _, h := range hosts {
		if !h.Routed {
			lines = append(lines, fmt.Sprintf("! %v (%s) is not routed: %s", h.Address, h.Name, h.Reason))
		}
	}
	if left := len(lines) - term.MaxShown; left > 0 {
		lines = append(lines[:term.MaxShown], fmt.Sprintf("! and %d more", left))
	}
	return lines
}

// describeTransport returns a line about one transport: "api-proxy in use: round trip 0.2 ms, 3.1 MB sent, 20 MB
// received".
func describeTransport(t api.Transport) string {
	line := t.Name + " " + string(t.State)
	if t.Reason != "" {
		line += " (" + t.Reason + ")"
	}
	var figures []string
	if t.Seconds > 0 {
		figures = append(figures, fmt.Sprintf("round trip %.1f ms", t.Seconds*1e3))
	}
	if t.Sent+t.Received > 0 {
		figures = append(figures,
			fmt.Sprintf("%s sent, %s received", humanize.Bytes(t.Sent), humanize.Bytes(t.Received)))
	}
	if len(figures) > 0 {
		line += ": " + strings.Join(figures, ", ")
	}
	return line
}

func manager(c api.Connection) string {
	if c.ManagerPod == "" {
		return ""
	}
	return fmt.Sprintf("%s/%s (%s)", c.ManagerNamespace, c.ManagerPod, c.ManagerVersion)
}

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
	if i.Exposed != "" {
		lines = append(lines, "name "+i.Exposed)
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
