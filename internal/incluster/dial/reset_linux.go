package dial

import (
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

// isClosed reports whether the connection is in the state TCP_CLOSE. Without a FIN from here, only a reset or a timeout
// leads to that state, even if a read returns the end of data: the kernel reports a reset once, and may have reported
// it to a write.
func isClosed(c syscall.Conn) bool {
	const tcpClose = 7 // TCP_CLOSE of linux/tcp_states.h
	closed := false
	err := unixsocket.Control(c, func(fd int) error {
		info, err := unix.GetsockoptTCPInfo(fd, unix.IPPROTO_TCP, unix.TCP_INFO)
		closed = err == nil && info.State == tcpClose
		return nil
	})
	return closed || err != nil // closed here
}
