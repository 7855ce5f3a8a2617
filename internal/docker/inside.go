package docker

import (
	"errors"

	"kubevpn/internal/api"
)

// errByHand is what a user reads who runs the hidden command.
var errByHand = errors.New("`kubevpn dev --docker` runs this command in a container; it does nothing useful by hand")

// Inside is the first process of a container, whose arguments are those behind Command. exit is that process's exit
// code.
func Inside(args []string) (exit int, err error) {
	switch {
	case len(args) == 1 && args[0] == programRole:
		return runProgram()
	case len(args) == 1 && args[0] == networkRole:
		return 0, runNetwork()
	}
	return 0, api.Errorf(api.ExitUsage, "%w", errByHand)
}
