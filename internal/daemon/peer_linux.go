package daemon

import (
	"net"

	"kubevpn/pkg/host/unixsocket"
)

// peerUID returns the user of the process that connected, at the time when it connected.
func peerUID(conn *net.UnixConn) (int, error) {
	peer, err := unixsocket.Peer(conn)
	if err != nil {
		return -1, err
	}
	return int(peer.Uid), nil
}
