//go:build linux

package agent

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"time"

	"kubevpn/internal/process/metrics"
	"kubevpn/pkg/protocol/interceptor"
)

// readyTimeout limits the dial of a laptop's program for a readiness probe.
const readyTimeout = time.Second

var (
	errNoClaim    = errors.New("no laptop asks for requests")
	errLaptopAway = errors.New("the laptop does not answer")
)

// serveReady answers readiness probes of a pod without an application, until ctx ends: it is ready while a laptop
// answers whose program listens. A probe takes the way of a request, and closes the connection.
func (l *leader) serveReady(ctx context.Context, listener net.Listener) error {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /{$}", func(w http.ResponseWriter, r *http.Request) {
		ctx, cancel := context.WithTimeout(r.Context(), readyTimeout)
		defer cancel()
		if err := l.ready(ctx); err != nil {
			http.Error(w, err.Error(), http.StatusServiceUnavailable)
		}
	})
	return metrics.Serve(ctx, "readiness probes", listener, mux)
}

// ready returns nil if the programs of all claims accept connections at their TCP ports.
func (l *leader) ready(ctx context.Context) error {
	l.mu.Lock()
	claims := l.claims
	l.mu.Unlock()
	asked := errNoClaim
	for _, c := range claims {
		if c.mirror {
			continue
		}
		if asked = nil; c.target.Away() {
			return errLaptopAway
		}
		for _, p := range c.ports {
			if p.Protocol != "tcp" {
				continue
			}
			at := netip.AddrPortFrom(l.own[0], p.Port)
			conn, err := c.target.Dial(ctx, interceptor.Flow{Protocol: p.Protocol, Client: at, Dst: at})
			if err != nil {
				return fmt.Errorf("the laptop's program for port %d: %w", p.Port, err)
			}
			conn.Close()
		}
	}
	return asked
}
