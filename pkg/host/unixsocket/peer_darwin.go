package unixsocket

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// PeerUID returns the user of the process that connected, at that time. macOS does not record who created a socketpair
// (uipc_usrreq.c of XNU).
func PeerUID(conn syscall.Conn) (int, error) {
	var peer *unix.Xucred
	if err := Control(conn, func(fd int) (err error) {
		peer, err = unix.GetsockoptXucred(fd, unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
		return err
	}); err != nil {
		return -1, fmt.Errorf("cannot identify the peer: %w", err)
	}
	return int(peer.Uid), nil
}
