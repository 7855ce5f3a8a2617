package admin

import (
	"context"
	"fmt"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/laptop/cli/command"
)

type installOptions struct {
	f       *command.Factory
	kube    command.ClusterFlags
	upgrade bool
	dryRun  bool
	expose  string
	ranges  []string
}

func newInstall(f *command.Factory) *cobra.Command {
	o := &installOptions{f: f}
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install the traffic manager in a cluster for all users",
		Long: "Create the traffic manager in the cluster with your own permissions, and wait until it runs.\n" +
			"`kubevpn connect` does the same if you have the permissions. If developers lack them, or cannot\n" +
			"permit the manager to read Services, an admin runs this command once.",
		Example: command.Examples(
			"Install, as an admin", "kubevpn install --context admin@production --image registry.example/kubevpn:1",
			"Print the objects, for review or for another tool",
			"kubevpn install --dry-run --image registry.example/kubevpn:1 > kubevpn.yaml",
			"Replace the running version; interrupts the connections of all users",
			"kubevpn install --upgrade --image registry.example/kubevpn:2",
			"Let laptops that reach a node connect to the traffic manager without the API server",
			"kubevpn install --expose nodeport",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), nil, o.run) },
	}
	o.kube.AddTo(cmd, f)
	config.AddFlags(cmd, append(config.ObjectKeys(), config.KeyManagerNamespace, config.KeyImage, config.KeyYes)...)
	cmd.Flags().BoolVar(&o.upgrade, "upgrade", false,
		"replace a traffic manager of another version; interrupts the connections of all users")
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false,
		"print the objects as YAML and change nothing; requires no cluster")
	cmd.Flags().StringVar(&o.expose, "expose", "",
		"create a Service for the transport direct: "+strings.Join(install.Exposures(), ", ")+
			" (none removes it; default: change nothing)")
	command.Complete(cmd, "expose", install.Exposures()...)
	cmd.Flags().StringSliceVar(&o.ranges, "expose-source-ranges", nil,
		"networks of the laptops that may use the load balancer of --expose")
	return cmd
}

func (o *installOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	cfg, err := o.kube.Settings()
	if err != nil {
		return err
	}
	opts := install.Options{
		Namespace: cfg.ManagerNamespace, Image: cfg.Image, Upgrade: o.upgrade, Keep: true, Progress: on,
		Expose: o.expose, ExposeRanges: o.ranges, Objects: cfg.Objects,
	}
	if o.expose == install.ExposeLoadBalancer && len(o.ranges) == 0 && !cfg.Yes {
		return api.Errorf(api.ExitUsage, "--expose %s needs --expose-source-ranges: without it, most clouds let the "+
			"whole Internet connect", o.expose).WithHint("name the networks of your laptops, or allow all with --yes")
	}
	if o.dryRun {
		text, err := install.Manifest(opts)
		if err != nil {
			return err
		}
		_, err = o.f.Out.Write(text)
		return err
	}
	s, err := o.kube.Login(ctx, on)
	if err != nil {
		return err
	}
	opts.FallbackNamespace, opts.Consent = s.Prepared.Namespace, &api.Consent{}
	var result install.Result
	asks := command.Consenting{Factory: o.f, Cluster: s.Cluster, Consent: opts.Consent, Yes: cfg.Yes, Quiet: quiet}
	err = asks.Run(ctx, on, func(on func(api.Event)) (err error) {
		opts.Progress = on
		result, err = install.Ensure(ctx, s.Cluster, opts)
		return err
	})
	quiet()
	if err != nil {
		return s.ExplainContext(ctx, err)
	}
	for _, warning := range result.Warnings {
		fmt.Fprintf(o.f.Errout, "! %s\n", warning)
	}
	verb := "is already"
	if result.Installed {
		verb = "has been"
	}
	fmt.Fprintf(o.f.Out, "The traffic manager %s installed in %s: pod %s/%s, image %s\n",
		verb, s.Name(), result.Namespace, result.Pod, result.Image)
	if result.Exposed != "" {
		fmt.Fprintln(o.f.Out, result.Exposed)
	}
	if result.Release != "" {
		fmt.Fprintf(o.f.Out, "It belongs to the Helm release %s: change it with `helm upgrade`.\n",
			api.ShellQuote(result.Release))
	}
	return nil
}
