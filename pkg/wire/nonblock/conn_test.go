package nonblock_test

import (
	"bytes"
	"crypto/sha256"
	"errors"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
	"golang.org/x/net/nettest"

	"kubevpn/pkg/wire/nonblock"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pair returns the two ends of a connection.
func pair(t testing.TB) (dialed, accepted net.Conn) {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	if dialed, err = nonblock.NewConn(c.(*net.TCPConn)); err != nil {
		t.Fatal(err)
	}
	if accepted, err = (nonblock.Listener{Listener: l}).Accept(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { dialed.Close(); accepted.Close() })
	return dialed, accepted
}

func TestConnIsNetConn(t *testing.T) {
	nettest.TestConn(t, func() (net.Conn, net.Conn, func(), error) {
		a, b := pair(t)
		return a, b, func() { a.Close(); b.Close() }, nil
	})
}

// TestTransferIsIntact sends more than the kernel's buffers hold, so that both ends wait in between.
func TestTransferIsIntact(t *testing.T) {
	a, b := pair(t)
	const size = 64 << 20
	sent := make(chan [32]byte, 1)
	go func() {
		h := sha256.New()
		src := io.TeeReader(io.LimitReader(rand.NewChaCha8([32]byte{1}), size), h)
		_, err := io.CopyBuffer(struct{ io.Writer }{a}, struct{ io.Reader }{src}, make([]byte, 1<<20))
		if err != nil {
			t.Error(err)
		}
		a.(interface{ CloseWrite() error }).CloseWrite()
		sent <- [32]byte(h.Sum(nil))
	}()
	h := sha256.New()
	n, err := io.CopyBuffer(struct{ io.Writer }{h}, struct{ io.Reader }{b}, make([]byte, 100<<10))
	if n != size || err != nil {
		t.Fatalf("%d bytes, %v", n, err)
	}
	if want := <-sent; !bytes.Equal(h.Sum(nil), want[:]) {
		t.Error("bytes were changed on the way")
	}
}

func TestErrorsAreThoseOfPackageNet(t *testing.T) {
	a, b := pair(t)
	a.(*nonblock.Conn).SetLinger(0)
	a.Close()
	if _, err := b.Read(make([]byte, 1)); !errors.Is(err, syscall.ECONNRESET) {
		t.Errorf("reading after a reset gives %v", err)
	}
	if _, err := b.Write([]byte("x")); !errors.Is(err, syscall.EPIPE) {
		t.Errorf("writing after a reset gives %v", err)
	}
	if _, err := a.Read(make([]byte, 1)); !errors.Is(err, net.ErrClosed) {
		t.Errorf("reading after Close gives %v", err)
	}
	if _, err := a.Write([]byte("x")); !errors.Is(err, net.ErrClosed) {
		t.Errorf("writing after Close gives %v", err)
	}
	c, _ := pair(t)
	c.SetDeadline(time.Now().Add(time.Millisecond))
	var timeout net.Error
	if _, err := c.Read(make([]byte, 1)); !errors.Is(err, os.ErrDeadlineExceeded) || !errors.As(err, &timeout) || !timeout.Timeout() {
		t.Errorf("reading beyond the deadline gives %v", err)
	}
	if n, err := c.Read(nil); n != 0 || err != nil {
		t.Errorf("reading nothing gives %d, %v", n, err)
	}
}

func TestListenerTakesTCPOnly(t *testing.T) {
	l, err := net.Listen("unix", t.TempDir()+"/socket")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	c, err := net.Dial("unix", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer c.Close()
	_, err = (nonblock.Listener{Listener: l}).Accept()
	if err == nil || err.Error() != "accepted a connection of type *net.UnixConn, not TCP" {
		t.Errorf("got %v", err)
	}
}

// BenchmarkRoundTrip is one byte there and back, each end in a goroutine that waits for the other.
func BenchmarkRoundTrip(b *testing.B) {
	x, y := pair(b)
	go func() {
		buf := make([]byte, 1)
		for {
			if _, err := y.Read(buf); err != nil {
				return
			}
			y.Write(buf)
		}
	}()
	b.ReportAllocs()
	buf := make([]byte, 1)
	for b.Loop() {
		if _, err := x.Write(buf); err != nil {
			b.Fatal(err)
		}
		if _, err := x.Read(buf); err != nil {
			b.Fatal(err)
		}
	}
	x.Close()
}
