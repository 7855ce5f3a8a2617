//go:build !linux

package dial

import (
	"errors"
	"net"
	"syscall"
)

// readSocket calls use with the data of each read from a socket, until an error. It holds a buffer all the time,
// because the manager runs on Linux and elsewhere only in tests.
func readSocket(c syscall.Conn, b *buffers, _ bool, use func([]byte) error) error {
	conn, ok := c.(net.Conn)
	if !ok {
		return errors.ErrUnsupported
	}
	buf := b.take()
	defer b.give(buf)
	for {
		n, err := conn.Read(buf.data)
		if err == nil {
			err = use(buf.data[:n])
		}
		if err != nil {
			return err
		}
	}
}

// awaitReset does not wait. The next write shows that the other end has reset a half-closed connection.
func awaitReset(syscall.Conn) error { return net.ErrClosed }

// writeAll writes all of p. It never reports that it blocks.
func writeAll(c *net.TCPConn, p []byte, _ func()) (int, error) { return c.Write(p) }
