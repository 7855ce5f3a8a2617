package cli

import (
	"context"
	"encoding/json"
	"os"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/cluster"
)

// newDaemon is the process that startDaemon starts.
func newDaemon(a *app) *cobra.Command {
	readyFD := 0
	cmd := &cobra.Command{
		Use:     "daemon",
		Short:   "Keep connections (started by the other commands)",
		Example: examples("See what a daemon does, in the foreground", "kubevpn daemon"),
		Hidden:  true,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.runDaemon(cmd.Context(), readyFD) },
	}
	cmd.Flags().IntVar(&readyFD, "ready-fd", 0, "descriptor on which to say that the daemon answers")
	return cmd
}

// runDaemon tells whoever started it, on the descriptor fd, how the start went: null, or an api.Error.
func (a *app) runDaemon(ctx context.Context, fd int) error {
	tell := func(*api.Error) {}
	if fd > 2 {
		pipe := os.NewFile(uintptr(fd), "ready")
		closeOnExec(pipe) // a credential plugin that lives on would keep it open
		told := false
		tell = func(e *api.Error) {
			if told {
				return
			}
			told = true
			// Whoever started us may be gone by now, which changes nothing.
			_ = json.NewEncoder(pipe).Encode(e)
			_ = pipe.Close()
		}
	}
	paths, err := a.paths()
	if err == nil {
		err = a.RunDaemon(ctx, paths, func() { tell(nil) })
	}
	if err != nil {
		tell(api.AsError(err))
	}
	return err
}

// newHelper is the process that helper.Start starts, as root.
func newHelper(a *app) *cobra.Command {
	return &cobra.Command{
		Use:     "helper",
		Short:   "Change this machine's network for a daemon (started by connect, as root)",
		Example: examples("There is no use in running it by hand", "sudo kubevpn helper"),
		Hidden:  true,
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.RunHelper(cmd.Context()) },
	}
}

// newExecCredential is what client-go runs in the place of a kubeconfig's credential plugin.
func newExecCredential(a *app) *cobra.Command {
	timeout := cluster.ExecTimeout
	cmd := &cobra.Command{
		Use:     "exec-credential -- COMMAND [ARG...]",
		Short:   "Run a credential plugin that may hang",
		Example: examples("What the daemon does with a kubeconfig's plugin", "kubevpn exec-credential --timeout 10s -- aws eks get-token"),
		Hidden:  true,
		Args:    cobra.ArbitraryArgs,
		RunE: func(cmd *cobra.Command, args []string) error {
			code := cluster.ExecCredential(cmd.Context(), cluster.ExecRun{
				Argv: args, Timeout: timeout, Env: a.environ, Stdout: a.out, Stderr: a.errout,
			})
			if code == 0 {
				return nil
			}
			return exitCode(code)
		},
	}
	cmd.Flags().DurationVar(&timeout, "timeout", timeout, "when to kill it")
	return cmd
}
