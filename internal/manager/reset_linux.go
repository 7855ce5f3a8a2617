package manager

import (
	"syscall"

	"golang.org/x/sys/unix"
)

// isClosed reports whether the kernel has given the connection up (TCP_CLOSE). One on which no FIN was sent got
// there by a reset or a timeout, also where reading gives an end of data: the kernel tells of a reset once, and
// may have told a write.
func isClosed(c syscall.Conn) bool {
	raw, err := c.SyscallConn()
	if err != nil {
		return false
	}
	const tcpClose = 7 // TCP_CLOSE of linux/tcp_states.h
	closed := false
	if err := raw.Control(func(fd uintptr) {
		info, err := unix.GetsockoptTCPInfo(int(fd), unix.IPPROTO_TCP, unix.TCP_INFO)
		closed = err == nil && info.State == tcpClose
	}); err != nil {
		return true // closed here
	}
	return closed
}
