package workload

import (
	"context"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type resetOptions struct {
	f         *command.Factory
	workloads []string
	kube      command.ClusterFlags
	output    *term.Format
}

func newReset(f *command.Factory) *cobra.Command {
	o := &resetOptions{f: f, output: term.NewFormat("text", "json")}
	cmd := &cobra.Command{
		Use:   "reset TYPE/NAME...",
		Short: "Remove the intercepts of all users of a workload",
		Long: "End the intercepts of all users of a workload, so that all requests go to the workload again, and\n" +
			"remove the agents as far as Kubernetes can remove them from running pods. The command requires\n" +
			"permission to change the workload, but neither a connection nor root. Use `kubevpn leave` to end\n" +
			"your own intercepts.",
		Example: command.Examples(
			"Remove all intercepts of a workload", "kubevpn reset deployment/web",
			"Name the image if no traffic manager is installed",
			"kubevpn reset deployment/web --image registry.example/kubevpn:1",
			"As an admin, in another namespace", "kubevpn reset deployment/web -n shop --context admin@production",
		),
		Args: checkWorkloads,
		RunE: func(cmd *cobra.Command, args []string) error {
			o.workloads = args
			return f.Report(cmd.Context(), o.output, o.run)
		},
		ValidArgsFunction: o.kube.CompleteWorkloads,
	}
	o.kube.AddTo(cmd, f)
	config.AddFlags(cmd, config.KeyImage, config.KeyManagerNamespace, config.KeyYes)
	cmd.Flags().Lookup("image").Usage = "image of the traffic agent that removes the intercepts " +
		"(default: the traffic manager's)"
	o.output.AddTo(cmd)
	return cmd
}

func (o *resetOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	l, err := o.kube.Login(ctx, on)
	if err != nil {
		return err
	}
	req := api.ResetRequest{
		Namespace: l.Prepared.Namespace, Workloads: o.workloads, Image: l.Config.Image,
		ManagerNamespace: l.Config.ManagerNamespace,
	}
	c := command.Consenting{Factory: o.f, Cluster: l.Cluster, Consent: &req.Consent, Yes: l.Config.Yes,
		Batch: !o.output.ForPeople(), Quiet: quiet}
	return c.Run(ctx, on, func(on func(api.Event)) error { return o.f.Reset(ctx, l.Cluster, req, on) })
}
