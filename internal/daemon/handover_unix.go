//go:build unix

package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"
)

// receiveFile reads one byte and the one descriptor that came with it.
func receiveFile(conn net.Conn) (*os.File, error) {
	c, ok := conn.(*net.UnixConn)
	if !ok {
		return nil, errors.New("not a unix socket")
	}
	var b [1]byte
	oob := make([]byte, unix.CmsgSpace(4*4)) // room for several, so that this process sees and closes unexpected ones
	n, oobn, _, _, err := c.ReadMsgUnix(b[:], oob)
	if err != nil {
		return nil, fmt.Errorf("cannot receive the socket of the root helper: %w", err)
	}
	fds, err := descriptors(oob[:oobn])
	if err == nil && (n != 1 || len(fds) != 1) {
		err = fmt.Errorf("received %d bytes and %d descriptors, want one of each", n, len(fds))
	}
	if err != nil {
		for _, fd := range fds {
			unix.Close(fd)
		}
		return nil, err
	}
	unix.CloseOnExec(fds[0]) // credential plugins must not inherit it
	return os.NewFile(uintptr(fds[0]), "helper"), nil
}

func descriptors(oob []byte) ([]int, error) {
	messages, err := unix.ParseSocketControlMessage(oob)
	if err != nil {
		return nil, fmt.Errorf("cannot receive the socket of the root helper: %w", err)
	}
	var fds []int
	for i := range messages {
		got, err := unix.ParseUnixRights(&messages[i])
		if err != nil {
			return fds, fmt.Errorf("cannot receive the socket of the root helper: %w", err)
		}
		fds = append(fds, got...)
	}
	return fds, nil
}
