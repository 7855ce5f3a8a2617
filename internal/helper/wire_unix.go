//go:build unix

package helper

import (
	"errors"
	"io"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

// unixChannel is a stream socket of a socketpair.
type unixChannel struct{ *net.UnixConn }

// openChannel returns a channel with a copy of the socket, which the caller keeps.
func openChannel(socket *os.File) (channel, error) {
	if err := checkSocket(int(socket.Fd())); err != nil {
		return nil, err
	}
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	return unixChannel{conn.(*net.UnixConn)}, nil
}

// checkSocket returns an error for a descriptor that Start does not create.
func checkSocket(fd int) error {
	kind, err := unix.GetsockoptInt(fd, unix.SOL_SOCKET, unix.SO_TYPE)
	if err == nil && kind == unix.SOCK_STREAM {
		addr, err := unix.Getsockname(fd)
		if _, ok := addr.(*unix.SockaddrUnix); ok && err == nil {
			return nil
		}
	}
	return errors.New("not a socket of `kubevpn connect`")
}

func (c unixChannel) Read(b []byte) (int, error) {
	n, err := c.UnixConn.Read(b) // without room for descriptors, which the kernel then closes
	return n, readError(err)
}

func (c unixChannel) readWith(b []byte) (int, *os.File, error) {
	oob := make([]byte, unix.CmsgSpace(4))
	n, oobn, _, _, err := c.ReadMsgUnix(b, oob)
	if err != nil || oobn == 0 {
		return n, nil, readError(err)
	}
	f, err := unixsocket.File(oob[:oobn], "from helper")
	return n, f, err
}

func (c unixChannel) writeWith(b []byte, f *os.File) (int, error) {
	if f == nil {
		return c.Write(b)
	}
	n, err := unixsocket.Send(c.UnixConn, b, f)
	if err != nil || n == len(b) {
		return n, err
	}
	rest, err := c.Write(b[n:]) // the socket had no room for all
	return n + rest, err
}

// readError returns io.EOF for each error of a read that means that the other end has closed.
func readError(err error) error {
	if errors.Is(err, io.EOF) || errors.Is(err, unix.ECONNRESET) { // the latter: it ended with unread data
		return io.EOF
	}
	return err
}
