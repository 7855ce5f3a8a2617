package manager

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/netip"
	"time"

	"kubevpn/internal/api"
)

const (
	// setupTime is what a gateway may take from the networks to its device, which includes loading kernel modules.
	setupTime = time.Minute
	// tellTime is what it may take to hear of other networks.
	tellTime = 10 * time.Second
	// acceptPause is the wait after a failure to accept.
	acceptPause = time.Second

	maxGatewayLine = 64 << 10
)

// serveGateways takes one gateway after the other until ctx ends. While one is there, the next waits in the
// listener's backlog.
//
//	manager                                   gateway
//	   │◀────────────────────────── connects ───│   peer's uid 0, or the connection is closed
//	   │ GatewayNetworks ─────────────────────▶ │   again whenever they change
//	   │◀── Gateway, and the TUN's descriptor ──│   and Gateway again when that changes
//	   │              ... packets ...           │
//	   │◀─────────────────────────────── end ───│   the TUN is closed, and laptops are told
func (m *Manager) serveGateways(ctx context.Context) error {
	stop := context.AfterFunc(ctx, func() { m.gateways.Close() })
	defer stop()
	for {
		conn, err := m.gateways.Accept()
		if ctx.Err() != nil {
			if err == nil {
				conn.Close()
			}
			return nil
		}
		if err == nil {
			err = m.serveGateway(ctx, conn)
		}
		if err == nil {
			continue
		}
		m.log.Warn("gateway", "err", err)
		select { // the next is not expected at once, and an error may repeat itself
		case <-time.After(acceptPause):
		case <-ctx.Done():
		}
	}
}

// sendNetworks writes the inner networks, whenever they are others, until ctx or the connection ends.
func (m *Manager) sendNetworks(ctx context.Context, conn net.Conn) error {
	lines := json.NewEncoder(conn)
	for {
		networks, changed := m.router.networks()
		if err := conn.SetWriteDeadline(time.Now().Add(tellTime)); err != nil {
			return fmt.Errorf("cannot send the networks to the gateway: %w", err)
		}
		// An empty list rather than null: it means that there is none.
		if err := lines.Encode(api.GatewayNetworks{Networks: append([]netip.Prefix{}, networks...)}); err != nil {
			return fmt.Errorf("cannot send the networks to the gateway: %w", err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}
