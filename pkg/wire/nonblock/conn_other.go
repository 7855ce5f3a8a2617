//go:build !linux

package nonblock

import (
	"net"
	"syscall"
)

// Conn is the plain connection: only on Linux may a program make system calls itself.
type Conn struct{ *net.TCPConn }

// NewConn returns a Conn that owns c.
func NewConn(c *net.TCPConn) (*Conn, error) { return &Conn{c}, nil }

// LimitUnsent does nothing on this operating system.
func (c *Conn) LimitUnsent(int) error { return nil }

// SetCongestion is not implemented on this operating system.
func (c *Conn) SetCongestion(string) error { return syscall.ENOENT }
