//go:build !linux

package router

import (
	"context"
	"errors"
	"net"
	"net/netip"
)

// Traffic managers run on Linux. Elsewhere there is no gateway.

// ListenGateways returns errors.ErrUnsupported.
func ListenGateways(context.Context, string) (net.Listener, error) {
	return nil, errors.ErrUnsupported
}

func (r *Router) serveGateway(_ context.Context, conn net.Conn) error {
	conn.Close()
	return errors.ErrUnsupported
}

// PodRoutes returns no routes.
func PodRoutes() ([]netip.Prefix, error) { return nil, nil }
