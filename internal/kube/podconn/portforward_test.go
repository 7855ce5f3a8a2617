package podconn

import (
	"bytes"
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	corev1 "k8s.io/api/core/v1"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/client-go/tools/portforward"
	"k8s.io/client-go/transport/spdy"
	"k8s.io/streaming/pkg/httpstream"

	"kubevpn/internal/api"
)

func protocols(t *testing.T, f func(t *testing.T, p Protocol)) {
	t.Run("websocket", func(t *testing.T) { f(t, WebSocketProtocol) })
	t.Run("spdy", func(t *testing.T) { f(t, SPDYProtocol) })
}

func dialPod(t testing.TB, s *fakeAPIServer, p Protocol) *podConn {
	t.Helper()
	conn, err := s.dialer(t, p).PortForward(t.Context(), "ns", "web", 8080)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { conn.Close() })
	return conn.(*podConn)
}

func noLeaks(t *testing.T) {
	t.Helper()
	opt := goleak.IgnoreCurrent()
	// Only the test's server uses this library; its shutdown lingers for a second.
	server := goleak.IgnoreAnyFunction("github.com/moby/spdystream.(*Connection).shutdown")
	t.Cleanup(func() { goleak.VerifyNone(t, opt, server) })
}

func TestPortForwardCarriesBytesBothWays(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		conn := dialPod(t, newFakeAPIServer(t, echo), p)
		sent := make([]byte, 3<<20)
		rand.Read(sent)
		go func() {
			for chunk := range slicesChunks(sent, 70_001) {
				conn.Write(chunk)
			}
			conn.CloseWrite()
		}()
		got, err := io.ReadAll(conn)
		if err != nil {
			t.Fatal(err)
		}
		if !bytes.Equal(got, sent) {
			t.Fatalf("%d bytes came back, of %d", len(got), len(sent))
		}
		if _, err := conn.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
			t.Fatalf("Write after CloseWrite: %v", err)
		}
		if err := conn.Close(); err != nil {
			t.Fatal(err)
		}
		if _, err := conn.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) && err != io.EOF {
			t.Fatalf("Read after Close: %v", err)
		}
		if got, want := conn.RemoteAddr().String(), "ns/web:8080"; got != want {
			t.Fatalf("RemoteAddr %s, want %s", got, want)
		}
	})
}

func slicesChunks(b []byte, n int) func(func([]byte) bool) {
	return func(yield func([]byte) bool) {
		for len(b) > 0 {
			m := min(n, len(b))
			if !yield(b[:m]) {
				return
			}
			b = b[m:]
		}
	}
}

// Read returns the text of the pod as an error that errors.Is recognizes.
func TestPortForwardRefusalIsAReadError(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		l, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		l.Close() // nothing listens there now
		conn := dialPod(t, newFakeAPIServer(t, toTCP(l.Addr().String())), p)
		_, err = conn.Read(make([]byte, 1))
		var refused *RefusedError
		if !errors.As(err, &refused) || !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("Read: %v", err)
		}
		want := fmt.Sprintf("port 8080 of pod ns/web: error forwarding port 8080 to pod 1234, uid : failed to dial 8080: dial tcp %s: connect: connection refused", l.Addr())
		if err.Error() != want {
			t.Fatalf("Read says %q, want %q", err, want)
		}
		if _, again := conn.Read(make([]byte, 1)); again != err {
			t.Fatalf("the second Read says %v", again)
		}
		if _, err := conn.Write([]byte("x")); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("Write says %v", err)
		}
		other, err := newFakeAPIServer(t, toTCP(l.Addr().String())).dialer(t, p).PortForward(t.Context(), "ns", "web", 8081)
		if err != nil {
			t.Fatal(err)
		}
		defer other.Close()
		if _, err := other.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNREFUSED) {
			t.Fatalf("error before the resets: Read says %v", err)
		}
	})
}

func TestPortForwardEndIsEOF(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		conn := dialPod(t, newFakeAPIServer(t, func(_ string, data, errs httpstream.Stream) {
			data.Close()
			errs.Close()
		}), p)
		if n, err := conn.Read(make([]byte, 1)); n != 0 || err != io.EOF {
			t.Fatalf("Read gave %d, %v", n, err)
		}
	})
}

func TestPortForwardResetIsAReadError(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		conn := dialPod(t, newFakeAPIServer(t, func(_ string, data, errs httpstream.Stream) {
			data.Write([]byte("hello"))
			data.Reset()
			errs.Close()
		}), p)
		got, err := io.ReadAll(conn)
		if string(got) != "hello" || !errors.Is(err, syscall.ECONNRESET) {
			t.Fatalf("Read gave %q, %v", got, err)
		}
	})
}

// readDeadlinesHarmNothing checks that a deadline ends a Read, and that an echo over conn still works afterwards.
func readDeadlinesHarmNothing(t *testing.T, conn net.Conn) {
	t.Helper()
	buf := make([]byte, 5)
	for range 3 {
		conn.SetReadDeadline(time.Now().Add(20 * time.Millisecond))
		_, err := conn.Read(buf)
		var timeout net.Error
		if !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
			t.Fatalf("Read: %v", err)
		}
		conn.SetReadDeadline(time.Time{})
		if _, err := conn.Write([]byte("again")); err != nil {
			t.Fatal(err)
		}
		if _, err := io.ReadFull(conn, buf); err != nil || string(buf) != "again" {
			t.Fatalf("Read after the deadline: %q, %v", buf, err)
		}
	}
}

// A deadline ends a Read and harms nothing.
func TestPortForwardReadDeadlineEndsRead(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		conn := dialPod(t, newFakeAPIServer(t, echo), p)
		readDeadlinesHarmNothing(t, conn)
		// A deadline set during a Read ends it.
		result := make(chan error, 1)
		go func() {
			_, err := conn.Read(make([]byte, 10))
			result <- err
		}()
		conn.SetReadDeadline(time.Unix(1, 0))
		if err := <-result; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Fatal(err)
		}
	})
}

// Close ends a Read and a Write that wait.
func TestPortForwardCloseEndsBlockedCalls(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		stuck := make(chan struct{})
		s := newFakeAPIServer(t, func(_ string, data, errs httpstream.Stream) { <-stuck })
		defer close(stuck)
		conn := dialPod(t, s, p)
		var wg sync.WaitGroup
		errs := make(chan error, 2)
		wg.Go(func() {
			_, err := conn.Read(make([]byte, 1))
			errs <- err
		})
		full := make(chan struct{})
		wg.Go(func() {
			chunk := make([]byte, 1<<20)
			for i := 0; ; i++ {
				if i == 1 {
					close(full)
				}
				if _, err := conn.Write(chunk); err != nil {
					errs <- err
					return
				}
			}
		})
		<-full
		conn.Close() // Close must not wait for the Write
		wg.Wait()
		for range 2 {
			if err := <-errs; !errors.Is(err, net.ErrClosed) {
				t.Fatalf("%v", err)
			}
		}
	})
}

// The server's pings are answered while nothing else happens, and during Writes.
func TestPortForwardAnswersPings(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		s := newFakeAPIServer(t, echo)
		s.pings = time.Millisecond // and the next only after the answer
		conn := dialPod(t, s, p)
		end := time.Now().Add(200 * time.Millisecond)
		go func() {
			for time.Now().Before(end) {
				if _, err := conn.Write(make([]byte, 100_000)); err != nil {
					t.Error(err)
					return
				}
			}
			conn.CloseWrite()
		}()
		if _, err := io.Copy(io.Discard, conn); err != nil {
			t.Fatal(err)
		}
	})
}

func TestPortForwardSendsPings(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		conn := dialPod(t, newFakeAPIServer(t, echo), p)
		for range 3 {
			conn.ping()
		}
		conn.Write([]byte("x"))
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	})
}

func TestPortForwardFallsBackToWebSocket(t *testing.T) {
	noLeaks(t)
	s := newFakeAPIServer(t, echo)
	s.noSPDY.Store(true)
	c := s.dialer(t, AnyProtocol)
	dial := func() {
		t.Helper()
		conn, err := c.PortForward(t.Context(), "ns", "web", 1)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
	}
	asked := func(want string) {
		t.Helper()
		var got []string
		for len(s.requests) > 0 {
			got = append(got, <-s.requests)
		}
		if strings.Join(got, " ") != want {
			t.Fatalf("asked for %q, want %q", got, want)
		}
	}
	if c.Transport() != "" {
		t.Fatalf("transport %q before the first", c.Transport())
	}
	dial()
	asked("spdy websocket")
	dial()
	asked("websocket")
	if c.Transport() != "port-forward (websocket)" {
		t.Fatalf("transport %q", c.Transport())
	}
	s.noSPDY.Store(false)
	s.noWebSocket.Store(true)
	dial()
	asked("websocket spdy")
	dial()
	asked("spdy")
	if c.Transport() != "port-forward (spdy)" {
		t.Fatalf("transport %q", c.Transport())
	}
	if len(c.cluster.Addresses()) != 1 || !c.cluster.Addresses()[0].IsLoopback() {
		t.Fatalf("addresses %v", c.cluster.Addresses())
	}
}

// A proxy accepts the unknown upgrade and never answers.
func TestPortForwardFallsBackAfterSilence(t *testing.T) {
	noLeaks(t)
	s := newFakeAPIServer(t, echo)
	s.muteSPDY.Store(true)
	c := s.dialer(t, AnyProtocol)
	c.timeout = 20 * time.Millisecond
	conn, err := c.PortForward(t.Context(), "ns", "web", 1)
	if err != nil {
		t.Fatal(err)
	}
	conn.Close()
	if c.Transport() != "port-forward (websocket)" {
		t.Fatalf("transport %q", c.Transport())
	}
}

func TestPortForwardFailsWithoutThePod(t *testing.T) {
	noLeaks(t)
	s := newFakeAPIServer(t, echo)
	_, err := s.dialer(t, AnyProtocol).PortForward(t.Context(), "ns", "gone", 1)
	if err == nil || err.Error() != `port-forward to pod ns/gone: upgrading the connection: pods "gone" not found` {
		t.Fatal(err)
	}
}

// Cancelling during the dial ends it, at every stage; afterwards it has no effect.
func TestPortForwardDialEndsWithItsContext(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		l, err := net.Listen("tcp", "127.0.0.1:0") // accepts connections and sends nothing
		if err != nil {
			t.Fatal(err)
		}
		defer l.Close()
		s := newFakeAPIServer(t, echo)
		mute := dialerOf(t, bytes.ReplaceAll(s.kubeconfig(t), []byte(s.Listener.Addr().String()), []byte(l.Addr().String())), p)
		ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
		defer cancel()
		if _, err := mute.PortForward(ctx, "ns", "web", 1); !errors.Is(err, context.DeadlineExceeded) {
			t.Fatal(err)
		}
		ctx, cancel = context.WithCancel(t.Context())
		conn, err := s.dialer(t, p).PortForward(ctx, "ns", "web", 1)
		if err != nil {
			t.Fatal(err)
		}
		defer conn.Close()
		cancel()
		conn.Write([]byte("x"))
		if _, err := conn.Read(make([]byte, 1)); err != nil {
			t.Fatal(err)
		}
	})
}

// countWrites counts the writes of the layer above TLS.
type countWrites struct {
	io.ReadWriter
	n *int
}

func (c countWrites) Write(p []byte) (int, error) { *c.n++; return c.ReadWriter.Write(p) }

func TestWriteSendsOneFrame(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		noLeaks(t)
		conn := dialPod(t, newFakeAPIServer(t, echo), p)
		writes := 0
		switch l := conn.link.(type) {
		case *webSocket:
			l.w = countWrites{readWriter{l.br, l.w}, &writes}
		case rawLink:
			conn.link = rawLink{l.Reader, countWrites{readWriter(l), &writes}}
		}
		for i, size := range []int{1, 125, 126, 65_535, 65_536, maxData} {
			if n, err := conn.Write(make([]byte, size)); n != size || err != nil {
				t.Fatal(n, err)
			}
			if _, err := io.CopyN(io.Discard, conn, int64(size)); err != nil {
				t.Fatal(err)
			}
			if writes != i+1 {
				t.Fatalf("%d writes after %d bytes, want %d", writes, size, i+1)
			}
		}
	})
}

type readWriter struct {
	io.Reader
	io.Writer
}

// upstream dials with client-go's own port-forward client, for comparison.
func upstream(b *testing.B, s *fakeAPIServer, p Protocol) io.ReadWriter {
	b.Helper()
	config, err := clientcmd.RESTConfigFromKubeConfig(s.kubeconfig(b))
	if err != nil {
		b.Fatal(err)
	}
	target := s.dialer(b, AnyProtocol).podURL("ns", "web")
	dialer, err := portforward.NewSPDYOverWebsocketDialer(target, config)
	if err != nil {
		b.Fatal(err)
	}
	if p == SPDYProtocol {
		rt, up, err := spdy.RoundTripperFor(config)
		if err != nil {
			b.Fatal(err)
		}
		dialer = spdy.NewDialer(up, &http.Client{Transport: rt}, http.MethodPost, target)
	}
	conn, _, err := dialer.Dial(portforward.PortForwardProtocolV1Name)
	if err != nil {
		b.Fatal(err)
	}
	b.Cleanup(func() { conn.Close() })
	headers := http.Header{}
	headers.Set(corev1.StreamType, corev1.StreamTypeError)
	headers.Set(corev1.PortHeader, "1")
	headers.Set(corev1.PortForwardRequestIDHeader, "0")
	errs, err := conn.CreateStream(headers)
	if err != nil {
		b.Fatal(err)
	}
	errs.Close()
	headers = headers.Clone()
	headers.Set(corev1.StreamType, corev1.StreamTypeData)
	data, err := conn.CreateStream(headers)
	if err != nil {
		b.Fatal(err)
	}
	return data
}

func BenchmarkPortForward(b *testing.B) {
	for _, p := range []Protocol{WebSocketProtocol, SPDYProtocol} {
		for _, size := range []int{1, 64 << 10} {
			for _, client := range []string{"ours", "client-go"} {
				b.Run(fmt.Sprintf("%v/size=%d/%s", p, size, client), func(b *testing.B) {
					s := newFakeAPIServer(b, echo)
					var conn io.ReadWriter
					if client == "ours" {
						conn = dialPod(b, s, p)
					} else {
						conn = upstream(b, s, p)
					}
					buf := make([]byte, size)
					b.SetBytes(int64(2 * size))
					b.ReportAllocs()
					for b.Loop() {
						if _, err := conn.Write(buf); err != nil {
							b.Fatal(err)
						}
						if _, err := io.ReadFull(conn, buf); err != nil {
							b.Fatal(err)
						}
					}
				})
			}
		}
	}
}

func TestExplainNamesWhatPreventsUpgrades(t *testing.T) {
	d := newFakeAPIServer(t, echo).dialer(t, AnyProtocol)
	e := d.cluster.Explain(fmt.Errorf("port-forward: %w", &upgradeError{http.StatusOK, errNoUpgrade}))
	if e.Code != api.ExitUnreachable || !strings.Contains(e.Message, "blocks port-forwards") || e.Hint == "" {
		t.Errorf("explained as %d, %s", e.Code, e.Message)
	}
}

func TestWarmConnectionServesTheNextUpgrade(t *testing.T) {
	protocols(t, func(t *testing.T, p Protocol) {
		d := newFakeAPIServer(t, echo).dialer(t, p)
		if err := d.Warm(t.Context()); err != nil {
			t.Fatal(err)
		}
		warm := d.upgrade.warm.Load().LocalAddr().String()
		for _, want := range []bool{true, false} {
			conn, err := d.PortForward(t.Context(), "ns", "web", 8080)
			if err != nil {
				t.Fatal(err)
			}
			defer conn.Close()
			if used := conn.(*podConn).raw.LocalAddr().String() == warm; used != want {
				t.Errorf("uses the warm connection: %v, want %v", used, want)
			}
		}
	})
}

func TestTryOpensOneProtocol(t *testing.T) {
	noLeaks(t)
	s := newFakeAPIServer(t, echo)
	s.noSPDY.Store(true)
	d := s.dialer(t, AnyProtocol)
	if err := d.Try(t.Context(), WebSocketProtocol, "ns", "web"); err != nil {
		t.Error(err)
	}
	if err := d.Try(t.Context(), SPDYProtocol, "ns", "web"); err == nil {
		t.Error("Try succeeded with SPDY on a server without SPDY")
	}
	if d.Transport() != "" {
		t.Errorf("Try set the protocol of later port-forwards to %q", d.Transport())
	}
}
