//go:build unix

package cli

import (
	"context"
	"encoding/json"
	"errors"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

func TestRequestThatNoDaemonAcceptsReportsNoDaemon(t *testing.T) {
	paths := config.Paths{RuntimeDir: filepath.Join(t.TempDir(), "r")}
	if err := paths.MakeRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", paths.Socket())
	if err != nil {
		t.Fatal(err)
	}
	asked := make(chan error, 1)
	go func() {
		_, err := newClient(paths).status(t.Context())
		asked <- err
	}()
	raw, err := l.(*net.UnixListener).SyscallConn()
	if err != nil {
		t.Fatal(err)
	}
	var pollErr error
	err = raw.Control(func(fd uintptr) { // until there is something to accept
		for pollErr = unix.EINTR; pollErr == unix.EINTR; { // a signal of the runtime interrupts poll
			_, pollErr = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}, -1)
		}
	})
	if err := errors.Join(err, pollErr); err != nil {
		t.Fatal(err)
	}
	l.Close()
	if err := <-asked; !errors.Is(err, errNoDaemon) {
		t.Errorf("error %v, want %v", err, errNoDaemon)
	}
	if _, err := os.Stat(paths.Socket()); err == nil {
		t.Error("the socket still exists, so this shows nothing")
	}
	if _, err := newClient(paths).status(context.Background()); !errors.Is(err, errNoDaemon) {
		t.Errorf("without a socket: %v", err)
	}
}

// The daemon removes a connection from its status before the helper has removed the last of what it made.
func TestAnInterruptedConnectWaitsForTheHelper(t *testing.T) {
	paths := config.Paths{RuntimeDir: filepath.Join(t.TempDir(), "r")}
	if err := paths.MakeRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	listener, err := net.Listen("unix", paths.Socket())
	if err != nil {
		t.Fatal(err)
	}
	var removed atomic.Bool
	mux := http.NewServeMux()
	mux.HandleFunc("GET "+api.PathStatus, func(w http.ResponseWriter, _ *http.Request) {
		_ = json.NewEncoder(w).Encode(api.Status{})
	})
	mux.HandleFunc("POST "+api.PathDisconnect, func(_ http.ResponseWriter, r *http.Request) {
		var req api.DisconnectRequest
		if err := json.NewDecoder(r.Body).Decode(&req); err != nil || req.All || len(req.IDs) > 0 {
			t.Errorf("request %+v (%v), want one that ends no connection", req, err)
		}
		removed.Store(true)
	})
	server := &http.Server{Handler: mux}
	go func() { _ = server.Serve(listener) }() // until Close
	defer server.Close()
	interrupted, cancel := context.WithCancel(t.Context())
	cancel()
	if err := awaitCleanup(interrupted, newClient(paths), "id", func(api.Event) {}); err != nil || !removed.Load() {
		t.Errorf("error %v; waited for the helper: %v", err, removed.Load())
	}
}
