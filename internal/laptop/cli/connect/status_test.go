//go:build unix

package connect

import (
	"context"
	"encoding/json"
	"fmt"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/cli/command"
	"kubevpn/internal/laptop/cli/term"
	"kubevpn/internal/process/version"
	"kubevpn/internal/testenv"
)

func TestWatchPrintsAgainAfterAChange(t *testing.T) {
	dir := t.TempDir()
	f := &command.Factory{Streams: term.Streams{Out: &testenv.Buffer{}, Errout: &testenv.Buffer{}}, Lookup: func(name string) (string, bool) {
		return dir, strings.HasPrefix(name, "XDG_") || name == "HOME"
	}}
	paths, err := f.Paths()
	if err != nil {
		t.Fatal(err)
	}
	if err := paths.MakeRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	var state atomic.Value
	var asked atomic.Int32
	state.Store(api.StatusConnected)
	listener, err := net.Listen("unix", paths.Socket())
	if err != nil {
		t.Fatal(err)
	}
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		n := asked.Add(1)
		json.NewEncoder(w).Encode(api.Status{Version: version.Full(), Connections: []api.Connection{{
			ID: "one", Status: state.Load().(api.ConnectionStatus), Transports: []api.Transport{{Name: "direct", Sent: uint64(n)}},
		}}})
	}))
	server.Listener.Close()
	server.Listener = listener
	server.Start()
	defer server.Close()

	o := &statusOptions{f: f, output: term.NewObjectFormat("table", "wide"), watch: true}
	if err := o.output.Set("jsonpath={.connections[0].status};"); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	ended := make(chan error, 1)
	go func() { ended <- o.run(ctx) }()
	prints := func(want string) {
		t.Helper()
		testenv.Eventually(t, 10*time.Second, func() error {
			if got := f.Out.(*testenv.Buffer).String(); got != want {
				return fmt.Errorf("printed %q, want %q", got, want)
			}
			return nil
		})
	}
	prints("connected;")
	testenv.Eventually(t, 10*time.Second, func() error {
		if n := asked.Load(); n < 2 {
			return fmt.Errorf("%d requests", n)
		}
		return nil
	})
	prints("connected;")
	state.Store(api.StatusReconnecting)
	prints("connected;reconnecting;")
	cancel()
	if err := <-ended; err != nil {
		t.Error(err)
	}
}
