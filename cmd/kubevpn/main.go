// Command kubevpn puts this machine on a Kubernetes cluster's network. It is the command, and, when it runs
// itself, the daemon, the root helper and the guard of credential plugins: this is where they meet.
package main

import (
	"os"

	"kubevpn/internal/cli"
	"kubevpn/internal/helper"
)

func main() {
	os.Exit(cli.Main(cli.Programs{
		RunDaemon: runDaemon, StartHelper: startHelper, RunHelper: helper.Main, Foreground: foreground, Isolated: isolated, Reset: reset,
	}))
}
