package metrics

import (
	"context"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/prometheus/client_golang/prometheus"

	"kubevpn/internal/testenv"
)

func TestOnlyLoopbackRejectsOtherHosts(t *testing.T) {
	h := OnlyLoopback(http.HandlerFunc(func(http.ResponseWriter, *http.Request) {}))
	for host, want := range map[string]int{
		"127.0.0.1:9464": 200, "127.8.0.1": 200, "[::1]:9464": 200, "[::1]": 200, "localhost:9464": 200, "LOCALHOST": 200,
		"": 403, "evil.example:9464": 403, "localhost.evil.example": 403, "127.0.0.1.evil.example": 403,
		"10.0.0.1:9464": 403, "0.0.0.0:9464": 403, "localhost.": 403,
	} {
		r := httptest.NewRequest(http.MethodGet, "/metrics", nil)
		r.Host = host
		w := httptest.NewRecorder()
		h.ServeHTTP(w, r)
		if w.Code != want {
			t.Errorf("Host %q: %d, want %d", host, w.Code, want)
		}
	}
}

// A value with the wrong labels must not hide the others.
func TestHandlerServesTheRestAfterAnError(t *testing.T) {
	good := &Metric{Name: "kubevpn_good", Help: "Good.", Type: prometheus.GaugeValue}
	bad := &Metric{Name: "kubevpn_bad", Help: "Bad.", Type: prometheus.GaugeValue, Labels: []string{"a"}}
	c := New([]*Metric{good, bad}, func(emit Emit) {
		emit(bad, 1)
		emit(good, 2)
	})
	w := httptest.NewRecorder()
	Handler(c).ServeHTTP(w, httptest.NewRequest(http.MethodGet, "/metrics", nil))
	if page := w.Body.String(); w.Code != http.StatusOK || !strings.Contains(page, "\nkubevpn_good 2\n") {
		t.Errorf("%d: %s", w.Code, page)
	}
}

// Any pod reaches the traffic manager's metrics, and any user of the machine the laptop's.
func TestMetricsPortIsBounded(t *testing.T) {
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- Serve(ctx, "metrics", l, Handler(New(nil, func(Emit) {}))) }()
	url := "http://" + l.Addr().String() + "/metrics"
	testenv.Flood(t, l.Addr().String(), "GET /metrics HTTP/1.1\r\nHost: a\r\n", testenv.Get(url))
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
