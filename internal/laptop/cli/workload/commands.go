package workload

import (
	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

// Commands returns the commands of the group.
func Commands(f *command.Factory) []*cobra.Command {
	return []*cobra.Command{
		newProxy(f), newClone(f), newDev(f), newEnv(f), newList(f), newRequests(f), newDiff(f), newLeave(f), newReset(f),
	}
}
