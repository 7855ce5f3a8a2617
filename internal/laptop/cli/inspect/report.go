package inspect

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/inspect/doctor"
	"kubevpn/internal/inspect/report"
	"kubevpn/internal/inspect/why"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/pkg/redact"
)

type reportOptions struct {
	f       *command.Factory
	kube    command.ClusterFlags
	file    string
	url     string
	request *http.Request // of url; nil: none
	timeout time.Duration // for the first answer of the API server; 0: none
	output  *term.Format
}

func newReport(f *command.Factory) *cobra.Command {
	o := &reportOptions{f: f, output: term.NewObjectFormat("text")}
	cmd := &cobra.Command{
		Use:   "report",
		Short: "Write logs, states and versions to an archive for an issue",
		Long: "Write one archive for an issue about kubevpn: versions, settings, the status and the log of the\n" +
			"daemon, the findings of `kubevpn doctor`, routes, rules and name resolution of this machine, and the\n" +
			"state and the logs of the traffic manager, the gateways and the agents. With --why, it sends one\n" +
			"request and adds what `kubevpn why` finds. The command changes nothing. It needs neither a daemon nor\n" +
			"a cluster: the archive lists what is missing, and why. kubevpn replaces the secrets that it knows or\n" +
			"recognizes. Look at the files before you send the archive.",
		Example: command.Examples(
			"Write an archive to the current directory", "kubevpn report",
			"Include agents in the namespace shop, and choose the file",
			"kubevpn report -n shop --file /tmp/report.tar.gz",
			"Explain a request that fails", "kubevpn report --why http://web.default/",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return f.Report(cmd.Context(), nil, o.run) },
	}
	cmd.Flags().StringVar(&o.file, "file", "",
		"file to create, which must not exist (default: kubevpn-report-TIME.tar.gz in the current directory)")
	cmd.Flags().StringVar(&o.url, "why", "", "URL of a GET request to send from this machine and to explain")
	command.CompleteWith(cmd, "why", cobra.NoFileCompletions)
	o.kube.AddTo(cmd, f)
	config.AddFlags(cmd, config.KeyManagerNamespace)
	o.output.AddTo(cmd)
	return cmd
}

func (o *reportOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	var err error
	if o.timeout, err = o.kube.Timeout(); err != nil {
		return err
	}
	if o.url != "" {
		if o.request, err = (&whyOptions{method: http.MethodGet, timeout: why.Timeout}).request(o.url); err != nil {
			return err
		}
	}
	name := cmp.Or(o.file, "kubevpn-report-"+time.Now().UTC().Format("20060102-150405")+".tar.gz")
	file, err := os.OpenFile(name, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600) // first: without it, the rest is in vain
	if err != nil {
		return api.Errorf(api.ExitUsage, "cannot create the archive: %w", err).
			WithHint("name a file that does not exist with --file")
	}
	on(api.Event{Step: "Collecting"})
	list, err := o.write(ctx, file)
	quiet()
	if err = cmp.Or(err, file.Close(), ctx.Err()); err != nil {
		os.Remove(name) // it is incomplete
		return fmt.Errorf("cannot write the archive: %w", err)
	}
	if path, err := filepath.Abs(name); err == nil {
		name = path
	}
	if !o.output.ForPeople() {
		r := api.Report{TypeMeta: api.Type(api.KindReport), File: name, Parts: list}
		return o.output.Print(o.f.Out, r, "report/"+name)
	}
	report.Print(o.f.Out, list)
	fmt.Fprintf(o.f.Out, "\n%s\n\n  tar -xOzf %s | less\n", report.Notice, api.ShellQuote(name))
	return nil
}

// write collects the parts and writes them to the file. It returns their list.
func (o *reportOptions) write(ctx context.Context, file *os.File) ([]api.ReportPart, error) {
	status, statusErr := o.f.Status(ctx)
	var secrets redact.Redactor
	secrets.Add(report.Environment(o.f.Environ)...)
	secrets.Add(o.kube.Inputs.Secrets()...)
	if paths, err := o.f.Paths(); err == nil {
		key, _ := os.ReadFile(paths.KeyFile()) // without it, there is nothing to hide
		secrets.Add(string(key))
	}
	for n := range status.Connections {
		if s := status.Connections[n].SOCKS; s != nil {
			secrets.Add(s.Password)
			status.Connections[n].SOCKS = nil
		}
	}
	s, err := o.kube.Load()
	parts := report.Collect(ctx,
		func(ctx context.Context) []report.Part { return o.local(ctx, status, statusErr) },
		func(ctx context.Context) []report.Part { return []report.Part{o.findings(ctx, s, err)} },
		report.Machine,
		func(ctx context.Context) []report.Part { return o.cluster(ctx, s, err, status) })
	if s.Cluster != nil {
		secrets.Add(s.Secrets()...) // a credential plugin has run meanwhile
	}
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	return report.Write(file, parts, &secrets)
}

// local returns the parts about this program and the daemon.
func (o *reportOptions) local(ctx context.Context, status api.Status, statusErr error) (parts []report.Part) {
	add := func(name, about string, object any, err error) {
		var text strings.Builder
		err = errors.Join(err, term.NewFormat("json").Print(&text, object))
		parts = append(parts, report.Part{Name: name, About: about, Text: text.String(), Err: err})
	}
	v, err := o.f.Version(ctx)
	add("version.json", "the versions of kubevpn", v, err)
	cfg, err := o.kube.Settings()
	add("settings.json", "the settings, without those of the cluster", cfg.Settings(), err)
	add("status.json", "the status of the daemon", status, statusErr)
	paths, err := o.f.Paths()
	if err != nil {
		return append(parts, report.Part{Name: "daemon.log", About: "the log of the daemon", Err: err})
	}
	return append(parts, report.File("daemon.log", "the end of the daemon's log", paths.LogFile()))
}

// findings returns what `kubevpn doctor` finds. It asks nothing on the terminal.
func (o *reportOptions) findings(ctx context.Context, s command.Selection, failed error) report.Part {
	p := report.Part{Name: "doctor.txt", About: "what `kubevpn doctor` finds"}
	cfg, err := doctorConfig(o.f, &o.kube)
	if err != nil {
		p.Err = err
		return p
	}
	var text strings.Builder
	printer := newFindingPrinter(&text)
	cfg.Terminal, cfg.Found = client.Terminal{}, printer.finding
	cfg.Load = func() (client.Prepared, *client.Cluster, error) { return s.Prepared, s.Cluster, failed }
	doctor.Run(ctx, cfg)
	printer.summary()
	p.Text = text.String()
	return p
}

// cluster returns the parts about the cluster. It asks nothing on the terminal.
func (o *reportOptions) cluster(ctx context.Context, s command.Selection, err error,
	status api.Status) []report.Part {
	if err == nil {
		_, err = s.OpenJump(ctx, client.Terminal{})
	}
	if err != nil {
		return []report.Part{{Name: "cluster.txt", About: "the cluster, the traffic manager and the agents", Err: err}}
	}
	from := report.Cluster{Cluster: s.Cluster, Timeout: o.timeout, ManagerNamespace: s.Config.ManagerNamespace,
		Namespace:   s.Prepared.Namespace,
		Intercepted: api.Texts(status.Intercepts, func(i api.Intercept) string { return i.Namespace })}
	return report.Collect(ctx,
		func(ctx context.Context) []report.Part { return o.explanation(ctx, s.Cluster) }, from.Collect)
}

// explanation returns what `kubevpn why` finds about the request of --why.
func (o *reportOptions) explanation(ctx context.Context, c *client.Cluster) []report.Part {
	if o.request == nil {
		return nil
	}
	p := report.Part{Name: "why.txt", About: "what `kubevpn why " + o.url + "` finds"}
	var cfg why.Config
	if cfg, p.Err = whyConfig(ctx, o.f, c, o.request, why.Timeout); p.Err == nil {
		var text strings.Builder
		printer := newFindingPrinter(&text)
		printer.findings(why.Explain(ctx, cfg))
		printer.summary()
		p.Text = text.String()
	}
	return []report.Part{p}
}
