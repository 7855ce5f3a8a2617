//go:build !linux

package redirect

import (
	"context"
	"errors"
	"net"
	"net/netip"
)

// Redirects is for Linux.
type Redirects struct{}

// New returns errors.ErrUnsupported.
func New(Config) (*Redirects, error) { return nil, errors.ErrUnsupported }

// Set returns errors.ErrUnsupported.
func (r *Redirects) Set(ports map[Port]uint16) error {
	return errors.Join(validate(ports), errors.ErrUnsupported)
}

// Close does nothing.
func (r *Redirects) Close() error { return nil }

// Transparent returns errors.ErrUnsupported.
func (r *Redirects) Transparent() error { return errors.ErrUnsupported }

// Dial returns errors.ErrUnsupported.
func (r *Redirects) Dial(context.Context, string, netip.Addr, netip.AddrPort) (net.Conn, error) {
	return nil, errors.ErrUnsupported
}

// OriginalDestination returns errors.ErrUnsupported.
func OriginalDestination(*net.TCPConn) (netip.AddrPort, error) {
	return netip.AddrPort{}, errors.ErrUnsupported
}

// Flush returns errors.ErrUnsupported.
func Flush([]Port, uint32) (int, error) { return 0, errors.ErrUnsupported }

// Open is only supported on Linux.
func Open([]Port, uint32) ([]netip.AddrPort, error) { return nil, errors.ErrUnsupported }

// Neighbors returns errors.ErrUnsupported.
func Neighbors(...netip.Addr) ([]netip.Prefix, error) { return nil, errors.ErrUnsupported }
