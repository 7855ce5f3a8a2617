//go:build linux

package dial

import (
	"errors"
	"io"
	"net"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/wire/nonblock"
)

// readSocket calls use with the data of each read from a socket, until an error: io.EOF at the end of a TCP stream. It
// takes a buffer only when there is data. use must not keep the data.
func readSocket(c syscall.Conn, b *buffers, stream bool, use func([]byte) error) error {
	return readLoop(c, b, nonblock.Read, func(data []byte, n int) error {
		switch {
		case n == 0 && stream:
			return io.EOF
		case stream || n < len(data): // a datagram that fills a buffer may be longer, and is lost
			return use(data[:n])
		}
		return nil
	})
}

// readLoop calls read until an error, and use after each read, with the buffer and the result of read. When read
// returns EAGAIN, readLoop waits without a buffer until the socket is readable.
func readLoop(c syscall.Conn, b *buffers, read func(fd uintptr, p []byte) (int, error),
	use func(data []byte, n int) error) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var got *buffer
	var n int
	var readErr error
	attempt := func(fd uintptr) bool {
		got = b.take()
		n, readErr = read(fd, got.data)
		if errors.Is(readErr, unix.EAGAIN) {
			b.give(got)
			got = nil
			return false
		}
		return true
	}
	for {
		if err := raw.Read(attempt); err != nil {
			return err
		}
		err := readErr
		if err == nil {
			err = use(got.data, n)
		}
		b.give(got)
		if err != nil {
			return err
		}
	}
}

// awaitReset waits, after the end of a TCP stream, until the other end resets the connection or the manager closes it.
// read(2) does not show the reset, because it still returns 0.
func awaitReset(c syscall.Conn) error {
	raw, err := c.SyscallConn()
	if err != nil {
		return err
	}
	var pending error
	err = raw.Read(func(fd uintptr) bool {
		number, err := unix.GetsockoptInt(int(fd), unix.SOL_SOCKET, unix.SO_ERROR)
		if err != nil {
			pending = err
		} else if number != 0 {
			pending = unix.Errno(number)
		}
		return pending != nil
	})
	if err != nil {
		return err
	}
	return pending
}

// writeAll writes all of p. It calls blocked before it first waits because the other end does not read.
func writeAll(c *net.TCPConn, p []byte, blocked func()) (int, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0, err
	}
	total, waited := 0, false
	var writeErr error
	err = raw.Write(func(fd uintptr) bool {
		for total < len(p) {
			n, err := nonblock.Write(fd, p[total:])
			switch {
			case errors.Is(err, unix.EAGAIN):
				if !waited {
					waited = true
					blocked()
				}
				return false // the runtime waits until the socket is writable
			case err != nil:
				writeErr = err
				return true
			default:
				total += n
			}
		}
		return true
	})
	if err != nil {
		return total, err
	}
	return total, writeErr
}
