package transport_test

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"golang.org/x/net/nettest"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/transport"
)

func TestStreamIsNetConn(t *testing.T) {
	for _, n := range networks {
		t.Run(n.name, func(t *testing.T) {
			t.Parallel()
			r := start(t, n.make(t), transport.ClientConfig{}, transport.ServerConfig{})
			nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
				a, b := open(t, r.laptop, r.manager)
				return a, b, func() { a.Close(); b.Close() }, nil
			})
			testenv.Until(t, "no stream is left", func() bool {
				return r.laptop.Stats().Streams == 0 && r.manager.Stats().Streams == 0
			})
		})
	}
}

func TestStreamsHaveTheAddressesOfTheirRequest(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := open(t, r.laptop, r.manager)
	got := fmt.Sprint(a.LocalAddr(), a.RemoteAddr(), b.LocalAddr(), b.RemoteAddr(), " ", b.LocalAddr().Network())
	want := "198.19.0.2:40000 10.96.0.10:80 10.96.0.10:80 198.19.0.2:40000 tcp"
	if got != want {
		t.Errorf("got %s, want %s", got, want)
	}
	a.Close()
	b.Close()
}

func TestHalfCloseReachesTheOtherEnd(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := open(t, r.laptop, r.manager)
	_, err := a.Write([]byte("question"))
	check(t, err)
	check(t, a.CloseWrite())
	check(t, a.CloseWrite()) // again is nothing
	if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("write after CloseWrite gives %v, want EPIPE", err)
	}
	got, err := io.ReadAll(b)
	if string(got) != "question" || err != nil {
		t.Fatalf("read %q, %v", got, err)
	}
	for i := range 1000 { // the other direction goes on, beyond a window
		_, err := b.Write(bytes.Repeat([]byte{byte(i)}, 1000))
		check(t, err)
		buf := make([]byte, 1000)
		_, err = io.ReadFull(a, buf)
		check(t, err)
		if buf[0] != byte(i) {
			t.Fatalf("got %d, want %d", buf[0], byte(i))
		}
	}
	check(t, b.CloseWrite())
	if rest, err := io.ReadAll(a); len(rest) != 0 || err != nil {
		t.Fatalf("read %q, %v", rest, err)
	}
	testenv.Until(t, "both ends forget the stream", func() bool {
		return r.laptop.Stats().Streams == 0 && r.manager.Stats().Streams == 0
	})
}

func TestResetReachesTheOtherEnd(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := open(t, r.laptop, r.manager)
	_, err := a.Write([]byte("last words"))
	check(t, err)
	check(t, a.Reset())
	got, err := io.ReadAll(b)
	if string(got) != "last words" || !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("other end read %q, %v", got, err)
	}
	if _, err := b.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("other end's write gives %v", err)
	}
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("this end's read gives %v", err)
	}
	check(t, b.Reset())
	check(t, b.Close())
}

func TestResetEndsBlockedCalls(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{Links: 1}, transport.ServerConfig{})
	a, b := open(t, r.laptop, r.manager)
	errs := make(chan error, 2)
	go func() { // until the window is full
		for {
			if _, err := a.Write(make([]byte, 64<<10)); err != nil {
				errs <- err
				return
			}
		}
	}()
	go func() {
		_, err := a.Read(make([]byte, 1))
		errs <- err
	}()
	testenv.Until(t, "the window is full", func() bool { return r.manager.Stats().Links[0].Received > 256<<10 })
	check(t, b.Reset())
	for range 2 {
		if err := receive(t, errs); !errors.Is(err, syscall.ECONNRESET) {
			t.Errorf("got %v, want ECONNRESET", err)
		}
	}
}

// TestCloseWithUnreadDataResets resets as TCP does when unread data is closed.
func TestCloseWithUnreadDataResets(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := open(t, r.laptop, r.manager)
	_, err := a.Write([]byte("x"))
	check(t, err)
	check(t, b.Wait())
	check(t, b.Close())
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want ECONNRESET", err)
	}
	a, b = open(t, r.laptop, r.manager)
	check(t, b.Close()) // nothing unread yet
	if _, err := a.Read(make([]byte, 1)); err != io.EOF {
		t.Errorf("got %v, want EOF", err)
	}
	_, err = a.Write([]byte("late"))
	check(t, err)
	testenv.Until(t, "late data is answered with a reset", func() bool {
		_, err := a.Write([]byte("later"))
		return errors.Is(err, syscall.ECONNRESET)
	})
}

func TestClosedStreamIsResetAfterLinger(t *testing.T) {
	tuning := transport.Tuning{Linger: 20 * time.Millisecond, Heartbeat: 5 * time.Millisecond}
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{Tuning: tuning})
	a, b := open(t, r.laptop, r.manager)
	check(t, b.Close())
	testenv.Until(t, "the manager forgets a stream whose other end stays open", func() bool {
		return r.manager.Stats().Streams == 0 && r.laptop.Stats().Streams == 0
	})
	if _, err := a.Write([]byte("x")); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("got %v, want ECONNRESET", err)
	}
}

func TestWriteToReturnsAtFIN(t *testing.T) {
	r := start(t, tcp(t), transport.ClientConfig{}, transport.ServerConfig{})
	a, b := open(t, r.laptop, r.manager)
	want := strings.Repeat("0123456789abcdef", 1<<17) // 2 MiB
	go func() {
		io.Copy(a, strings.NewReader(want))
		a.CloseWrite()
	}()
	var got bytes.Buffer
	n, err := b.WriteTo(&got)
	if n != int64(len(want)) || err != nil || got.String() != want {
		t.Errorf("%d bytes, %v; equal: %v", n, err, got.String() == want)
	}
}

func TestRejectedOpenReturnsTheCode(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	for _, test := range []struct {
		code transport.Code
		is   error
		text string
	}{
		{transport.CodeRefused, syscall.ECONNREFUSED, "connection refused"},
		{transport.CodeHostUnreachable, syscall.EHOSTUNREACH, "host unreachable"},
		{transport.CodeNetUnreachable, syscall.ENETUNREACH, "network unreachable"},
		{transport.CodeTimeout, syscall.ETIMEDOUT, "timed out"},
		{transport.CodeProhibited, syscall.EACCES, "prohibited"},
		{transport.CodeFailed, nil, "failed"},
		{transport.Code(99), nil, "code 99"},
	} {
		t.Run(strings.ReplaceAll(test.text, " ", "_"), func(t *testing.T) {
			go func() {
				if in, err := r.manager.Accept(context.Background()); err == nil {
					in.Reject(test.code)
				}
			}()
			_, err := r.laptop.Open(context.Background(), tcpRequest)
			if test.is != nil && !errors.Is(err, test.is) {
				t.Errorf("%v is not %v", err, test.is)
			}
			if want := "opening tcp 198.19.0.2:40000 -> 10.96.0.10:80: far end: " + test.text; err == nil || err.Error() != want {
				t.Errorf("got %v, want %s", err, want)
			}
			if transport.CodeOf(err) != test.code {
				t.Errorf("CodeOf returns another code: %v", transport.CodeOf(err))
			}
		})
	}
	// The answer may arrive before the other end has removed the stream.
	testenv.Until(t, "no stream is left", func() bool { return r.laptop.Stats().Streams+r.manager.Stats().Streams == 0 })
}

func TestRejectedOpenReturnsTheErrorsText(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	go func() {
		if in, err := r.manager.Accept(context.Background()); err == nil {
			in.RejectError(fmt.Errorf("dial tcp 10.0.0.1:80: %w%s", syscall.EHOSTUNREACH, strings.Repeat(".", 600)))
		}
	}()
	_, err := r.laptop.Open(context.Background(), tcpRequest)
	if !errors.Is(err, syscall.EHOSTUNREACH) || !strings.Contains(err.Error(), "dial tcp 10.0.0.1:80: no route to host...") {
		t.Errorf("got %v", err)
	}
}

func TestOpenEndsWithItsContext(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	ctx, cancel := context.WithCancel(context.Background())
	opened := make(chan error, 1)
	go func() {
		_, err := r.laptop.Open(ctx, tcpRequest)
		opened <- err
	}()
	in, err := r.manager.Accept(context.Background())
	check(t, err)
	select {
	case <-in.Done():
		t.Fatal("done too early")
	default:
	}
	cancel()
	if err := receive(t, opened); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	receive(t, in.Done())
	if _, err := in.Accept(); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("Accept of a stream that its opener gave up returns %v", err)
	}
	if err := in.Reject(transport.CodeRefused); err == nil {
		t.Error("answered twice")
	}
}

func TestConcurrentOpensGetTheirOwnStreams(t *testing.T) {
	const n = 10_000
	r := start(t, tcp(t), transport.ClientConfig{}, transport.ServerConfig{})
	serve(t, r.manager, func(st *transport.Stream) { io.Copy(st, st); st.Close() })
	var wg sync.WaitGroup
	errs := make(chan error, n)
	for i := range n {
		wg.Go(func() {
			errs <- func() error {
				req := tcpRequest
				req.Src = netip.AddrPortFrom(req.Src.Addr(), uint16(i))
				st, err := r.laptop.Open(context.Background(), req)
				if err != nil {
					return err
				}
				defer st.Close()
				fmt.Fprint(st, i)
				st.CloseWrite()
				got, err := io.ReadAll(st)
				if err == nil && string(got) != fmt.Sprint(i) {
					err = fmt.Errorf("got %q, want %d", got, i)
				}
				return err
			}()
		})
	}
	wg.Wait()
	for range n {
		check(t, <-errs)
	}
	testenv.Until(t, "no stream is left", func() bool {
		return r.laptop.Stats().Streams == 0 && r.manager.Stats().Streams == 0
	})
}

// TestManagerMayOpenStreams shows that streams go both ways.
func TestManagerMayOpenStreams(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{Budget: transport.NewBudget(16, 64<<20)}, transport.ServerConfig{})
	serve(t, r.laptop, echo)
	st, err := r.manager.Open(context.Background(), transport.Request{Proto: transport.ProtoControl})
	check(t, err)
	fmt.Fprint(st, "hello")
	st.CloseWrite()
	if got, err := io.ReadAll(st); string(got) != "hello" || err != nil {
		t.Errorf("%q, %v", got, err)
	}
	st.Close()
}

// TestGoneClosesAfterReset resets after FIN, which Read does not report.
func TestGoneClosesAfterReset(t *testing.T) {
	r := start(t, memory(t), transport.ClientConfig{}, transport.ServerConfig{})
	for _, late := range []bool{false, true} {
		a, b := open(t, r.laptop, r.manager)
		check(t, b.CloseWrite())
		if _, err := a.Read(make([]byte, 1)); err != io.EOF {
			t.Fatalf("got %v, want EOF", err)
		}
		var gone <-chan struct{}
		if !late {
			gone = a.Gone()
		}
		select {
		case <-gone:
			t.Fatal("Gone is closed after FIN alone")
		default:
		}
		check(t, b.Reset())
		if late {
			testenv.Until(t, "the reset arrives", func() bool { _, err := a.Write([]byte("x")); return err != nil })
			gone = a.Gone()
		}
		receive(t, gone)
	}
	a, _ := open(t, r.laptop, r.manager)
	gone := a.Gone()
	check(t, r.manager.Close())
	receive(t, gone)
}
