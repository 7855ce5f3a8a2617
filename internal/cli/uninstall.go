package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/install"
	"kubevpn/internal/session"
)

type uninstallOptions struct {
	app      *app
	kube     kubeFlags
	settings settingFlags
	force    bool
}

func newUninstall(a *app) *cobra.Command {
	o := &uninstallOptions{app: a}
	cmd := &cobra.Command{
		Use:   "uninstall",
		Short: "Remove the traffic manager from a cluster",
		Long: "Uninstall removes everything that kubevpn put into the cluster, and nothing else. It does not when somebody\n" +
			"is connected, unless it is told to.",
		Example: examples(
			"Remove the traffic manager from the current context's cluster", "kubevpn uninstall",
			"From a namespace of your choice", "kubevpn uninstall --manager-namespace tools",
			"Although others are connected", "kubevpn uninstall --force",
		),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.kube.addTo(cmd, a)
	o.settings.addTo(cmd, config.KeyManagerNamespace)
	cmd.Flags().BoolVar(&o.force, "force", false, "also when somebody is connected")
	return cmd
}

func (o *uninstallOptions) run(ctx context.Context) error {
	cfg, err := o.settings.load(o.app)
	if err != nil {
		return err
	}
	c, _, err := o.kube.load(o.app)
	if err != nil {
		return err
	}
	p := o.app.newProgress()
	defer p.stop()
	opts := install.RemoveOptions{Namespace: cfg.ManagerNamespace, Progress: p.show}
	if !o.force {
		opts.Guard = func(ctx context.Context, namespace, pod string) error {
			n, err := session.Others(ctx, c, namespace, pod)
			if err != nil && ctx.Err() == nil {
				p.show(api.Event{Warning: fmt.Sprintf("whether somebody is connected cannot be told: %v", err)})
				return nil
			}
			return refuseIfConnected(n, err)
		}
	}
	removed, err := install.Remove(ctx, c, opts)
	p.stop()
	if err != nil {
		return explain(ctx, c, err)
	}
	for _, r := range removed {
		if r.Kept != "" {
			fmt.Fprintf(o.app.out, "kept     %s: %s\n", r, r.Kept)
			continue
		}
		fmt.Fprintf(o.app.out, "removed  %s\n", r)
	}
	if len(removed) == 0 {
		fmt.Fprintln(o.app.errout, "nothing of kubevpn is installed there")
	}
	return nil
}

func refuseIfConnected(sessions int, err error) error {
	if err != nil || sessions == 0 {
		return err
	}
	who := "a laptop is"
	if sessions > 1 {
		who = fmt.Sprintf("%d laptops are", sessions)
	}
	return api.Errorf(api.ExitInstall, "%s connected through this traffic manager", who).
		WithHint("`kubevpn disconnect` ends your own connection; --force ends those of others too")
}
