package admin

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/connection"
)

type uninstallOptions struct {
	f     *command.Factory
	kube  command.ClusterFlags
	force bool
}

func newUninstall(f *command.Factory) *cobra.Command {
	o := &uninstallOptions{f: f}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove the traffic manager from a cluster",
		Long: "Remove everything that kubevpn installed in the cluster, and nothing else. The command fails while\n" +
			"a laptop is connected, unless you pass --force.",
		Example: command.Examples(
			"Remove the traffic manager from the current context's cluster", "kubevpn uninstall",
			"From another namespace", "kubevpn uninstall --manager-namespace tools",
			"Even if other users are connected", "kubevpn uninstall --force",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), nil, o.run) },
	}
	o.kube.AddTo(cmd, f)
	config.AddFlags(cmd, config.KeyManagerNamespace)
	cmd.Flags().BoolVar(&o.force, "force", false, "remove the traffic manager even if laptops are connected")
	return cmd
}

func (o *uninstallOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	c, err := o.kube.Login(ctx, on)
	if err != nil {
		return err
	}
	opts := install.RemoveOptions{Namespace: c.Config.ManagerNamespace, Progress: on}
	if !o.force {
		opts.Connected = func(ctx context.Context, namespace, pod string) (int, error) {
			return connection.Others(ctx, c.Cluster, namespace, pod)
		}
	}
	removed, err := install.Remove(ctx, c.Cluster, opts)
	quiet()
	if err != nil {
		return c.ExplainContext(ctx, err)
	}
	for _, r := range removed {
		if r.Kept != "" {
			fmt.Fprintf(o.f.Out, "kept     %s: %s\n", r, r.Kept)
			continue
		}
		fmt.Fprintf(o.f.Out, "removed  %s\n", r)
	}
	if len(removed) == 0 {
		fmt.Fprintln(o.f.Errout, "no resources found: kubevpn is not installed there")
	}
	return nil
}
