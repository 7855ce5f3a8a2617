//go:build linux

// Command traffic runs in the cluster: as the traffic manager, as the traffic gateway in the manager's pod, as the
// traffic agents in the pods of intercepted workloads, as the supervisor in clones that receive files, and to send the
// requests of `kubevpn why --from`.
package main

import (
	"context"
	"errors"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"kubevpn/internal/api"
	"kubevpn/internal/incluster/agent"
	"kubevpn/internal/incluster/gateway"
	"kubevpn/internal/incluster/manager"
	"kubevpn/internal/incluster/supervisor"
	"kubevpn/internal/inspect/why/trip"
	"kubevpn/internal/process/files"
	"kubevpn/internal/process/version"
)

func main() {
	root := &cobra.Command{
		Use:           "traffic",
		Short:         "The programs of kubevpn in the cluster",
		Version:       version.Full(),
		SilenceErrors: true, // of all commands below, too
		SilenceUsage:  true,
	}
	root.SetFlagErrorFunc(func(_ *cobra.Command, err error) error { return api.Errorf(api.ExitUsage, "%w", err) })
	root.AddCommand(manager.NewCommand(), gateway.NewCommand(), agent.NewCommand(), trip.NewCommand(),
		files.NewCommand())
	root.AddCommand(supervisor.NewCommands()...)
	if err := root.ExecuteContext(context.Background()); err != nil {
		if exit := supervisor.Exit(0); errors.As(err, &exit) {
			os.Exit(int(exit))
		}
		fmt.Fprintln(os.Stderr, "traffic:", err)
		os.Exit(int(api.AsError(err).Code))
	}
}
