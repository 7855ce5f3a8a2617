package connect

import (
	"context"
	"errors"
	"fmt"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"

	"github.com/spf13/cobra"
)

func newQuit(f *command.Factory) *cobra.Command {
	return &cobra.Command{
		Use:   "quit",
		Short: "End all connections and stop the root helper and the daemon",
		Long: "Stop all kubevpn processes of this user on this machine, and wait until they have ended. The traffic\n" +
			"manager stays in the cluster. `kubevpn uninstall` removes it.",
		Example: command.Examples("Stop everything on this machine", "kubevpn quit"),
		RunE: func(cmd *cobra.Command, _ []string) error {
			return f.Report(cmd.Context(), nil, func(ctx context.Context, on func(api.Event), _ func()) error {
				err := f.Daemon().Quit(ctx, on)
				if errors.Is(err, daemonclient.ErrNoDaemon) {
					fmt.Fprintln(f.Errout, "no daemon is running")
					return nil
				}
				return err
			})
		},
	}
}
