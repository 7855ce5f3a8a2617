package podconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"sync/atomic"
	"testing"
	"time"

	"k8s.io/streaming/pkg/httpstream"

	"kubevpn/internal/api"

	"kubevpn/internal/kube/client"
)

// late is a pod whose port refuses every attempt before number from.
func late(tries *atomic.Int32, from int32, say string) func(string, httpstream.Stream, httpstream.Stream) {
	return func(port string, data, errs httpstream.Stream) {
		if n := tries.Add(1); n < from {
			fmt.Fprintf(errs, "error forwarding port %s: connection refused", port)
			if n%2 == 0 { // the orders of the kubelet and of containerd
				data.Close()
				errs.Close()
			} else {
				data.Reset()
				errs.Reset()
			}
			return
		}
		io.WriteString(data, say)
		if say == "" {
			data.Close()
			errs.Close()
			return
		}
		io.Copy(io.Discard, data) // the runtime does not end the stream at once when the agent has closed its connection
		data.Close()
		errs.Close()
	}
}

func TestFirstLineWaitsForTheServer(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		var tries atomic.Int32
		s := newFakeAPIServer(t, late(&tries, 5, "hello\nmore"))
		c := s.dialer(t, p)
		line, err := c.FirstLine(t.Context(), "ns", "web", 20000)
		if err != nil || string(line) != "hello" {
			t.Fatalf("%q, %v", line, err)
		}
		if n := tries.Load(); n != 5 {
			t.Errorf("connected %d times", n)
		}
		if n := len(s.requests); n != 1 {
			t.Errorf("%d connections to the API server", n)
		}
	})
}

func TestFirstLineMayLackItsNewline(t *testing.T) {
	noLeaks(t)
	c := newFakeAPIServer(t, func(_ string, data, errs httpstream.Stream) {
		io.WriteString(data, "hello")
		data.Close()
		errs.Close()
	}).dialer(t, AnyProtocol)
	if line, err := c.FirstLine(t.Context(), "ns", "web", 20000); err != nil || string(line) != "hello" {
		t.Fatalf("%q, %v", line, err)
	}
}

// The server accepts and sends nothing.
func TestFirstLineRetriesUntilCancelled(t *testing.T) {
	noLeaks(t)
	var tries atomic.Int32
	ctx, cancel := context.WithCancel(t.Context())
	empty := late(&tries, 0, "")
	s := newFakeAPIServer(t, func(port string, data, errs httpstream.Stream) {
		empty(port, data, errs)
		if tries.Load() == 3 {
			cancel()
		}
	})
	if line, err := s.dialer(t, AnyProtocol).FirstLine(ctx, "ns", "web", 20000); !errors.Is(err, context.Canceled) {
		t.Fatalf("%q, %v", line, err)
	}
}

func TestFirstLineFailsWithoutThePod(t *testing.T) {
	noLeaks(t)
	_, err := newFakeAPIServer(t, echo).dialer(t, AnyProtocol).FirstLine(t.Context(), "ns", "gone", 20000)
	if !errors.Is(err, client.ErrPodGone) || api.AsError(err).Code != api.ExitInject {
		t.Fatal(err)
	}
}

func TestFirstLineReplacesABrokenConnection(t *testing.T) {
	noLeaks(t)
	var tries atomic.Int32
	s := newFakeAPIServer(t, nil)
	s.pod = func(port string, data, errs httpstream.Stream) {
		if tries.Add(1) == 2 {
			s.mu.Lock()
			defer s.mu.Unlock()
			for c := range s.conns {
				c.Close()
			}
			return
		}
		if tries.Load() < 4 {
			fmt.Fprint(errs, "connection refused")
			errs.Close()
			data.Close()
			return
		}
		io.WriteString(data, "again\n")
		io.Copy(io.Discard, data)
		data.Close()
		errs.Close()
	}
	began := time.Now()
	line, err := s.dialer(t, AnyProtocol).FirstLine(t.Context(), "ns", "web", 20000)
	if err != nil || string(line) != "again" {
		t.Fatalf("%q, %v", line, err)
	}
	if n := len(s.requests); n != 2 {
		t.Errorf("%d connections to the API server after %v", n, time.Since(began))
	}
}

func TestFirstLineFailsAtOnceWhenForbidden(t *testing.T) {
	noLeaks(t)
	s := newFakeAPIServer(t, echo)
	s.noSPDY.Store(true)
	s.noWebSocket.Store(true)
	if line, err := s.dialer(t, AnyProtocol).FirstLine(t.Context(), "ns", "web", 20000); err == nil || errors.Is(err, context.Canceled) {
		t.Fatalf("%q, %v", line, err)
	}
}
