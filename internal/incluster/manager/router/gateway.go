package router

import (
	"context"
	"fmt"
	"net"
	"net/netip"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/authlistener"
)

const (
	// setupTimeout bounds the time from the networks to the gateway's device. It includes loading kernel modules.
	setupTimeout = time.Minute
	// sendTimeout bounds a write of networks to the gateway.
	sendTimeout = 10 * time.Second
	// errorPause is the wait after an error, which may repeat itself.
	errorPause = time.Second

	// maxGatewayMessage is the largest message of a gateway, in bytes.
	maxGatewayMessage = 64 << 10
)

// ServeGateways serves one gateway after the other until ctx ends. Meanwhile the next one waits in the backlog of l,
// which serveGateways closes.
//
//	manager                                   gateway
//	   │◀────────────────────────── connects ───│   peer's uid 0, or the connection is closed
//	   │ GatewayNetworks ─────────────────────▶ │   again whenever they change
//	   │◀── Gateway, and the TUN's descriptor ──│   and Gateway again when that changes
//	   │              ... packets ...           │
//	   │◀─────────────────────────────── end ───│   the TUN is closed, and laptops are told
func (r *Router) ServeGateways(ctx context.Context, l net.Listener) error {
	stop := context.AfterFunc(ctx, func() { l.Close() })
	defer stop()
	return authlistener.Serve(ctx, l, r.log, func(conn net.Conn) {
		if err := r.serveGateway(ctx, conn); err != nil {
			r.log.Warn("gateway", "err", err)
			wakeup.Pause(ctx, errorPause)
		}
	})
}

// sendNetworks writes the inner networks, and again after each change, until ctx or the connection ends.
func (r *Router) sendNetworks(ctx context.Context, conn *unixsocket.Conn) error {
	for {
		networks, changed := r.networks()
		if err := conn.SetWriteDeadline(time.Now().Add(sendTimeout)); err != nil {
			return fmt.Errorf("cannot send the networks to the gateway: %w", err)
		}
		// No networks are an empty list, not null.
		if err := conn.Send(api.GatewayNetworks{Networks: append([]netip.Prefix{}, networks...)}, nil); err != nil {
			return fmt.Errorf("cannot send the networks to the gateway: %w", err)
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return nil
		}
	}
}
