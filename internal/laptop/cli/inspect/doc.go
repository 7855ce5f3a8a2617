// Package inspect implements the commands of the help's group Troubleshooting:
//
//	doctor  doctor.go  the checks of internal/inspect/doctor
//	why     why.go     the path of one request, by internal/inspect/why; --from adds a container to a pod
//	flows   flows.go   what passes the tunnels, from the daemon
//	dns     dns.go     queries, from the daemon
//	logs    logs.go    the log file of the daemon
//	ui      ui.go      the page that the daemon serves
//	report  report.go  an archive of all of it, by internal/inspect/report
//
// findings.go configures the checks of doctor, why and report, and prints their findings.
package inspect

import (
	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

// Commands returns the commands of the group.
func Commands(f *command.Factory) []*cobra.Command {
	return []*cobra.Command{newDoctor(f), newWhy(f), newFlows(f), newDNS(f), newUI(f), newLogs(f), newReport(f)}
}
