package helper

import (
	"fmt"
	"os"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// thisProgram returns the running program. It is not the program's path: since sudo checked it, a user who can write
// there could have replaced the program.
func thisProgram() (string, error) { return "/proc/self/exe", nil }

// checkNetwork returns an error if the process at the other end of a connection is in another network namespace, as in
// a container: the helper would change a network that this process does not use.
func checkNetwork(socket *os.File) error {
	peer, err := unixsocket.Peer(socket)
	if err != nil {
		return err
	}
	same, err := unixsocket.SharesNetwork(int(peer.Pid))
	if err != nil {
		return fmt.Errorf("cannot determine the network namespace of process %d: %w", peer.Pid, err)
	}
	if !same {
		return api.Errorf(api.ExitPrivilege, "the service of the root helper is in another network namespace than you").
			WithHint("run kubevpn outside of the container or the namespace, or as root in it")
	}
	return nil
}
