package workload

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"slices"
	"strings"

	"github.com/spf13/cobra"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/labels"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/workloads"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/clone"
)

type listOptions struct {
	f        *command.Factory
	kube     command.ClusterFlags
	all      bool
	selector string
	output   *term.Format
}

func newList(f *command.Factory) *cobra.Command {
	o := &listOptions{f: f, output: term.NewObjectFormat("table", "wide")}
	cmd := &cobra.Command{
		Use:   "list",
		Short: "List workloads, and who intercepts or clones them",
		Long: "List the workloads of a namespace: the modes in which `kubevpn proxy` can add an agent, the ports,\n" +
			"and the owners of intercepts and clones, also on other machines. The command asks only the API server;\n" +
			"it needs no connection. It does not check your rights: `kubevpn proxy` does. An owner is listed for a\n" +
			"minute after the end of an intercept. `kubevpn status` shows the intercepts of this machine.",
		Example: command.Examples(
			"List the workloads of the current namespace", "kubevpn list",
			"List those of all namespaces with a label", "kubevpn list -A -l team=shop",
			"Also show Services, and why a mode is missing", "kubevpn list -o wide",
			"Print who intercepts what, for a script",
			"kubevpn list -o jsonpath='{range .items[*]}{.workload}: {.intercepts[*].owner}{\"\\n\"}{end}'",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), nil, o.run) },
	}
	cmd.Flags().BoolVarP(&o.all, "all-namespaces", "A", false, "list the workloads of all namespaces")
	cmd.Flags().StringVarP(&o.selector, "selector", "l", "",
		"list only workloads with these labels, for example team=shop,tier!=db")
	o.kube.AddTo(cmd, f)
	o.output.AddTo(cmd)
	return cmd
}

func (o *listOptions) run(ctx context.Context, on func(api.Event), _ func()) error {
	selector, err := labels.Parse(o.selector)
	if err != nil {
		return api.Errorf(api.ExitUsage, "--selector: %w", err).WithHint("write it like -l team=shop,tier!=db")
	}
	c, err := o.kube.Login(ctx, func(api.Event) {}) // a list shows no steps
	if err != nil {
		return err
	}
	namespace := c.Prepared.Namespace
	if o.all {
		namespace = metav1.NamespaceAll
	}
	list, err := workloads.New(c.Cluster).List(ctx, namespace, selector)
	if err != nil {
		return err
	}
	if err := o.addClones(ctx, c.Cluster, &list, namespace); err != nil {
		return err
	}
	o.addMatches(ctx, c.ID(), &list)
	for _, warning := range list.Warnings {
		on(api.Event{Warning: warning})
	}
	return o.print(o.f.Out, list)
}

// addClones adds the clones of the listed workloads, and without a selector those of others, such as CronJobs.
func (o *listOptions) addClones(ctx context.Context, c *client.Cluster, list *api.WorkloadList,
	namespace string) error {
	found, err := clone.List(ctx, c.Kube(), namespace)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if err != nil {
		list.Warnings = append(list.Warnings, "cannot list all clones: "+api.OneLine(c.Explain(err).Message))
	}
	for _, f := range found {
		n := slices.IndexFunc(list.Items, func(w api.Workload) bool {
			return w.Namespace == f.Namespace && w.Workload == f.Workload
		})
		if n < 0 {
			if o.selector != "" {
				continue
			}
			n = len(list.Items)
			list.Items = append(list.Items, api.Workload{Namespace: f.Namespace, Workload: f.Workload,
				Modes: []string{}, Ports: []api.WorkloadPort{}, Intercepts: []api.Holder{},
				Reason: "only its clones were listed"})
		}
		list.Items[n].Clones = append(list.Items[n].Clones, f.Holder)
	}
	return nil
}

// addMatches adds the matches that the daemon of this machine knows.
func (o *listOptions) addMatches(ctx context.Context, clusterID string, list *api.WorkloadList) {
	status, err := o.f.Status(ctx)
	if err != nil {
		return // no daemon runs, or it does not answer: only the matches are missing
	}
	connections := map[string]bool{}
	for _, c := range status.Connections {
		connections[c.ID] = c.ClusterID == clusterID
	}
	for _, i := range status.Intercepts {
		if !connections[i.Connection] {
			continue
		}
		matches := map[string]string{i.Owner: term.Matched(i.Match, i.Mirror)}
		for _, other := range i.Others {
			matches[other.Owner] = term.Matched(other.Match, other.Mirror)
		}
		for _, w := range list.Items {
			if w.Namespace != i.Namespace || w.Workload != i.Workload {
				continue
			}
			for n := range w.Intercepts {
				w.Intercepts[n].Match = matches[w.Intercepts[n].Owner]
			}
		}
	}
}

func (o *listOptions) print(w io.Writer, list api.WorkloadList) error {
	if !o.output.ForPeople() {
		names := api.Texts(list.Items, func(item api.Workload) string { return item.Workload })
		return o.output.Print(w, list, names...)
	}
	if len(list.Items) == 0 {
		fmt.Fprintln(o.f.Errout, "no workloads found")
		return nil
	}
	t := term.NewTable(w, o.output.Wide())
	columns := []string{"WORKLOAD", "MODES", "PORTS", "PODS", "INTERCEPTS", "CLONES"}
	namespaced := func(namespace string, cells []string) []string {
		if o.all {
			return append([]string{namespace}, cells...)
		}
		return cells
	}
	t.Row(namespaced("NAMESPACE", columns), []string{"SERVICES", "REASON"})
	for _, item := range list.Items {
		cells := []string{item.Workload, strings.Join(item.Modes, ","), listedPorts(item.Ports), fmt.Sprint(item.Pods),
			o.holders(item.Intercepts), o.holders(item.Clones)}
		t.Row(term.OneLines(namespaced(item.Namespace, cells)),
			term.OneLines([]string{listedServices(item.Ports), item.Reason}))
	}
	return t.Flush()
}

func listedPorts(ports []api.WorkloadPort) string {
	return strings.Join(api.Texts(ports, func(p api.WorkloadPort) string { return term.Port(p.Protocol, p.Port) }), ",")
}

func listedServices(ports []api.WorkloadPort) string {
	var texts []string
	for _, p := range ports {
		texts = append(texts, p.Services...)
	}
	return strings.Join(texts, ",")
}

// holders lists owners, and with -o wide their modes, matches and clones.
func (o *listOptions) holders(all []api.Holder) string {
	var texts []string
	for _, h := range all {
		text := cmp.Or(h.Owner, "unknown")
		if o.output.Wide() {
			var notes []string
			switch {
			case h.Name != "":
				notes = append(notes, h.Namespace+"/"+h.Name)
			case h.Mode != "":
				notes = append(notes, fmt.Sprintf("%s, %d pods", h.Mode, h.Pods))
			}
			if h.Match != "" {
				notes = append(notes, h.Match)
			}
			text += " (" + strings.Join(notes, ": ") + ")"
		}
		if !slices.Contains(texts, text) {
			texts = append(texts, text)
		}
	}
	return strings.Join(texts, ", ")
}
