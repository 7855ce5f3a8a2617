package inspect

import (
	"cmp"
	"context"
	"fmt"
	"io"
	"net/http"
	"slices"
	"strings"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/doctor"
	"kubevpn/internal/inspect/why"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/hostservice"
)

// doctorConfig returns the configuration of the checks for doctor and report.
func doctorConfig(f *command.Factory, kube *command.ClusterFlags) (doctor.Config, error) {
	timeout, err := kube.Timeout()
	if err != nil {
		return doctor.Config{}, err
	}
	settings, err := kube.Settings()
	if err != nil {
		return doctor.Config{}, err
	}
	cfg := doctor.Config{
		Settings: settings.ConnectSettings,
		Terminal: f.LoginTerminal(), Timeout: timeout, Machine: f.Machine,
		Load: func() (client.Prepared, *client.Cluster, error) {
			s, err := kube.Load()
			return s.Prepared, s.Cluster, err
		},
		Status: f.Status, HelperService: hostservice.Status, Foresee: connection.Foresee, Try: connection.Try,
	}
	cfg.Paths, err = f.Paths()
	return cfg, err
}

// whyConfig returns the configuration for a request, with what the daemon knows of the connection to the cluster, and
// of its intercepts.
func whyConfig(ctx context.Context, f *command.Factory, c *client.Cluster, req *http.Request,
	timeout time.Duration) (why.Config, error) {
	cfg := why.Config{Kube: c.Kube(), Request: req, Timeout: timeout}
	status, err := f.Status(ctx)
	if err != nil {
		return cfg, err
	}
	n := slices.IndexFunc(status.Connections, func(s api.Connection) bool { return s.ClusterID == c.ID() })
	if n < 0 {
		return cfg, api.Errorf(api.ExitNotConnected, "this machine is not connected to the cluster %s", c.Name()).
			WithHint("`kubevpn connect` connects it")
	}
	cfg.Connection = status.Connections[n]
	if slices.ContainsFunc(status.Intercepts, func(i api.Intercept) bool {
		return i.Connection == cfg.Connection.ID
	}) {
		cfg.Trace = func(ctx context.Context) ([]api.InterceptTrace, error) {
			return f.Daemon().Trace(ctx, req.Header.Get(api.TraceHeader))
		}
	}
	return cfg, nil
}

// findingPrinter prints findings as they arrive, in sections.
type findingPrinter struct {
	w        io.Writer
	section  string
	verdicts map[api.Verdict]int // how many findings have it
}

func newFindingPrinter(w io.Writer) *findingPrinter {
	return &findingPrinter{w: w, verdicts: map[api.Verdict]int{}}
}

// waited is the time, in seconds, below which nobody waited for a check.
const waited = 100e-6

func (p *findingPrinter) finding(f api.Finding) {
	if p.verdicts[f.Verdict]++; f.Section != p.section {
		if p.section != "" {
			fmt.Fprintln(p.w)
		}
		p.section = f.Section
		fmt.Fprintln(p.w, f.Section)
	}
	took := "-"
	if f.Seconds >= waited {
		took = term.Took(f.Seconds)
	}
	fmt.Fprintf(p.w, "  %-7s  %-13s  %-6s  %s\n", f.Verdict, f.Name, took, cmp.Or(f.Cause, f.Seen))
	p.details("note:", f.Notes...)
	p.details("effect:", f.Effect)
	p.details("fix:", strings.Split(f.Fix, "\n")...)
}

func (p *findingPrinter) findings(d api.Diagnosis) {
	for _, f := range d.Findings {
		p.finding(f)
	}
}

// details prints the lines that are not empty, with a label before the first one.
func (p *findingPrinter) details(label string, lines ...string) {
	for _, line := range lines {
		if line = strings.TrimSpace(line); line != "" {
			fmt.Fprintf(p.w, "           %-7s  %s\n", label, line)
			label = ""
		}
	}
}

// finish prints the diagnosis, of which the printer has shown the findings to people. The error is the exit code of the
// first failed check.
func (p *findingPrinter) finish(output *term.Format, d api.Diagnosis) error {
	if output.ForPeople() {
		p.summary()
	} else if err := output.Print(p.w, d, api.Texts(d.Findings, func(f api.Finding) string {
		return "finding/" + strings.ReplaceAll(f.Name, " ", "-")
	})...); err != nil {
		return err
	}
	if f := d.Failed(); f != nil {
		return command.ExitCode(f.Code)
	}
	return nil
}

// summary prints how many checks ended with each verdict.
func (p *findingPrinter) summary() {
	fmt.Fprintf(p.w, "\n%d failed, %d warnings, %d ok, %d skipped\n", p.verdicts[api.VerdictFailed],
		p.verdicts[api.VerdictWarning], p.verdicts[api.VerdictOK], p.verdicts[api.VerdictSkipped])
}
