package cli

import (
	"context"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

type resetOptions struct {
	app       *app
	workloads []string
	kube      kubeFlags
	settings  settingFlags
	output    *format
}

func newReset(a *app) *cobra.Command {
	o := &resetOptions{app: a, output: newFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "reset TYPE/NAME...",
		Short: "Remove every intercept of a workload, whoever made it",
		Long: "Reset gives a workload back its requests: it ends the intercepts of all developers, and removes what was\n" +
			"added for them as far as a pod lets it. It needs the right to change the workload, and neither a connection nor root.\n" +
			"Your own intercepts are better ended with `kubevpn leave`.",
		Example: examples(
			"Somebody has gone home, and left an intercept", "kubevpn reset deployment/web",
			"As an admin, in another namespace", "kubevpn reset deployment/web -n shop --context admin@production",
		),
		Args: checkWorkloads,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads = args
			return a.report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: o.kube.completeWorkloads(a),
	}
	o.kube.addTo(cmd, a)
	o.settings.addTo(cmd, config.KeyImage)
	o.output.addTo(cmd)
	return cmd
}

func (o *resetOptions) run(ctx context.Context, on func(api.Event), _ func()) error {
	cfg, err := o.settings.load(o.app)
	if err != nil {
		return err
	}
	prepared, err := o.kube.prepare(o.app)
	if err != nil {
		return err
	}
	return o.app.Reset(ctx, api.ResetRequest{
		Kubeconfig: prepared.Kubeconfig, Namespace: prepared.Namespace, Workloads: o.workloads, Image: cfg.Image,
	}, on)
}
