package netstack

import (
	"bytes"
	"context"
	"io"
	"net/netip"
	"syscall"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// finThenReset is a Stream whose far end sends data and FIN, and RST when gone is closed.
type finThenReset struct {
	io.Reader
	gone chan struct{}
}

func (s *finThenReset) Gone() <-chan struct{} { return s.gone }

func (s *finThenReset) Write(p []byte) (int, error) {
	select {
	case <-s.gone:
		return 0, syscall.ECONNRESET
	default:
		return len(p), nil
	}
}

func (s *finThenReset) CloseWrite() error { return nil }
func (s *finThenReset) Reset() error      { return nil }
func (s *finThenReset) Close() error      { return nil }

// The application holds its half open and writes nothing.
func TestResetAfterTheServersFINReachesTheApplication(t *testing.T) {
	stream := &finThenReset{bytes.NewReader([]byte("bye")), make(chan struct{})}
	k := newKernel(t, Config{Dialer: dialer{tcp: func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) { return stream, nil }}})
	c := k.mustConnect("tcp4", 80)
	if b, err := io.ReadAll(c); err != nil || string(b) != "bye" {
		t.Fatalf("read %q, %v", b, err)
	}
	if wasReset(c) {
		t.Fatal("the connection was reset by a FIN")
	}
	close(stream.gone)
	testenv.Until(t, "the application's connection is reset", func() bool { return wasReset(c) })
	testenv.Until(t, "the flow ends", func() bool { return k.stack.Stats().TCP.Open == 0 })
}

// An RST that follows the server's FIN does not overtake the data before the FIN.
func TestResetAfterTheServersFINLosesNoData(t *testing.T) {
	const size = 900_000 // fits into the buffers on the way, but not into the application's kernel alone
	gone := make(chan struct{})
	close(gone)
	k := newKernel(t, Config{Dialer: dialer{tcp: func(context.Context, netip.AddrPort, netip.AddrPort) (Stream, error) {
		return &finThenReset{bytes.NewReader(make([]byte, size)), gone}, nil
	}}})
	c := k.mustConnect("tcp4", 80)
	testenv.Until(t, "the data is on its way", func() bool { return k.stack.Stats().TCP.BytesIn == size })
	time.Sleep(200 * time.Millisecond) // time for the reset to overtake the data
	if n, _ := io.Copy(io.Discard, c); n != size {
		t.Errorf("%d of %d bytes arrived", n, size)
	}
	testenv.Until(t, "the flow ends", func() bool { return k.stack.Stats().TCP.Open == 0 })
}
