package unixsocket

import (
	"errors"
	"net"
	"os"
	"syscall"
)

// Dup returns an error: nothing on Windows needs a second descriptor.
func Dup(*os.File, string) (*os.File, error) { return nil, errors.ErrUnsupported }

// Receive returns an error: Windows has no sockets that carry files.
func Receive(*net.UnixConn, []byte, string) (int, *os.File, error) {
	return 0, nil, errors.ErrUnsupported
}

// Send returns an error, like Receive.
func Send(*net.UnixConn, []byte, syscall.Conn) (int, error) { return 0, errors.ErrUnsupported }
