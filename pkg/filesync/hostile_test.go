package filesync

import (
	"context"
	"errors"
	"fmt"
	"net"
	"strings"
	"sync/atomic"
	"testing"

	"kubevpn/internal/testenv"
)

// hostile runs a source, with files a, b and c, against a target that does what peer says after the hellos. There is one connection.
func hostile(t *testing.T, peer func(w *wire) error) *Source {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		write(t, dir, name, name)
	}
	var again atomic.Bool
	ended := make(chan struct{})
	s := runSource(t, dir, func(ctx context.Context) (net.Conn, error) {
		if again.Swap(true) {
			<-ctx.Done()
			return nil, ctx.Err()
		}
		a, b := net.Pipe()
		go func() {
			defer close(ended)
			defer b.Close()
			w := newWire(b)
			_, err := w.receiveHello()
			t.Log("the target:", errors.Join(err, w.sendHello(hello{}), peer(w)))
		}()
		return a, nil
	})
	t.Cleanup(func() { <-ended })
	return s
}

// until takes frames up to one of a kind.
func (w *wire) until(want kind) error {
	for {
		if k, _, err := w.receive(); err != nil || k == want {
			return err
		}
	}
}

// What a target says costs the laptop no more memory than what it was asked about.
func TestTargetSaysTooMuch(t *testing.T) {
	long := appendString(nil, strings.Repeat("x", maxPath))
	tests := []struct {
		name string
		peer func(w *wire) error
		want string
	}{
		{"gone_before_the_question", func(w *wire) error {
			// The source waits for its list to be taken, and takes the second frame when it has seen what the first one is.
			return errors.Join(w.send(kindGone, long), w.send(kindAlive, nil), w.until(kindListed))
		}, "what is gone, which was not asked"},
		{"gone_after_the_answer", func(w *wire) error {
			return errors.Join(w.until(kindListed), w.send(kindListed, nil), w.send(kindGone, long), w.until(kindEnd))
		}, "what is gone, which was not asked"},
		{"gone_without_an_end", func(w *wire) error {
			err := w.until(kindListed)
			for n := 0; n < 2*maxGone && err == nil; n += maxPath {
				err = w.send(kindGone, long)
			}
			return err
		}, "too many paths"},
		{"failed_without_a_round", func(w *wire) error {
			return errors.Join(w.send(kindFailed, appendString(appendString(nil, "a"), "why")), w.until(kindListed))
		}, "what failed, and nothing was sent"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := hostile(t, tt.peer)
			testenv.Until(t, "turned away", func() bool { return s.Status().Err != nil })
			if got, want := s.Status().Err.Error(), "not the file sync's protocol: "+tt.want; got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
}

// Of what a target says that it could not write, the first hundred reasons are kept, and of those the beginning.
func TestFailedWithoutEnd(t *testing.T) {
	s := hostile(t, func(w *wire) error {
		err := errors.Join(w.until(kindListed), w.send(kindDiffers, []byte{0, differs, 1, differs, 2, differs}), w.send(kindListed, nil), w.until(kindEnd))
		for n := 0; n < 1000 && err == nil; n++ {
			err = w.send(kindFailed, appendString(appendString(nil, fmt.Sprint("elsewhere", n)), strings.Repeat("y", maxFrame-100)))
		}
		return errors.Join(err, w.send(kindFailed, appendString(appendString(nil, "b"), "no room")), w.send(kindDone, appendDone(nil, Batch{}, "")), w.until(kindEnd))
	})
	testenv.Until(t, "acknowledged", func() bool { return !s.Status().LastAt.IsZero() })
	st := s.Status()
	if len(st.Last.Failed) != maxFailures || len(st.Last.Failed[0].Err.Error()) != maxPath {
		t.Errorf("%d are named, the first with %d bytes", len(st.Last.Failed), len(st.Last.Failed[0].Err.Error()))
	}
	if st.Files != 2 { // but b
		t.Errorf("%d files are there", st.Files)
	}
}
