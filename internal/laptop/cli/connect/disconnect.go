package connect

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"strings"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/daemonclient"
)

type disconnectOptions struct {
	f   *command.Factory
	ids []string
	all bool
}

func newDisconnect(f *command.Factory) *cobra.Command {
	o := &disconnectOptions{f: f}
	cmd := &cobra.Command{
		Use:   "disconnect [ID...]",
		Short: "End connections and undo their changes to this machine",
		Long: "End the connections with the given IDs. Without an ID, end the only connection. After the last\n" +
			"connection has ended, the root helper exits immediately and the daemon after one minute.",
		Example: command.Examples(
			"End the only connection", "kubevpn disconnect",
			"End one connection, by its ID from `kubevpn status`", "kubevpn disconnect 3f2a91c04b7e",
			"End all connections", "kubevpn disconnect --all",
		),
		Args: func(cmd *cobra.Command, args []string) error {
			if o.all && len(args) > 0 {
				return api.Errorf(api.ExitUsage, "--all cannot be combined with an ID")
			}
			return nil
		},
		RunE: func(cmd *cobra.Command, args []string) error {
			o.ids = args
			return f.Report(cmd.Context(), nil, o.run)
		},
		ValidArgsFunction: f.CompleteFromStatus(connectionIDs),
	}
	cmd.Flags().BoolVar(&o.all, "all", false, "end all connections")
	return cmd
}

func (o *disconnectOptions) run(ctx context.Context, show func(api.Event), _ func()) error {
	req := api.DisconnectRequest{IDs: o.ids, All: o.all}
	if !o.all && len(o.ids) == 0 {
		status, err := o.f.Status(ctx)
		if err != nil {
			return err
		}
		// Without a connection there is nothing to end.
		req.IDs = api.Texts(status.Connections, func(c api.Connection) string { return c.ID })
		if len(req.IDs) > 1 {
			return api.Errorf(api.ExitUsage, "there are %d connections", len(req.IDs)).
				WithHint("specify one of %s, or end all with --all", strings.Join(req.IDs, ", "))
		}
	}
	ended, err := 0, error(nil)
	on := func(e api.Event) {
		show(e)
		if e.Done {
			ended++
		}
	}
	if len(req.IDs) > 0 || req.All {
		err = o.f.Daemon().Disconnect(ctx, req, on)
	}
	if errors.Is(err, daemonclient.ErrNoDaemon) {
		if len(o.ids) > 0 {
			return api.Errorf(api.ExitNotConnected, "no connection has the ID %s: nothing is connected", o.ids[0]).
				WithHint("`kubevpn connect` connects this machine")
		}
		err = nil
	}
	if err == nil && ended == 0 {
		fmt.Fprintln(o.f.Errout, "not connected")
	}
	return err
}

// connectionIDs completes the IDs of connections, described by their clusters.
func connectionIDs(status api.Status, args []string) []cobra.Completion {
	var ids []cobra.Completion
	for _, c := range status.Connections {
		if !slices.Contains(args, c.ID) {
			ids = append(ids, cobra.CompletionWithDesc(c.ID, c.Cluster))
		}
	}
	return ids
}
