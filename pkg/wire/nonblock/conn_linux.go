package nonblock

import (
	"io"
	"net"
	"os"
	"sync"
	"syscall"

	"golang.org/x/sys/unix"
)

// Conn is a TCP connection whose Read and Write use this package's system calls.
type Conn struct {
	*net.TCPConn
	raw syscall.RawConn

	reading, writing sync.Mutex
	r, w             op
}

// op is the state of a read or write, with the function that RawConn calls, which is allocated once.
type op struct {
	p   []byte
	n   int
	err error
	try func(fd uintptr) bool
}

// NewConn returns a Conn that owns c.
func NewConn(c *net.TCPConn) (*Conn, error) {
	raw, err := c.SyscallConn()
	if err != nil {
		return nil, err
	}
	conn := &Conn{TCPConn: c, raw: raw}
	conn.r.try = conn.r.read
	conn.w.try = conn.w.write
	return conn, nil
}

// LimitUnsent makes writes wait while the kernel holds more than n unsent bytes (tcp(7): TCP_NOTSENT_LOWAT). The
// rest then waits in the program, which can still send something more urgent first. Bytes that are sent but not
// acknowledged do not count, so the limit does not reduce the throughput.
func (c *Conn) LimitUnsent(n int) error {
	return c.set(func(fd int) error { return unix.SetsockoptInt(fd, unix.IPPROTO_TCP, unix.TCP_NOTSENT_LOWAT, n) })
}

// SetCongestion sets the congestion control algorithm (tcp(7): TCP_CONGESTION). The error wraps syscall.ENOENT if
// the kernel has not loaded the algorithm, and syscall.EPERM if this user may not use it. After an error the
// connection keeps its algorithm.
func (c *Conn) SetCongestion(name string) error {
	return c.set(func(fd int) error { return unix.SetsockoptString(fd, unix.IPPROTO_TCP, unix.TCP_CONGESTION, name) })
}

func (c *Conn) set(option func(fd int) error) error {
	var failed error
	err := c.raw.Control(func(fd uintptr) { failed = option(int(fd)) })
	if err == nil && failed != nil {
		err = c.failed("setsockopt", failed)
	}
	return err
}

func (o *op) read(fd uintptr) bool {
	o.n, o.err = Read(fd, o.p)
	return o.err != unix.EAGAIN
}

func (o *op) write(fd uintptr) bool {
	for o.n < len(o.p) {
		n, err := Write(fd, o.p[o.n:])
		if err != nil {
			o.err = err
			return err != unix.EAGAIN
		}
		o.n += n
	}
	o.err = nil
	return true
}

// Read implements net.Conn.
func (c *Conn) Read(p []byte) (int, error) {
	if len(p) == 0 {
		return 0, nil
	}
	c.reading.Lock()
	defer c.reading.Unlock()
	c.r.p, c.r.n, c.r.err = p, 0, nil
	err := c.raw.Read(c.r.try)
	c.r.p = nil
	switch {
	case err != nil: // closed, or the deadline has passed
		return 0, err
	case c.r.err != nil:
		return 0, c.failed("read", c.r.err)
	case c.r.n == 0:
		return 0, io.EOF
	}
	return c.r.n, nil
}

// Write implements net.Conn.
func (c *Conn) Write(p []byte) (int, error) {
	c.writing.Lock()
	defer c.writing.Unlock()
	c.w.p, c.w.n, c.w.err = p, 0, nil
	err := c.raw.Write(c.w.try)
	c.w.p = nil
	switch {
	case err != nil:
		return c.w.n, err
	case c.w.err != nil:
		return c.w.n, c.failed("write", c.w.err)
	}
	return c.w.n, nil
}

// failed gives err the form that package net gives it.
func (c *Conn) failed(what string, err error) error {
	return &net.OpError{
		Op: what, Net: "tcp", Source: c.LocalAddr(), Addr: c.RemoteAddr(), Err: os.NewSyscallError(what, err),
	}
}
