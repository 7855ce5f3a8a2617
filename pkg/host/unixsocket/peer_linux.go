package unixsocket

import (
	"fmt"
	"syscall"

	"golang.org/x/sys/unix"
)

// Peer returns the process that connected the other end, or created both ends, and its user at that time: SO_PEERCRED
// of unix(7).
func Peer(conn syscall.Conn) (*unix.Ucred, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, fmt.Errorf("cannot identify the peer: %w", err)
	}
	var peer *unix.Ucred
	var asked error
	if err = raw.Control(func(fd uintptr) {
		peer, asked = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED)
	}); err == nil {
		err = asked
	}
	if err != nil {
		return nil, fmt.Errorf("cannot identify the peer: %w", err)
	}
	return peer, nil
}
