package admin

import (
	"context"
	"encoding/json"
	"os"
	"os/signal"
	"syscall"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/docker"
	"kubevpn/internal/process/files"
	"kubevpn/pkg/host/sandbox"
)

// Hidden returns the commands that kubevpn itself runs, as other processes.
func Hidden(f *command.Factory) []*cobra.Command {
	commands := []*cobra.Command{
		{
			Use:   "daemon",
			Short: "Keep connections (started by the other commands)",
			RunE:  func(cmd *cobra.Command, _ []string) error { return runDaemon(cmd.Context(), f) },
		},
		{
			Use:   "helper",
			Short: "Change the network of this machine for a daemon (started by connect, as root)",
			RunE:  func(cmd *cobra.Command, _ []string) error { return f.RunHelper(cmd.Context()) },
		},
		{
			Use:   command.SandboxCommand,
			Short: "Run as the first process of a sandbox (started by dev)",
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
	commands = append(commands, files.NewCommand()) // the laptop copies this program into containers for it
	for _, cmd := range commands {
		cmd.Hidden = true
	}
	return commands
}

// runDaemon runs the daemon. It writes the result of the start to standard output: null, or an api.Error.
func runDaemon(ctx context.Context, f *command.Factory) error {
	// The command that started the daemon may have ended: a write must not end the daemon, too.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	report := func(e *api.Error) { _ = json.NewEncoder(os.Stdout).Encode(e) }
	paths, err := f.Paths()
	if err == nil {
		err = f.RunDaemon(ctx, paths, func() { report(nil) })
	}
	if err != nil {
		report(api.AsError(err))
	}
	return err
}
