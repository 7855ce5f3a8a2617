package connect

import (
	"context"
	"errors"
	"net"
	"os"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/laptop/dev"
	"kubevpn/pkg/host/sandbox"
)

type runOptions struct {
	f      *command.Factory
	flags  command.ConnectionFlags
	socks  string // address of the proxy; empty: a network of the program's own, if this machine allows it
	output *term.Format

	program []string
}

func newRun(f *command.Factory) *cobra.Command {
	o := &runOptions{f: f, output: term.NewFormat("text")}
	cmd := &cobra.Command{
		Use:   "run [flags] -- COMMAND...",
		Short: "Run a program of this machine on the cluster's network, without root",
		Long: "Run a program of this machine on the cluster's network. It needs no workload, no root and no daemon,\n" +
			"and changes nothing on this machine.\n\n" +
			"If Linux allows user namespaces and /dev/net/tun, the program gets a network of its own, which\n" +
			"reaches the cluster and all that this machine reaches. Elsewhere, and with --socks, it keeps this\n" +
			"machine's network, and the variables HTTP_PROXY, HTTPS_PROXY and ALL_PROXY name a proxy that reaches\n" +
			"the cluster. Programs that ignore them do not reach it: ping, dig, psql, Java, and most that speak\n" +
			"neither HTTP nor SOCKS.\n\n" +
			"kubevpn exits with the exit code of the program.",
		Example: command.Examples(
			"Run tests against the Services of a namespace", "kubevpn run -n shop -- go test ./integration",
			"Open a shell", "kubevpn run -- bash",
			"Connect to a database whose NetworkPolicy admits a workload",
			"kubevpn run -n shop --via deployment/web -- psql -h db",
			"Use a proxy, also where a network of its own is allowed",
			"kubevpn run --socks 127.0.0.1:0 -- curl http://web.default",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			if n := cmd.ArgsLenAtDash(); n != 0 || len(args) == 0 {
				return api.Errorf(api.ExitUsage, "`kubevpn run` requires a command after --").
					WithHint("for example: `kubevpn run -- ./server`")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.program = args
			return f.Report(cmd.Context(), o.output, o.run)
		},
	}
	o.flags.AddTo(cmd, f)
	o.flags.AddVia(cmd)
	cmd.Flags().StringVar(&o.socks, "socks", "",
		"loopback address and port of a proxy that the program uses, instead of a network of its own; port 0 takes a "+
			"free one")
	return cmd
}

func (o *runOptions) run(ctx context.Context, on func(api.Event), quiet func()) error {
	options := dev.Options{
		Args: o.program, Init: []string{command.SandboxCommand}, Environ: o.f.Environ,
		Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr, Show: on, Quiet: quiet, Mode: dev.Isolated,
	}
	at, why := o.socks, error(nil)
	if at == "" {
		if why = sandbox.Allowed(true); why != nil {
			at = "127.0.0.1:0"
		}
	}
	if at != "" {
		options.Mode = dev.Proxied
	}
	runner, err := dev.New(ctx, options)
	if err != nil {
		return err
	}
	if why != nil {
		runner.Show(api.Event{Warning: "the program gets a proxy instead of a network of its own (" + why.Error() +
			"): programs that ignore HTTP_PROXY and ALL_PROXY, such as ping, dig and psql, do not reach the cluster"})
	}
	var l net.Listener
	if at != "" {
		if l, err = command.ListenProxy(at); err != nil {
			return err
		}
		defer l.Close()
	}
	o.flags.Here, o.flags.Own = true, true
	req, err := o.flags.Request(ctx, runner.Show)
	if err != nil {
		return err
	}
	code, err := runner.Run(ctx, dev.Target{
		Hold: func(ctx context.Context, place sandbox.Place, on func(api.Event)) error {
			return o.flags.Hold(ctx, api.InterceptRequest{Connect: req}, place, l, o.output, on, quiet)
		},
	})
	switch {
	case errors.Is(err, sandbox.ErrNotAllowed): // some machines refuse only the attempt
		return api.AsError(err).WithHint("use a proxy: `kubevpn run --socks 127.0.0.1:0 -- %s`", o.program[0])
	case err == nil && code != 0:
		return command.ExitCode(code)
	}
	return err
}
