// Command traffic is the program in the cluster: the traffic manager, the gateway of its pod, and the agents in pods of
// intercepted workloads.
package main

import (
	"context"
	"fmt"
	"os"

	"github.com/spf13/cobra"

	"kubevpn/internal/agent"
	"kubevpn/internal/api"
	"kubevpn/internal/gateway"
	"kubevpn/internal/manager"
	"kubevpn/internal/version"
)

func main() {
	root := &cobra.Command{
		Use:           "traffic",
		Short:         "kubevpn's side in the cluster",
		Version:       version.Full(),
		SilenceErrors: true,
	}
	root.AddCommand(manager.NewCommand(), gateway.NewCommand(), agent.NewCommand())
	if err := root.ExecuteContext(context.Background()); err != nil {
		fmt.Fprintln(os.Stderr, "traffic:", err)
		os.Exit(int(api.AsError(err).Code))
	}
}
