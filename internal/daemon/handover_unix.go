//go:build unix

package daemon

import (
	"errors"
	"fmt"
	"net"
	"os"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
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
	f, err := unixsocket.File(oob[:oobn], "helper")
	if err != nil {
		return nil, fmt.Errorf("cannot receive the socket of the root helper: %w", err)
	}
	if n != 1 {
		f.Close()
		return nil, fmt.Errorf("cannot receive the socket of the root helper: received %d bytes instead of one", n)
	}
	return f, nil
}
