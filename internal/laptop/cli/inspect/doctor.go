package inspect

import (
	"context"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/config"
	"kubevpn/internal/inspect/doctor"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
)

type doctorOptions struct {
	f      *command.Factory
	kube   command.ClusterFlags
	output *term.Format
}

func newDoctor(f *command.Factory) *cobra.Command {
	o := &doctorOptions{f: f, output: term.NewObjectFormat("text")}
	cmd := &cobra.Command{
		Use:   "doctor",
		Short: "Find out why a connection does not work",
		Long: "Check what `kubevpn connect` needs on this machine, on the way to the API server and in the\n" +
			"cluster. The command changes nothing, needs no root, and works without a daemon and without a\n" +
			"cluster. Each fault has its cause, its effect and the command that fixes it.\n\n" +
			"The exit code is 0 if no check failed, otherwise that of the first failed check: the code with\n" +
			"which `kubevpn connect` would fail. Warnings do not change it.",
		Example: command.Examples(
			"Check everything", "kubevpn doctor",
			"Check another cluster", "kubevpn doctor --context staging -n shop",
			"Print the faults only, for a script",
			`kubevpn doctor -o jsonpath='{range .findings[?(@.verdict=="failed")]}{.cause}{"\n"}{end}'`,
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.kube.AddTo(cmd, f)
	command.Section(cmd, command.SectionConnection, func(*pflag.FlagSet) {
		config.AddFlags(cmd, config.KeyImage, config.KeyManagerNamespace, config.KeyExtraCIDRs, config.KeyExcludeCIDRs,
			config.KeyMap, config.KeyNoMap)
	})
	o.output.AddTo(cmd)
	return cmd
}

func (o *doctorOptions) run(ctx context.Context) error {
	cfg, err := doctorConfig(o.f, &o.kube)
	if err != nil {
		return err
	}
	p := newFindingPrinter(o.f.Out)
	if o.output.ForPeople() {
		cfg.Found = p.finding
	}
	d := doctor.Run(ctx, cfg)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	return p.finish(o.output, d)
}
