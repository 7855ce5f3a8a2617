package metrics

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/http"
	"net/netip"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"kubevpn/pkg/wire/authlistener"
)

const (
	// maxConns and maxHead bound the clients: an answer takes milliseconds. A head takes up to 20 times its bytes.
	maxConns = 64
	maxHead  = 4 << 10
	// maxScrapes bounds the scrapes that run at the same time; more get 503.
	maxScrapes    = 4
	scrapeTimeout = 10 * time.Second
)

// Handler answers GET /metrics with the metrics of c, of Go and of this process.
func Handler(c prometheus.Collector) http.Handler {
	registry := prometheus.NewRegistry()
	registry.MustRegister(c, collectors.NewGoCollector(),
		collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", promhttp.HandlerFor(registry, promhttp.HandlerOpts{
		ErrorHandling: promhttp.ContinueOnError, MaxRequestsInFlight: maxScrapes, Timeout: scrapeTimeout,
	}))
	return mux
}

// Serve serves h, whose answers are small, until ctx ends, and then returns nil. It owns l. Any pod may reach l: beyond
// maxConns, the oldest conn of the busiest address is closed, so that the kubelet's or Prometheus' next one is served.
// name is for the error.
func Serve(ctx context.Context, name string, l net.Listener, h http.Handler) error {
	conns := &authlistener.Bound{Max: maxConns, MaxFrom: maxConns}
	server := &http.Server{Handler: h, ReadHeaderTimeout: 5 * time.Second, ReadTimeout: 5 * time.Second,
		WriteTimeout: 2 * scrapeTimeout, IdleTimeout: 2 * time.Minute, MaxHeaderBytes: maxHead,
		ConnState: conns.ConnState}
	stop := context.AfterFunc(ctx, func() { server.Close() })
	defer stop()
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return fmt.Errorf("serving %s: %w", name, err)
	}
	return nil
}

// OnlyLoopback rejects requests whose Host is not a loopback address or localhost: a web page of another site, whose
// name its owner resolves to a loopback address (DNS rebinding), must not read the answer.
func OnlyLoopback(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !isLoopback(r.Host) {
			http.Error(w, "the Host must be a loopback address or localhost", http.StatusForbidden)
			return
		}
		h.ServeHTTP(w, r)
	})
}

// isLoopback reports whether the Host of a request names this machine by itself.
func isLoopback(host string) bool {
	if name, _, err := net.SplitHostPort(host); err == nil {
		host = name
	}
	host = strings.TrimSuffix(strings.TrimPrefix(host, "["), "]")
	addr, err := netip.ParseAddr(host)
	return strings.EqualFold(host, "localhost") || err == nil && addr.IsLoopback()
}
