package manager

import (
	"context"
	"fmt"
	"net"
	"net/http"
	"time"

	"kubevpn/internal/process/metrics"
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
		if !m.watch.IsReady() && time.Since(began) < readyTimeout {
			http.Error(w, "reading Services and EndpointSlices", http.StatusServiceUnavailable)
			return
		}
		fmt.Fprintln(w, "ok")
	})
	return metrics.Serve(ctx, "health checks", l, mux)
}
