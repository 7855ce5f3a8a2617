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

// New gives errors.ErrUnsupported.
func New(Config) (*Redirects, error) { return nil, errors.ErrUnsupported }

// Owned is nil, as New makes none.
func Owned(Config) error { return nil }

// Remove gives errors.ErrUnsupported.
func Remove(Config) error { return errors.ErrUnsupported }

// Run waits for the end of ctx.
func (r *Redirects) Run(ctx context.Context) { <-ctx.Done() }

// Set gives errors.ErrUnsupported.
func (r *Redirects) Set(ports map[Port]uint16) error {
	return errors.Join(validate(ports), errors.ErrUnsupported)
}

// Close does nothing.
func (r *Redirects) Close() error { return nil }

// Transparent gives errors.ErrUnsupported.
func (r *Redirects) Transparent() error { return errors.ErrUnsupported }

// DialFrom gives errors.ErrUnsupported.
func (r *Redirects) DialFrom(context.Context, netip.Addr, netip.AddrPort) (net.Conn, error) {
	return nil, errors.ErrUnsupported
}

// DialUDPFrom gives errors.ErrUnsupported.
func (r *Redirects) DialUDPFrom(context.Context, netip.Addr, netip.AddrPort) (net.Conn, error) {
	return nil, errors.ErrUnsupported
}

// OriginalDestination gives errors.ErrUnsupported.
func OriginalDestination(*net.TCPConn) (netip.AddrPort, error) {
	return netip.AddrPort{}, errors.ErrUnsupported
}

// Flush gives errors.ErrUnsupported.
func Flush([]Port) (int, error) { return 0, errors.ErrUnsupported }
