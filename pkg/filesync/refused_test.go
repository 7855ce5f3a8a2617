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
func runSource(t *testing.T, dir string, dial func(context.Context) (net.Conn, error)) *Source {
	t.Helper()
	s, err := NewSource(SourceConfig{Dir: dir, Dial: dial, Logger: discarding()})
	if err != nil {
		t.Fatal(err)
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

// Why a target has no place for files is told to the laptop, where somebody can do something about it.
func TestRefusedReason(t *testing.T) {
	parent, src := t.TempDir(), t.TempDir()
	write(t, parent, "file", "not a directory")
	write(t, src, "a", strings.Repeat("x", 1<<20)) // so that the source is sending when it is refused
	for _, network := range []string{"pipe", "tcp", "unix"} {
		t.Run(network, func(t *testing.T) {
			target := newTarget(t, filepath.Join(parent, "file", "below"))
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
			for range 3 { // it stays what is said, whatever the next attempts meet
				if err := s.Status().Err; err == nil || !strings.HasPrefix(err.Error(), "at the other end: mkdir ") {
					t.Errorf("status: %v", err)
				}
			}
		})
	}
}

// A connection that could not be made, as one by pods/exec, says why when it is read from.
func TestRefusedConnection(t *testing.T) {
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

// forbidden is the end of a connection whose other one is closed.
type forbidden struct{ net.Conn }

func (forbidden) Read([]byte) (int, error) { return 0, errForbidden }

// pair is both ends of a connection.
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

// What the source must not send is told to it, too.
func TestRefusedProtocol(t *testing.T) {
	a, b := net.Pipe()
	served := make(chan error, 1)
	go func() { served <- newTarget(t, t.TempDir()).Serve(t.Context(), b) }()
	w := newWire(a)
	must(t, w.sendHello(hello{}))
	if _, err := w.receiveHello(); err != nil {
		t.Fatal(err)
	}
	must(t, w.send(kind(99), nil))
	k, text, err := w.receive()
	if err != nil || k != kindRefused || string(text) != "not the file sync's protocol: a frame of kind 99" {
		t.Errorf("%d %q, %v", k, text, err)
	}
	a.Close()
	if err := <-served; err == nil || err.Error() != "not the file sync's protocol: a frame of kind 99" {
		t.Errorf("Serve: %v", err)
	}
}

// An other end that takes nothing, or says nothing, is given up.
func TestHandshakeDeadline(t *testing.T) {
	for _, reads := range []bool{false, true} {
		synctest.Test(t, func(t *testing.T) {
			a, b := net.Pipe()
			defer b.Close()
			if reads {
				go func() { _, _ = io.Copy(io.Discard, b) }() // until the end that is looked at
			}
			s, err := NewSource(SourceConfig{Dir: "x", Logger: discarding(), Dial: func(context.Context) (net.Conn, error) { return nil, errCut }})
			must(t, err)
			began := time.Now()
			if err := s.greet(newWire(noDeadlines{a})); err == nil || err.Error() != "the other end of the file sync has not answered within 20s" {
				t.Errorf("reads %v: %v", reads, err)
			}
			if took := time.Since(began); took != handshake {
				t.Errorf("reads %v: after %v", reads, took)
			}
		})
	}
}

// noDeadlines is a connection that is being made: it takes deadlines, and keeps none.
type noDeadlines struct{ net.Conn }

func (noDeadlines) SetDeadline(time.Time) error      { return nil }
func (noDeadlines) SetReadDeadline(time.Time) error  { return nil }
func (noDeadlines) SetWriteDeadline(time.Time) error { return nil }
