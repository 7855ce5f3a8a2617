package manager

import (
	"context"
	"log/slog"
	"testing"

	"kubevpn/internal/incluster/manager/managertest"
	"kubevpn/internal/testenv"
)

// Any pod reaches the health port. Whatever pods send there, the kubelet gets an answer and memory stays bounded.
func TestHealthPortIsBounded(t *testing.T) {
	m := New(Config{Logger: slog.New(slog.DiscardHandler)})
	l := managertest.Listen(t)
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan error, 1)
	go func() { done <- m.serveHealth(ctx, l) }()
	url := "http://" + l.Addr().String() + "/livez"
	testenv.Flood(t, l.Addr().String(), "GET /livez HTTP/1.1\r\nHost: a\r\n", testenv.Get(url))
	cancel()
	if err := <-done; err != nil {
		t.Error(err)
	}
}
