package docker

import (
	"errors"

	"kubevpn/internal/api"
)

// Paths of kubevpn inside a container.
const (
	inside     = "/.kubevpn"
	binary     = inside + "/kubevpn" // a file, read-only
	control    = inside + "/run"     // a directory with the container's socket
	volumesAt  = inside + "/volumes" // in the network container: a tmpfs with the pod's volumes
	socketName = "socket"
)

// errByHand is the error for a user who runs the hidden command.
var errByHand = errors.New("`kubevpn dev --docker` runs this command in a container; it does nothing useful by hand")

// Inside runs the first process of a container. args are the arguments after Command. exit is the exit code of the
// process.
func Inside(args []string) (exit int, err error) {
	switch {
	case len(args) == 1 && args[0] == programRole:
		return runProgram()
	case len(args) == 1 && args[0] == networkRole:
		return 0, runNetwork()
	}
	return 0, api.Errorf(api.ExitUsage, "%w", errByHand)
}
