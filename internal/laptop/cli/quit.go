package cli

import (
	"context"
	"errors"
	"fmt"

	"kubevpn/internal/laptop/cli/daemonclient"

	"github.com/spf13/cobra"
)

func newQuit(a *app) *cobra.Command {
	return &cobra.Command{
		Use:   "quit",
		Short: "End all connections and stop the root helper and the daemon",
		Long: "Stop all kubevpn processes of this user on this machine, and wait until they have ended. The traffic\n" +
			"manager stays in the cluster. `kubevpn uninstall` removes it.",
		Example: examples("Stop everything on this machine", "kubevpn quit"),
		Args:    noArgs,
		RunE:    func(cmd *cobra.Command, _ []string) error { return a.quit(cmd.Context()) },
	}
}

func (a *app) quit(ctx context.Context) error {
	c, err := a.daemon()
	if err != nil {
		return err
	}
	p := a.Progress()
	defer p.Stop()
	err = c.Quit(ctx, p.Show)
	if errors.Is(err, daemonclient.ErrNoDaemon) {
		fmt.Fprintln(a.Errout, "no daemon is running")
		return nil
	}
	return err
}
