//go:build unix

package daemonclient

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

// listenAsDaemon listens at the socket of a daemon. The caller closes the listener.
func listenAsDaemon(t *testing.T) (config.Paths, net.Listener) {
	t.Helper()
	paths := config.Paths{RuntimeDir: filepath.Join(t.TempDir(), "r")}
	if err := paths.MakeRuntimeDir(); err != nil {
		t.Fatal(err)
	}
	l, err := net.Listen("unix", paths.Socket())
	if err != nil {
		t.Fatal(err)
	}
	return paths, l
}

func TestRequestThatNoDaemonAcceptsReportsNoDaemon(t *testing.T) {
	paths, l := listenAsDaemon(t)
	asked := make(chan error, 1)
	go func() {
		_, err := New(Config{Locate: func() (config.Paths, error) { return paths, nil }}).Status(t.Context())
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
	if err := <-asked; !errors.Is(err, ErrNoDaemon) {
		t.Errorf("error %v, want %v", err, ErrNoDaemon)
	}
	if _, err := os.Stat(paths.Socket()); err == nil {
		t.Error("the socket still exists, so this shows nothing")
	}
	if _, err := New(Config{Locate: func() (config.Paths, error) { return paths, nil }}).Status(context.Background()); !errors.Is(err, ErrNoDaemon) {
		t.Errorf("without a socket: %v", err)
	}
}

// An interrupted request returns the error of the interrupt, whatever the daemon answers, and what it has connected.
func TestInterruptedRequestReturnsTheInterrupt(t *testing.T) {
	for _, tt := range []struct {
		name      string
		answer    func(w http.ResponseWriter)
		connected bool
	}{
		{"refused", func(w http.ResponseWriter) { w.WriteHeader(http.StatusInternalServerError) }, false},
		{"failed", func(w http.ResponseWriter) { io.WriteString(w, `{"error":{"code":21,"message":"late"}}`) }, false},
		{"connected", func(w http.ResponseWriter) { io.WriteString(w, `{"connection":{"id":"id-a"}}`) }, true},
	} {
		t.Run(tt.name, func(t *testing.T) {
			paths, listener := listenAsDaemon(t)
			ctx, interrupt := context.WithCancel(t.Context())
			server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				var req struct{}
				if err := json.NewDecoder(r.Body).Decode(&req); err != nil {
					t.Error(err)
				}
				interrupt()
				if rest, err := io.ReadAll(r.Body); err != nil || len(rest) > 0 { // until the client ends the body
					t.Errorf("the body continues with %q, %v", rest, err)
				}
				tt.answer(w)
			}))
			server.Listener.Close()
			server.Listener = listener
			server.Start()
			defer server.Close()
			c, err := New(Config{Locate: func() (config.Paths, error) { return paths, nil }}).hold(ctx, api.PathConnect, struct{}{}, func(e api.Event) {
				if e.Error != nil {
					t.Errorf("the error %v is shown beside the interrupt", e.Error)
				}
			})
			if !errors.Is(err, context.Canceled) || (c != nil) != tt.connected {
				t.Errorf("hold = %+v, %v; want a connection: %v, and the interrupt", c, err, tt.connected)
			}
		})
	}
}

// A daemon that rejects a request closes the conn, perhaps before the client has sent the end of the body.
func TestAnswerCountsAlsoIfTheRequestIsNotSentWhole(t *testing.T) {
	for _, answer := range []string{"the answer", ""} {
		paths, listener := listenAsDaemon(t)
		defer listener.Close()
		conn, err := httpClient(paths, func() {}).Transport.(*http.Transport).DialContext(t.Context(), "", "")
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		daemon, err := listener.Accept()
		if err != nil {
			t.Fatal(err)
		}
		_, err = io.WriteString(daemon, answer)
		if err := errors.Join(err, daemon.Close()); err != nil {
			t.Fatal(err)
		}
		if n, err := io.WriteString(conn, "rest"); n != 4 || err != nil {
			t.Errorf("write: %d, %v", n, err)
		}
		if got, err := io.ReadAll(conn); string(got) != answer || !errors.Is(err, unix.EPIPE) {
			t.Errorf("read %q, %v; want %q and the end of the daemon", got, err, answer)
		}
	}
}

// The body of an attached request ends with the command. The daemon's death must not wait for that.
func TestAttachedRequestFailsWhenTheDaemonDies(t *testing.T) {
	paths, listener := listenAsDaemon(t)
	defer listener.Close()
	go func() {
		conn, err := listener.Accept()
		if err != nil {
			return // the test has ended
		}
		defer conn.Close()
		req, err := http.ReadRequest(bufio.NewReader(conn))
		if err != nil {
			t.Error(err)
			return
		}
		var body struct{}
		if err := json.NewDecoder(req.Body).Decode(&body); err != nil {
			t.Error(err)
		}
	}()
	failed := make(chan error, 1)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	go func() {
		_, err := New(Config{Locate: func() (config.Paths, error) { return paths, nil }}).hold(ctx, api.PathConnect, struct{}{}, func(api.Event) {})
		failed <- err
	}()
	select {
	case err := <-failed:
		if api.AsError(err) == nil || api.AsError(err).Code != api.ExitDaemon || !errors.Is(err, errLostDaemon) {
			t.Errorf("got %v, want that the daemon closed the connection", err)
		}
	case <-time.After(20 * time.Second):
		t.Fatal("the request waits for a daemon that has died")
	}
}
