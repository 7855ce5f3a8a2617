// Package admin implements the commands of the help's group Administration, and the hidden commands:
//
//	install     install.go    create the traffic manager with the user's own credentials
//	uninstall   uninstall.go  remove it
//	config      config.go     show the settings and where they come from
//	service     service.go    the service that starts the root helper in place of sudo
//	version     version.go
//	completion  completion.go
//	daemon, helper, sandbox   hidden.go: the other processes of kubevpn
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
