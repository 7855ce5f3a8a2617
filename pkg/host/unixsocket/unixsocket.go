//go:build unix

package unixsocket

import (
	"cmp"
	"fmt"
	"net"
	"os"
	"syscall"

	"golang.org/x/sys/unix"
)

// Pair returns both ends of a stream, each named name. No child process inherits them. The caller owns them.
func Pair(name string) (a, b *os.File, err error) {
	syscall.ForkLock.RLock() // macOS cannot create them with close-on-exec
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM, 0)
	if err == nil {
		unix.CloseOnExec(fds[0])
		unix.CloseOnExec(fds[1])
	}
	syscall.ForkLock.RUnlock()
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	return os.NewFile(uintptr(fds[0]), name), os.NewFile(uintptr(fds[1]), name), nil
}

// Receive reads into b once, and returns the file that came with the bytes, named name, or nil. The caller owns the
// file, which is close-on-exec. If more than one came, Receive returns an error, and none is open.
func Receive(conn *net.UnixConn, b []byte, name string) (n int, f *os.File, err error) {
	oob := make([]byte, unix.CmsgSpace(2*4)) // room for a second one, which this process then sees and closes
	n, oobn, flags, _, err := conn.ReadMsgUnix(b, oob)
	if err != nil || oobn == 0 && flags&unix.MSG_CTRUNC == 0 {
		return n, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(oob[:oobn])
	if err != nil {
		return n, nil, fmt.Errorf("cannot read control messages: %w", err)
	}
	var fds []int
	for i := range messages {
		if more, err := unix.ParseUnixRights(&messages[i]); err == nil { // else a message of another kind
			fds = append(fds, more...)
		}
	}
	if len(fds) == 1 && flags&unix.MSG_CTRUNC == 0 {
		return n, os.NewFile(uintptr(fds[0]), name), nil
	}
	for _, fd := range fds {
		unix.Close(fd)
	}
	return n, nil, fmt.Errorf("received %d or more descriptors instead of one", len(fds))
}

// Send writes b once with the descriptor of f, and returns how many bytes it wrote. It does not close f.
func Send(conn *net.UnixConn, b []byte, f syscall.Conn) (n int, err error) {
	err = Control(f, func(fd int) (err error) {
		n, _, err = conn.WriteMsgUnix(b, unix.UnixRights(fd), nil)
		return err
	})
	return n, err
}

// Dup returns a file with a new descriptor of what f refers to, and the given name. No child process inherits it. The
// caller owns both.
func Dup(f *os.File, name string) (dup *os.File, err error) {
	err = Control(f, func(old int) error {
		fd, err := unix.FcntlInt(uintptr(old), unix.F_DUPFD_CLOEXEC, 0)
		if err == nil {
			dup = os.NewFile(uintptr(fd), name)
		}
		return os.NewSyscallError("fcntl", err)
	})
	return dup, err
}

// Control calls f with the descriptor of c. Unlike os.File.Fd it does not make the descriptor a blocking one, for the
// other end too.
func Control(c syscall.Conn, f func(fd int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	return control(raw, f)
}

// DialControl returns the Control of a net.Dialer: it calls f with the descriptor of the socket.
func DialControl(f func(fd int) error) func(network, address string, c syscall.RawConn) error {
	return func(_, _ string, raw syscall.RawConn) error { return control(raw, f) }
}

func control(raw syscall.RawConn, f func(fd int) error) error {
	var failed error
	err := raw.Control(func(fd uintptr) { failed = f(int(fd)) })
	return cmp.Or(err, failed)
}
