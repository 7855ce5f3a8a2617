package connect

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type trustOptions struct {
	f      *command.Factory
	output *term.Format
}

func newTrust(f *command.Factory) *cobra.Command {
	cmd := &cobra.Command{
		Use:   "trust",
		Short: "List and remove trusted clusters",
		Long: "List and remove the consent that you gave to clusters. kubevpn asks for your consent before it uses\n" +
			"a traffic manager that another user installed, networks outside of private address space, a cluster\n" +
			"domain of the Internet, or networks and domains of the cluster's client defaults. It stores your\n" +
			"answer, and asks again when one of these changes.",
		Example: command.Examples("List trusted clusters", "kubevpn trust list", "Remove a cluster",
			"kubevpn trust remove 3f2a91c04b7e"),
	}
	o := &trustOptions{f: f, output: term.NewObjectFormat("table")}
	list := &cobra.Command{
		Use:   "list",
		Short: "List trusted clusters",
		Example: command.Examples("List trusted clusters", "kubevpn trust list", "Print them as JSON",
			"kubevpn trust list -o json"),
		RunE: func(*cobra.Command, []string) error { return o.list() },
	}
	o.output.AddTo(list)
	remove := &cobra.Command{
		Use:   "remove ID...",
		Short: "Remove trusted clusters",
		Long: "Remove the consent that you gave to the clusters with the given IDs. Open connections continue.\n" +
			"kubevpn asks again when you connect.",
		Example: command.Examples("Remove a cluster", "kubevpn trust remove 3f2a91c04b7e"),
		Args: func(cmd *cobra.Command, args []string) error {
			if len(args) == 0 {
				return api.Errorf(api.ExitUsage, "`kubevpn trust remove` requires the ID of a cluster").
					WithHint("`kubevpn trust list` shows the IDs")
			}
			return nil
		},
		RunE:              func(_ *cobra.Command, args []string) error { return o.remove(args) },
		ValidArgsFunction: o.completeClusters,
	}
	cmd.AddCommand(list, remove)
	return cmd
}

// load returns the trusted clusters by ID.
func (o *trustOptions) load() (map[string]config.Trusted, error) {
	paths, err := o.f.Paths()
	if err != nil {
		return nil, err
	}
	return paths.LoadTrust()
}

func (o *trustOptions) list() error {
	all, err := o.load()
	if err != nil {
		return err
	}
	if !o.output.ForPeople() {
		object := map[string]any{"kind": api.KindTrustedClusters, "apiVersion": api.ObjectVersion}
		var names []string
		for _, id := range slices.Sorted(maps.Keys(all)) {
			object[id] = all[id]
			names = append(names, "cluster/"+id)
		}
		return o.output.Print(o.f.Out, object, names...)
	}
	if len(all) == 0 {
		fmt.Fprintln(o.f.Errout, "no cluster is trusted")
		return nil
	}
	t := term.NewTable(o.f.Out, false)
	t.Row([]string{"ID", "CLUSTER", "NAMESPACE", "IMAGE", "SERVICEACCOUNT", "NETWORKS", "DOMAIN", "EXTRADOMAINS"}, nil)
	for _, id := range slices.Sorted(maps.Keys(all)) {
		c := all[id].Consent
		managers := c.Managers
		if len(managers) == 0 {
			managers = []api.TrustedManager{{}}
		}
		for _, m := range managers {
			t.Row(term.OneLines([]string{id, all[id].Cluster, m.Namespace, m.Repository, m.ServiceAccount,
				api.Join(c.Networks), c.Domain, api.Join(c.ExtraDomains)}), nil)
		}
	}
	return t.Flush()
}

func (o *trustOptions) remove(ids []string) error {
	paths, err := o.f.Paths()
	if err != nil {
		return err
	}
	var unknown []string
	err = paths.SaveTrust(func(all map[string]config.Trusted) {
		for _, id := range ids {
			if _, there := all[id]; !there {
				unknown = append(unknown, id)
			}
			delete(all, id)
		}
	})
	if err == nil && len(unknown) > 0 {
		return api.Errorf(api.ExitUsage, "no trusted cluster has the ID %s", strings.Join(unknown, ", ")).
			WithHint("`kubevpn trust list` shows the IDs")
	}
	return err
}

// completeClusters completes the IDs of trusted clusters.
func (o *trustOptions) completeClusters(_ *cobra.Command, args []string,
	_ string) ([]cobra.Completion, cobra.ShellCompDirective) {
	all, err := o.load()
	if err != nil {
		return nil, cobra.ShellCompDirectiveError
	}
	var ids []cobra.Completion
	for _, id := range slices.Sorted(maps.Keys(all)) {
		if !slices.Contains(args, id) {
			ids = append(ids, cobra.CompletionWithDesc(id, all[id].Cluster))
		}
	}
	return ids, cobra.ShellCompDirectiveNoFileComp
}
