package admin

import (
	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

// Commands returns the commands of the group.
func Commands(f *command.Factory) []*cobra.Command {
	return []*cobra.Command{
		newInstall(f), newUninstall(f), newConfig(f), newService(f), newVersion(f), newCompletion(f),
	}
}
