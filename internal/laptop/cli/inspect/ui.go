package inspect

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
	"kubevpn/internal/laptop/cli/term"
)

type uiOptions struct {
	f      *command.Factory
	kube   command.ClusterFlags
	output *term.Format
	stop   bool
	noOpen bool
}

func newUI(f *command.Factory) *cobra.Command {
	o := &uiOptions{f: f, output: term.NewObjectFormat("text")}
	cmd := &cobra.Command{
		Use:   "ui",
		Short: "Show connections, flows, names and intercepts in a browser",
		Long: "Print the URL of a page that shows the connections with their transports and checks, throughput and\n" +
			"round trip, flows, names, intercepts with their requests, clones, the findings of `kubevpn doctor`\n" +
			"and the log, and open it if there is a browser. The daemon serves the page on a loopback address,\n" +
			"until it ends or `kubevpn ui --stop`. The page changes nothing. Anyone with the URL can read it.\n" +
			"Without the URL, other users and other web sites cannot.",
		Example: command.Examples(
			"Open the page", "kubevpn ui",
			"Only print its URL", "kubevpn ui --no-open",
			"End the page", "kubevpn ui --stop",
		),
		RunE: func(cmd *cobra.Command, _ []string) error { return o.run(cmd.Context()) },
	}
	cmd.Flags().BoolVar(&o.noOpen, "no-open", false, "do not open a browser")
	cmd.Flags().BoolVar(&o.stop, "stop", false, "end the page")
	o.kube.AddTo(cmd, f)
	command.Section(cmd, command.SectionConnection, func(*pflag.FlagSet) {
		config.AddFlags(cmd, config.KeyImage, config.KeyManagerNamespace, config.KeyExtraCIDRs, config.KeyExcludeCIDRs,
			config.KeyRedact)
	})
	o.output.AddTo(cmd)
	return cmd
}

func (o *uiOptions) run(ctx context.Context) error {
	req, err := o.request()
	if err != nil {
		return err
	}
	c := o.f.Daemon()
	if !o.stop { // a daemon that does not run serves no page
		if _, err := c.Start(ctx); err != nil {
			return err
		}
	}
	p, err := c.Page(ctx, req)
	if err != nil && !(o.stop && errors.Is(err, daemonclient.ErrNoDaemon)) {
		return err
	}
	p.TypeMeta = api.Type(api.KindPage)
	opened := !o.stop && !o.noOpen && openBrowser(o.f, p.File)
	switch {
	case !o.output.ForPeople():
		return o.output.Print(o.f.Out, p, "page/"+p.URL)
	case o.stop:
		return nil
	}
	fmt.Fprintln(o.f.Out, p.URL)
	if !opened {
		o.f.Note("open this URL in a browser of this machine; `kubevpn ui --stop` ends the page")
	}
	return nil
}

// request returns the request to the daemon. A kubeconfig that cannot be used is a finding of the page's checks.
func (o *uiOptions) request() (api.PageRequest, error) {
	if o.stop {
		return api.PageRequest{Stop: true}, nil
	}
	cfg, err := o.kube.Settings()
	if err != nil {
		return api.PageRequest{}, err
	}
	req := api.PageRequest{Machine: o.f.Machine, Redact: cfg.Redact}
	prepared, err := o.kube.Prepare(&cfg)
	if err != nil {
		req.KubeconfigError = api.AsError(err)
	}
	req.Cluster = prepared.Cluster
	req.Connect = api.ConnectRequest{
		Kubeconfig: prepared.Kubeconfig, Context: prepared.Context, Namespace: prepared.Namespace,
		ConnectSettings: cfg.ConnectSettings,
	}
	return req, nil
}

// openBrowser opens a file in the user's browser, and reports whether there may be one.
func openBrowser(f *command.Factory, file string) bool {
	argv := []string{"xdg-open", file}
	switch {
	case runtime.GOOS == "darwin":
		argv[0] = "open"
	case runtime.GOOS == "windows":
		argv = []string{"rundll32", "url.dll,FileProtocolHandler", file}
	case f.Getenv("DISPLAY") == "" && f.Getenv("WAYLAND_DISPLAY") == "" || os.Geteuid() == 0: // browsers refuse root
		return false
	}
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Env = f.Environ
	if err := cmd.Start(); err != nil {
		f.Log.Debug("cannot open a browser", "err", err)
		return false
	}
	if err := cmd.Process.Release(); err != nil { // the browser may be its child, and outlives this command
		f.Log.Debug("cannot release the browser", "err", err)
	}
	return true
}
