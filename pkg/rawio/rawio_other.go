//go:build !linux

package rawio

import (
	"net"
	"syscall"
)

// Conn is the connection as it is: only Linux lets a program make system calls by itself.
type Conn struct{ *net.TCPConn }

// NewConn takes c over.
func NewConn(c *net.TCPConn) (*Conn, error) { return &Conn{c}, nil }

// LimitUnsent does nothing here.
func (c *Conn) LimitUnsent(int) error { return nil }

// SetCongestion is for Linux.
func (c *Conn) SetCongestion(string) error { return syscall.ENOENT }
