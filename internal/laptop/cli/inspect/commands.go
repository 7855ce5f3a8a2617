package inspect

import (
	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

// Commands returns the commands of the group.
func Commands(f *command.Factory) []*cobra.Command {
	return []*cobra.Command{
		newDoctor(f), newWhy(f), newFlows(f), newDNS(f), newUI(f), newLogs(f), newReport(f),
	}
}
