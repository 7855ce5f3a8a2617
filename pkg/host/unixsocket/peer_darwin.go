package unixsocket

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// PeerUID returns the user of the process that connected, at that time. macOS does not record who created a socketpair
// (uipc_usrreq.c of XNU).
func PeerUID(conn syscall.Conn) (int, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return -1, err
	}
	var peer *unix.Xucred
	var asked error
	if err = raw.Control(func(fd uintptr) {
		peer, asked = unix.GetsockoptXucred(int(fd), unix.SOL_LOCAL, unix.LOCAL_PEERCRED)
	}); err == nil {
		err = asked
	}
	if err != nil {
		return -1, fmt.Errorf("cannot identify the peer: %w", err)
	}
	return int(peer.Uid), nil
}
