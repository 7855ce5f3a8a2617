package filesync

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// hostile runs a source with files a, b and c against a target that runs peer after the hellos, on one connection.
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
	}, func(s *Source) { s.namesMost = fewNames })
	t.Cleanup(func() { <-ended })
	return s
}

// fewNames is maxNames for tests.
const fewNames = 1 << 20

// flush sends the frames that send left in the buffer.
func (w *wire) flush() error {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.out.Flush()
}

// until reads frames up to one of a kind.
func (w *wire) until(want kind) error {
	for {
		if k, _, err := w.receive(); err != nil || k == want {
			return err
		}
	}
}

// entryBytes returns the payload of an entry frame.
func entryBytes(t testing.TB, name string, e entry) []byte {
	t.Helper()
	b, err := json.Marshal(wireEntry{[]byte(name), e.kind, e.perm, e.size, e.mtime, []byte(e.link)})
	must(t, err)
	return b
}

// TestTargetCannotExhaustMemory checks that a target cannot make the laptop use more memory than its own paths need.
func TestTargetCannotExhaustMemory(t *testing.T) {
	long := entryBytes(t, strings.Repeat("x", maxPath), entry{kind: dir})
	say := func(w *wire, k kind, payload []byte) error { return errors.Join(w.send(k, payload), w.flush()) }
	tests := []struct {
		name string
		peer func(w *wire) error
		want string
	}{
		{"entries without an end", func(w *wire) error {
			var err error
			for n := 0; n < 2*fewNames && err == nil; n += maxPath {
				err = w.send(kindEntry, long)
			}
			return err
		}, "too many entries"},
		{"an entry after the end", func(w *wire) error {
			return errors.Join(w.send(kindEnd, nil), say(w, kindEntry, long), w.until(kindEnd))
		}, "a frame of kind 2 within a round"},
		{"a path outside", func(w *wire) error {
			return say(w, kindEntry, entryBytes(t, "../x", entry{kind: file}))
		}, `the path "../x"`},
		{"failed instead of an entry", func(w *wire) error { return say(w, kindFailed, nil) }, "a frame of kind 8 instead of an entry"},
		{"done without a round", func(w *wire) error {
			err := errors.Join(say(w, kindEnd, nil), w.until(kindEnd), say(w, kindDone, []byte("{}")))
			return errors.Join(err, say(w, kindDone, []byte("{}")), w.until(kindEnd))
		}, "a frame of kind 9 outside of a round"},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			s := hostile(t, tt.peer)
			testenv.Until(t, "the connection is given up", func() bool { return s.Status().Err != nil })
			if got, want := s.Status().Err.Error(), "file sync protocol violated: "+tt.want; got != want {
				t.Errorf("%s, want %s", got, want)
			}
		})
	}
}

// TestFailuresAreLimited checks that at most a hundred failed paths are kept, with shortened reasons.
func TestFailuresAreLimited(t *testing.T) {
	failed := func(w *wire, name, reason string) error {
		return w.sendJSON(kindFailed, failedReport{[]byte(name), reason})
	}
	s := hostile(t, func(w *wire) error {
		err := errors.Join(w.send(kindEnd, nil), w.flush(), w.until(kindEnd))
		for n := 0; n < 2*maxFailures && err == nil; n++ {
			err = failed(w, fmt.Sprint("elsewhere", n), strings.Repeat("y", maxFrame/2))
		}
		return errors.Join(err, failed(w, "b", "no room"), w.send(kindDone, []byte("{}")), w.flush(), w.until(kindEnd))
	})
	testenv.Until(t, "acknowledged", func() bool { return !s.Status().LastAt.IsZero() })
	st := s.Status()
	if len(st.Last.Failed) != maxFailures || len(st.Last.Failed[0].Err.Error()) != maxPath || st.Last.Rejected != 2*maxFailures+1 {
		t.Errorf("%d of %d failures are listed, the first with %d bytes", len(st.Last.Failed), st.Last.Rejected, len(st.Last.Failed[0].Err.Error()))
	}
	if st.Files != 2 { // all but b
		t.Errorf("%d files at the target", st.Files)
	}
}

// TestRejectedFileIsRemoved checks that the version that a target kept, since it could not write the next one, is
// removed with the file.
func TestRejectedFileIsRemoved(t *testing.T) {
	dir := make(chan string, 1)
	removed := make(chan string, 1)
	s := hostile(t, func(w *wire) error {
		src := <-dir
		done := func() error { return errors.Join(w.send(kindDone, []byte("{}")), w.flush()) }
		err := errors.Join(w.send(kindEnd, nil), w.flush(), w.until(kindEnd), done())
		write(t, src, "b", "the second version")
		err = errors.Join(err, w.until(kindEnd), w.sendJSON(kindFailed, failedReport{[]byte("b"), "no room"}), done(),
			os.Remove(filepath.Join(src, "b")), w.until(kindRemove))
		removed <- string(w.in)
		return errors.Join(err, w.until(kindEnd), done(), w.until(kindEnd))
	})
	dir <- s.cfg.Dir
	select {
	case name := <-removed:
		if name != "b" {
			t.Errorf("removed %q", name)
		}
	case <-time.After(30 * time.Second):
		t.Fatalf("the source removes nothing; status %+v", s.Status())
	}
	testenv.Until(t, "a and c remain", func() bool { return s.Status().Files == 2 })
}
