package cli

import (
	"context"
	"encoding/json"
	"os"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/docker"
	"kubevpn/pkg/host/sandbox"
)

// addHidden adds the commands that kubevpn itself runs, as other processes.
func addHidden(root *cobra.Command, a *app) {
	readyFD := 0
	daemon := &cobra.Command{
		Use:   "daemon",
		Short: "Keep connections (started by the other commands)",
		Args:  noArgs,
		RunE:  func(cmd *cobra.Command, _ []string) error { return a.runDaemon(cmd.Context(), readyFD) },
	}
	daemon.Flags().IntVar(&readyFD, "ready-fd", 0, "descriptor on which the daemon reports that it is ready")
	commands := []*cobra.Command{
		daemon,
		{
			Use:   "helper",
			Short: "Change the network of this machine for a daemon (started by connect, as root)",
			Args:  noArgs,
			RunE:  func(cmd *cobra.Command, _ []string) error { return a.RunHelper(cmd.Context()) },
		},
		{
			Use:   sandboxCommand,
			Short: "Run as the first process of a sandbox (started by dev)",
			Args:  noArgs,
			RunE:  func(*cobra.Command, []string) error { return sandbox.Init() },
		},
		{
			Use:   docker.Command + " ROLE",
			Short: "Run as the first process of a container (started by dev --docker)",
			Args:  cobra.MinimumNArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				exit, err := docker.Inside(args)
				if err == nil && exit != 0 {
					return exitCode(exit)
				}
				return err
			},
		},
	}
	for _, cmd := range commands {
		cmd.Hidden = true
	}
	root.AddCommand(commands...)
}

// runDaemon runs the daemon. If fd is not 0, it writes the result of the start to that descriptor: null, or an
// api.Error.
func (a *app) runDaemon(ctx context.Context, fd int) error {
	report := func(*api.Error) {}
	if fd > 2 {
		pipe := os.NewFile(uintptr(fd), "ready")
		closeOnExec(pipe) // a credential plugin that outlives the daemon must not keep the pipe open
		report = func(e *api.Error) {
			// After the first report the pipe is closed. The command that started the daemon may have ended.
			_ = json.NewEncoder(pipe).Encode(e)
			_ = pipe.Close()
		}
	}
	paths, err := a.paths()
	if err == nil {
		err = a.RunDaemon(ctx, paths, func() { report(nil) })
	}
	if err != nil {
		report(api.AsError(err))
	}
	return err
}
