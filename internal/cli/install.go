package cli

import (
	"context"
	"fmt"

	"github.com/spf13/cobra"

	"kubevpn/internal/cluster"
	"kubevpn/internal/config"
	"kubevpn/internal/install"
	"kubevpn/internal/version"
)

type installOptions struct {
	app      *app
	kube     kubeFlags
	settings settingFlags
	upgrade  bool
	dryRun   bool
}

func newInstall(a *app) *cobra.Command {
	o := &installOptions{app: a}
	cmd := &cobra.Command{
		Use:   "install",
		Short: "Install the traffic manager into a cluster, for everybody",
		Long: "Install puts the traffic manager into the cluster with your own rights, and waits until it runs. `connect`\n" +
			"does the same where you may; an admin does it once where developers may not, or may not grant the manager\n" +
			"to read Services.",
		Example: examples(
			"Install, as an admin", "kubevpn install --context admin@production",
			"See what would be installed, or leave it to a tool of yours", "kubevpn install --dry-run > kubevpn.yaml",
			"Replace the version that runs; ends the sessions of all users", "kubevpn install --upgrade",
		),
		Args: noArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.kube.addTo(cmd, a)
	o.settings.addTo(cmd, config.KeyManagerNamespace, config.KeyImage)
	cmd.Flags().BoolVar(&o.upgrade, "upgrade", false, "replace a traffic manager of another version; ends other users' sessions")
	cmd.Flags().BoolVar(&o.dryRun, "dry-run", false, "print the objects as YAML and change nothing; needs no cluster")
	return cmd
}

func (o *installOptions) run(ctx context.Context) error {
	cfg, err := o.settings.load(o.app)
	if err != nil {
		return err
	}
	p := o.app.newProgress()
	defer p.stop()
	opts := install.Options{
		Namespace: cfg.ManagerNamespace, Image: cfg.Image, Upgrade: o.upgrade, Progress: p.show,
	}
	if o.dryRun {
		text, err := install.Manifest(opts)
		if err != nil {
			return err
		}
		_, err = o.app.out.Write(text)
		return err
	}
	c, prepared, err := o.kube.load(o.app)
	if err != nil {
		return err
	}
	opts.FallbackNamespace = prepared.Namespace
	result, err := install.Ensure(ctx, c, opts)
	p.stop()
	if err != nil {
		return explain(ctx, c, err)
	}
	for _, warning := range result.Warnings {
		fmt.Fprintf(o.app.errout, "! %s\n", warning)
	}
	verb := "is already"
	if result.Installed {
		verb = "has been"
	}
	fmt.Fprintf(o.app.out, "The traffic manager %s installed in %s: pod %s/%s, image %s\n",
		verb, c.Name(), result.Namespace, result.Pod, result.Image)
	return nil
}

// load makes a client of the cluster that the flags name, for this process.
func (k *kubeFlags) load(a *app) (*cluster.Cluster, cluster.Prepared, error) {
	prepared, err := k.prepare(a)
	if err != nil {
		return nil, cluster.Prepared{}, err
	}
	c, err := cluster.Load(prepared.Kubeconfig, cluster.Options{UserAgent: "kubevpn/" + version.String()})
	return c, prepared, err
}

// explain turns a failure of the API into what the user is told. An interrupt stays one.
func explain(ctx context.Context, c *cluster.Cluster, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return c.Explain(err)
}
