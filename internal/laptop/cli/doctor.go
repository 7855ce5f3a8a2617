package cli

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/inspect/doctor"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/hostservice"
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
			`kubevpn doctor -o jsonpath='{range .findings[?(@.state=="failed")]}{.cause}{"\n"}{end}'`,
		),
		Args: command.NoArgs,
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	o.kube.AddTo(cmd, f)
	command.Section(cmd, command.SectionConnection, func(*pflag.FlagSet) {
		config.AddFlags(cmd, config.KeyImage, config.KeyManagerNamespace, config.KeyExtraCIDRs, config.KeyExcludeCIDRs)
	})
	o.output.AddTo(cmd)
	return cmd
}

func (o *doctorOptions) run(ctx context.Context) error {
	cfg, err := o.config()
	if err != nil {
		return err
	}
	p := newDoctorPrinter(o.f.Out)
	if o.output.ForPeople() {
		cfg.Found = p.finding
	}
	d := doctor.Run(ctx, cfg)
	if ctx.Err() != nil {
		return ctx.Err()
	}
	if !o.output.ForPeople() {
		if err := o.output.Print(o.f.Out, d, findingNames(d)...); err != nil {
			return err
		}
	} else {
		p.end(d)
	}
	if f := d.Failed(); f != nil {
		return command.ExitCode(f.Code)
	}
	return nil
}

func (o *doctorOptions) config() (doctor.Config, error) {
	timeout, err := o.kube.Timeout()
	if err != nil {
		return doctor.Config{}, err
	}
	cfg := doctor.Config{
		Terminal: o.f.LoginTerminal(), Timeout: timeout, Machine: o.f.Machine,
		Prepare:       func() (client.Prepared, error) { return o.kube.Prepare() },
		Load:          o.f.LoadCluster,
		Status:        o.status,
		HelperService: hostservice.Status, Foresee: connection.Foresee, Try: connection.Try,
	}
	if cfg.Paths, err = o.f.Paths(); err != nil {
		return cfg, err
	}
	settings, err := o.kube.Settings()
	cfg.Settings = settings.ConnectSettings
	return cfg, err
}

// status returns the status of the daemon, or nil if none runs.
func (o *doctorOptions) status(ctx context.Context) (*api.Status, error) {
	c, err := o.f.Daemon()
	if err != nil {
		return nil, err
	}
	status, err := c.Status(ctx)
	if errors.Is(err, daemonclient.ErrNoDaemon) {
		return nil, nil
	}
	return &status, err
}

// findingNames returns the lines of -o name.
func findingNames(d api.Diagnosis) []string {
	return api.Texts(d.Findings, func(f api.Finding) string {
		return "finding/" + strings.ReplaceAll(f.Name, " ", "-")
	})
}

// doctorPrinter prints findings as they arrive, in sections.
type doctorPrinter struct {
	w       io.Writer
	section string
	states  map[api.FindingState]int // how many findings have it
}

func newDoctorPrinter(w io.Writer) *doctorPrinter {
	return &doctorPrinter{w: w, states: map[api.FindingState]int{}}
}

func (p *doctorPrinter) finding(f api.Finding) {
	if p.states[f.State]++; f.Section != p.section {
		if p.section != "" {
			fmt.Fprintln(p.w)
		}
		p.section = f.Section
		fmt.Fprintln(p.w, f.Section)
	}
	fmt.Fprintf(p.w, "  %-7s  %-13s  %s\n", f.State, f.Name, cmp.Or(f.Cause, f.Seen))
	if f.Effect != "" {
		fmt.Fprintf(p.w, "           effect:  %s\n", f.Effect)
	}
	label := "fix:"
	for line := range strings.Lines(f.Fix) {
		if line = strings.TrimSpace(line); line != "" {
			fmt.Fprintf(p.w, "           %-7s  %s\n", label, line)
			label = ""
		}
	}
}

// end prints the table of rights and the summary.
func (p *doctorPrinter) end(d api.Diagnosis) {
	if len(d.Rights) > 0 {
		fmt.Fprintln(p.w, "\nYour rights")
		t := term.NewTable(p.w, false)
		for _, r := range d.Rights {
			switch n := len(r.Missing); {
			case r.Allowed:
				t.Row([]string{"  yes", r.Gives}, nil)
			case n > 1:
				t.Row([]string{"  no", r.Gives, fmt.Sprintf("you may not %s, and %d more", r.Missing[0], n-1)}, nil)
			default:
				t.Row([]string{"  no", r.Gives, "you may not " + r.Missing[0]}, nil)
			}
		}
		_ = t.Flush()
	}
	fmt.Fprintf(p.w, "\n%d failed, %d warnings, %d ok, %d skipped\n", p.states[api.FindingFailed],
		p.states[api.FindingWarning], p.states[api.FindingOK], p.states[api.FindingSkipped])
}
