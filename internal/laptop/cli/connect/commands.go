package connect

import (
	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

// Commands returns the commands of the group.
func Commands(f *command.Factory) []*cobra.Command {
	return []*cobra.Command{
		newConnect(f), newRun(f), newDisconnect(f), newStatus(f), newQuit(f), newTrust(f),
	}
}
