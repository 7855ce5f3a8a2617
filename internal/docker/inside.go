package docker

import (
	"errors"

	"kubevpn/internal/api"
)

// errByHand is what a user reads who runs the hidden command.
var errByHand = errors.New("this is started in a container of `kubevpn dev --docker`, and there is no use in running it by hand")

// Inside is the first process of a container, whose arguments are those behind Command. exit is that process's exit code.
func Inside(args []string) (exit int, err error) {
	switch {
	case len(args) == 1 && args[0] == programRole:
		return runProgram()
	case len(args) == 2 && args[0] == networkRole:
		return 0, runNetwork(args[1])
	case len(args) == 2 && args[0] == removeRole:
		return 0, removeFiles(base, args[1])
	}
	return 0, api.Errorf(api.ExitUsage, "%w", errByHand)
}
