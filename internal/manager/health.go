package manager

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"time"
)

// readyTimeout is how long the manager waits for the state of the cluster before it reports that it is ready anyway.
// Without the API server it still carries flows to pods, and to VIPs that kube-proxy resolves.
const readyTimeout = 10 * time.Second

// serveHealth answers the kubelet until ctx ends.
func (m *Manager) serveHealth(ctx context.Context, l net.Listener) error {
	began := time.Now()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /livez", func(w http.ResponseWriter, _ *http.Request) { fmt.Fprintln(w, "ok") })
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, _ *http.Request) {
		if !m.publisher.isReady() && time.Since(began) < readyTimeout {
			http.Error(w, "reading Services and EndpointSlices", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 5 * time.Second, IdleTimeout: time.Minute}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving health checks: %w", err)
	}
	return nil
}
