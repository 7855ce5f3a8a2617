//go:build !linux

package manager

import (
	"context"
	"errors"
	"net"
	"net/netip"
)

// Traffic managers run on Linux. Elsewhere there is no gateway.

func listenGateways(context.Context, string) (net.Listener, error) {
	return nil, errors.ErrUnsupported
}

func (m *Manager) serveGateway(_ context.Context, conn net.Conn) error {
	conn.Close()
	return errors.ErrUnsupported
}

func podRoutes() ([]netip.Prefix, error) { return nil, nil }
