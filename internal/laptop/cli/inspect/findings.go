package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"kubevpn/internal/api"
	"kubevpn/internal/inspect/doctor"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/connection"
	"kubevpn/internal/laptop/hostservice"
)

// doctorConfig returns the configuration of the checks.
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
		Prepare: func() (client.Prepared, error) { return kube.Prepare(&settings) },
		Load:    f.LoadCluster,
		Status: func(ctx context.Context) (*api.Status, error) {
			status, err := f.Daemon().Status(ctx)
			if errors.Is(err, daemonclient.ErrNoDaemon) {
				return nil, nil
			}
			return &status, err
		},
		HelperService: hostservice.Status, Foresee: connection.Foresee, Try: connection.Try,
	}
	cfg.Paths, err = f.Paths()
	return cfg, err
}

// findingPrinter prints findings as they arrive, in sections.
type findingPrinter struct {
	w       io.Writer
	section string
	states  map[api.FindingState]int // how many findings have it
}

func newFindingPrinter(w io.Writer) *findingPrinter {
	return &findingPrinter{w: w, states: map[api.FindingState]int{}}
}

func (p *findingPrinter) finding(f api.Finding) {
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
func (p *findingPrinter) end(d api.Diagnosis) {
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
