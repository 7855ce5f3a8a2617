// Command kubevpn connects this machine to the network of a Kubernetes cluster. It is the command-line interface. It
// starts itself as the daemon, as the root helper and as the first process of sandboxes and containers. This package
// connects them.
package main

import (
	"os"

	"kubevpn/internal/laptop/cli"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/helper"
)

func main() {
	os.Exit(cli.Main(command.Programs{
		Machine:   string(helper.ThisMachine()),
		RunDaemon: runDaemon, StartHelper: startHelper, RunHelper: helper.Main, Hold: hold, Reset: reset,
	}))
}
