package admin

import (
	"context"
	"encoding/json"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/docker"
	"kubevpn/pkg/host/sandbox"
)

// Hidden returns the commands that kubevpn itself runs, as other processes.
func Hidden(f *command.Factory) []*cobra.Command {
	commands := []*cobra.Command{
		{
			Use:   "daemon",
			Short: "Keep connections (started by the other commands)",
			Args:  command.NoArgs,
			RunE:  func(cmd *cobra.Command, _ []string) error { return runDaemon(cmd.Context(), f) },
		},
		{
			Use:   "helper",
			Short: "Change the network of this machine for a daemon (started by connect, as root)",
			Args:  command.NoArgs,
			RunE:  func(cmd *cobra.Command, _ []string) error { return f.RunHelper(cmd.Context()) },
		},
		{
			Use:   command.SandboxCommand,
			Short: "Run as the first process of a sandbox (started by dev)",
			Args:  command.NoArgs,
			RunE:  func(*cobra.Command, []string) error { return sandbox.Init() },
		},
		{
			Use:   docker.Command + " ROLE",
			Short: "Run as the first process of a container (started by dev --docker)",
			Args:  cobra.MinimumNArgs(1),
			RunE: func(_ *cobra.Command, args []string) error {
				exit, err := docker.Inside(args)
				if err == nil && exit != 0 {
					return command.ExitCode(exit)
				}
				return err
			},
		},
	}
	for _, cmd := range commands {
		cmd.Hidden = true
	}
	return commands
}

// runDaemon runs the daemon. It writes the result of the start to standard output: null, or an api.Error.
func runDaemon(ctx context.Context, f *command.Factory) error {
	stdout, err := takeStdout()
	if err != nil {
		return api.Errorf(api.ExitDaemon, "cannot prepare standard output of the daemon: %w", err)
	}
	report := func(e *api.Error) {
		// After the first report the file is closed. The command that started the daemon may have ended.
		_ = json.NewEncoder(stdout).Encode(e)
		_ = stdout.Close()
	}
	paths, err := f.Paths()
	if err == nil {
		err = f.RunDaemon(ctx, paths, func() { report(nil) })
	}
	if err != nil {
		report(api.AsError(err))
	}
	return err
}
