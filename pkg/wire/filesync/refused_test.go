package filesync

import (
	"context"
	"errors"
	"io"
	"net"
	"path/filepath"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/testenv"
)

// runSource runs a source until the test ends.
func runSource(t *testing.T, dir string, dial func(context.Context) (net.Conn, error), adjust ...func(*Source)) *Source {
	t.Helper()
	s := NewSource(SourceConfig{Dir: dir, Dial: dial, Logger: discarding()})
	for _, f := range adjust {
		f(s)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan error, 1)
	go func() { ended <- s.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-ended; err != nil {
			t.Errorf("Run: %v", err)
		}
	})
	return s
}

// TestSourceGetsTheReasonOfATargetThatCannotStore checks the error that the laptop shows.
func TestSourceGetsTheReasonOfATargetThatCannotStore(t *testing.T) {
	parent, src := t.TempDir(), t.TempDir()
	write(t, parent, "file", "not a directory")
	write(t, src, "a", strings.Repeat("x", 1<<20)) // so that the source is sending when it is refused
	for _, network := range []string{"pipe", "tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			target := newTarget(filepath.Join(parent, "file", "below"))
			serve := make(chan net.Conn, 10)
			served := make(chan struct{})
			go func() {
				defer close(served)
				for conn := range serve {
					if err := target.Serve(t.Context(), conn); err == nil {
						t.Error("Serve: no error")
					}
				}
			}()
			t.Cleanup(func() {
				close(serve)
				<-served
			})
			s := runSource(t, src, func(context.Context) (net.Conn, error) {
				a, b := pair(t, network)
				serve <- b
				return a, nil
			})
			testenv.Until(t, "refused", func() bool {
				err := s.Status().Err
				return err != nil && strings.HasPrefix(err.Error(), "at the other end: mkdir ") && strings.HasSuffix(err.Error(), ": not a directory")
			})
			for range 3 { // the reason must survive the next attempts
				if err := s.Status().Err; err == nil || !strings.HasPrefix(err.Error(), "at the other end: mkdir ") {
					t.Errorf("status: %v", err)
				}
			}
		})
	}
}

// TestSourceReportsConnectionThatFailsOnRead uses a connection that fails when it is read, as pods/exec does.
func TestSourceReportsConnectionThatFailsOnRead(t *testing.T) {
	s := runSource(t, t.TempDir(), func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		b.Close()
		return forbidden{a}, nil
	})
	testenv.Until(t, "refused", func() bool { return s.Status().Err != nil })
	if err := s.Status().Err; !errors.Is(err, errForbidden) {
		t.Errorf("status: %v", err)
	}
}

var errForbidden = errors.New("forbidden")

// forbidden is a connection whose other end is closed.
type forbidden struct{ net.Conn }

func (forbidden) Read([]byte) (int, error) { return 0, errForbidden }

// pair returns both ends of a connection.
func pair(t *testing.T, network string) (a, b net.Conn) {
	if network == "pipe" {
		return net.Pipe()
	}
	address := "127.0.0.1:0"
	if network == "unix" {
		address = filepath.Join(t.TempDir(), "s")
	}
	l, err := net.Listen(network, address)
	if err != nil {
		t.Error(err)
		return net.Pipe()
	}
	defer l.Close()
	a, err = net.Dial(network, l.Addr().String())
	if err != nil {
		t.Error(err)
		return net.Pipe()
	}
	b, err = l.Accept()
	if err != nil {
		t.Error(err)
		a.Close()
		return net.Pipe()
	}
	return a, b
}

// TestTargetTellsTheSourceItsProtocolError checks that the source is told about its protocol errors.
func TestTargetTellsTheSourceItsProtocolError(t *testing.T) {
	a, b := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- newTarget(t.TempDir()).Serve(t.Context(), b) }()
	w := newWire(a)
	must(t, w.sendHello(hello{}))
	if _, err := w.receiveHello(); err != nil {
		t.Fatal(err)
	}
	must(t, w.until(kindEnd))
	must(t, errors.Join(w.send(kind(99), nil), w.flush()))
	k, text, err := w.receive()
	if err != nil || k != kindRefused || string(text) != "file sync protocol violated: a frame of kind 99" {
		t.Errorf("%d %q, %v", k, text, err)
	}
	a.Close()
	if err := <-served; err == nil || err.Error() != "file sync protocol violated: a frame of kind 99" {
		t.Errorf("Serve: %v", err)
	}
}

// TestSourceGivesUpSilentEnd checks that a source gives up an other end that does not read or does not answer.
func TestSourceGivesUpSilentEnd(t *testing.T) {
	for _, reads := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			a, b := net.Pipe()
			defer b.Close()
			if reads {
				go func() { _, _ = io.Copy(io.Discard, b) }() // until the source closes its end
			}
			s := NewSource(SourceConfig{Dir: "x", Logger: discarding(), Dial: func(context.Context) (net.Conn, error) { return nil, errCut }})
			began := time.Now()
			if err := s.greet(newWire(noDeadlines{a})); err == nil || err.Error() != "the other end of the file sync has not answered within 20s" {
				t.Errorf("reads %v: %v", reads, err)
			}
			if took := time.Since(began); took != helloTimeout {
				t.Errorf("reads %v: after %v", reads, took)
			}
		})
	}
}

// noDeadlines is a connection that is still being established: it accepts deadlines and ignores them.
type noDeadlines struct{ net.Conn }

func (noDeadlines) SetDeadline(time.Time) error      { return nil }
func (noDeadlines) SetReadDeadline(time.Time) error  { return nil }
func (noDeadlines) SetWriteDeadline(time.Time) error { return nil }
