//go:build unix

package connection

import (
	"errors"
	"net"
	"os"
	"sync/atomic"
	"syscall"

	"golang.org/x/sys/unix"
)

// pair returns the two ends of a connection within this process.
func pair() (a, b *end, err error) {
	syscall.ForkLock.RLock() // a program that starts meanwhile must not inherit them
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		unix.CloseOnExec(fds[0])
		unix.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	var conns [2]*net.UnixConn
	for n, fd := range fds {
		f := os.NewFile(uintptr(fd), "shortcut")
		conn, failed := net.FileConn(f)
		err = errors.Join(err, failed, f.Close())
		conns[n], _ = conn.(*net.UnixConn)
	}
	if err != nil {
		for _, c := range conns {
			if c != nil {
				err = errors.Join(err, c.Close())
			}
		}
		return nil, nil, err
	}
	x, y := new(atomic.Bool), new(atomic.Bool)
	return &end{conns[0], x, y}, &end{conns[1], y, x}, nil
}
