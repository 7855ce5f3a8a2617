package unixsocket

import (
	"fmt"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Peer returns the process that connected the other end, or created both ends, and its user at that time: SO_PEERCRED
// of unix(7).
func Peer(conn syscall.Conn) (peer *unix.Ucred, err error) {
	if err := Control(conn, func(fd int) (err error) {
		peer, err = unix.GetsockoptUcred(fd, unix.SOL_SOCKET, unix.SO_PEERCRED)
		return err
	}); err != nil {
		return nil, fmt.Errorf("cannot identify the peer: %w", err)
	}
	return peer, nil
}

// PeerUID returns the user of Peer.
func PeerUID(conn syscall.Conn) (int, error) {
	peer, err := Peer(conn)
	if err != nil {
		return -1, err
	}
	return int(peer.Uid), nil
}

// SharesNetwork reports whether a process is in the network namespace of this one. It needs no privilege: each
// namespace has its own files in /proc/PID/net, whereas /proc/PID/ns/net of another user requires CAP_SYS_PTRACE.
func SharesNetwork(pid int) (bool, error) {
	ours, err := os.Stat("/proc/self/net/dev")
	if err != nil {
		return false, err
	}
	theirs, err := os.Stat(fmt.Sprintf("/proc/%d/net/dev", pid))
	if err != nil {
		return false, err
	}
	return os.SameFile(ours, theirs), nil
}
