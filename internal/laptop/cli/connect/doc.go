// Package connect implements the commands of the help's group Connections:
//
//	connect     connect.go ─▶ log in (command) ─▶ ask for consent ─▶ the daemon holds the connection
//	            socks.go      --socks: this process holds it, and serves a proxy
//	run         run.go        a program of this machine in a sandbox, or with that proxy
//	disconnect  disconnect.go
//	status      status.go     the tables of connections and of intercepts, and details below them
//	quit        quit.go
//	trust       trust.go      the stored answers to questions
package connect

import (
	"github.com/spf13/cobra"

	"kubevpn/internal/laptop/cli/command"
)

// Commands returns the commands of the group.
func Commands(f *command.Factory) []*cobra.Command {
	return []*cobra.Command{newConnect(f), newRun(f), newDisconnect(f), newStatus(f), newQuit(f), newTrust(f)}
}
