//go:build unix

package unixsocket

import (
	"errors"
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

// Files returns the files that came with a message, each named name. oob contains the control messages that
// net.UnixConn.ReadMsgUnix read, which also sets close-on-exec. The caller owns the files. After an error, none is
// open.
func Files(oob []byte, name string) ([]*os.File, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("cannot read control messages: %w", err)
	}
	var files []*os.File
	for i := range messages {
		fds, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			continue // a message of another kind
		}
		for _, fd := range fds {
			files = append(files, os.NewFile(uintptr(fd), name))
		}
	}
	return files, nil
}

// File returns the only file that came with a message, like Files. It returns an error if there is none, or more than
// one.
func File(oob []byte, name string) (*os.File, error) {
	files, err := Files(oob, name)
	if err != nil {
		return nil, err
	}
	if len(files) != 1 {
		for _, f := range files {
			f.Close()
		}
		return nil, fmt.Errorf("received %d descriptors instead of one", len(files))
	}
	return files[0], nil
}

// Send writes b, with the descriptor of f unless f is nil, and returns how many bytes it wrote. It does not close f.
func Send(conn *net.UnixConn, b []byte, f syscall.Conn) (n int, err error) {
	if f == nil {
		return conn.Write(b)
	}
	// Not os.File.Fd, which makes the descriptor a blocking one, for the other end too.
	raw, err := f.SyscallConn()
	if err != nil {
		return 0, err
	}
	var sent error
	err = raw.Control(func(fd uintptr) { n, _, sent = conn.WriteMsgUnix(b, unix.UnixRights(int(fd)), nil) })
	return n, errors.Join(err, sent)
}

// Dup returns a file with a new descriptor of what f refers to, and the given name. No child process inherits it. The
// caller owns both.
func Dup(f *os.File, name string) (*os.File, error) {
	raw, err := f.SyscallConn() // not f.Fd, as in Send
	if err != nil {
		return nil, err
	}
	fd, dupErr := -1, error(nil)
	err = raw.Control(func(old uintptr) { fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 0) })
	if err = errors.Join(err, os.NewSyscallError("fcntl", dupErr)); err != nil {
		return nil, err
	}
	return os.NewFile(uintptr(fd), name), nil
}
