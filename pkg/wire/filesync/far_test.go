package filesync

import (
	"context"
	"encoding/binary"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fxamacker/cbor/v2"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/remotefs"
)

// answering runs a source with files a, b and c against a server that answers as the test says; nil: not at all.
func answering(t *testing.T, answer func(r remotefs.Request) *remotefs.Answer) *Source {
	t.Helper()
	dir := t.TempDir()
	for _, name := range []string{"a", "b", "c"} {
		write(t, dir, name, name)
	}
	var serving sync.WaitGroup
	s := runSource(t, dir, func(context.Context) (net.Conn, string, error) {
		a, b := net.Pipe()
		serving.Go(func() {
			defer b.Close()
			for {
				var head [4]byte
				if _, err := io.ReadFull(b, head[:]); err != nil {
					return
				}
				body := make([]byte, binary.BigEndian.Uint32(head[:]))
				_, err := io.ReadFull(b, body)
				var r remotefs.Request
				if err := errors.Join(err, cbor.Unmarshal(body, &r)); err != nil {
					return
				}
				if a := answer(r); a != nil {
					a.ID = r.ID
					body, _ := cbor.Marshal(a)
					_, _ = b.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(body))), body...))
				}
			}
		})
		return a, ".", nil
	})
	t.Cleanup(serving.Wait)
	return s
}

// runSource runs a source until the test ends.
func runSource(t *testing.T, dir string, dial func(context.Context) (net.Conn, string, error)) *Source {
	t.Helper()
	s := NewSource(SourceConfig{Dir: dir, Dial: dial, Logger: discarding()})
	ctx, cancel := context.WithCancel(t.Context())
	var running sync.WaitGroup
	running.Go(func() { s.Run(ctx) })
	t.Cleanup(func() {
		cancel()
		running.Wait()
	})
	return s
}

// is answers as if there were a file.
func is(r remotefs.Request) *remotefs.Answer {
	return &remotefs.Answer{Attr: &remotefs.Attr{Mode: syscall.S_IFREG | 0o644, Links: 1, Size: uint64(len(r.Data))}}
}

// TestFailuresAreLimited checks that each path that is not written is counted, and at most a hundred are named.
func TestFailuresAreLimited(t *testing.T) {
	s := answering(t, func(r remotefs.Request) *remotefs.Answer {
		if r.Op == remotefs.OpPut {
			return &remotefs.Answer{Errno: 28}
		}
		return &remotefs.Answer{}
	})
	for n := range 2 * maxFailures {
		write(t, s.cfg.Dir, strings.Repeat("x", 1+n), "")
	}
	testenv.Until(t, "all are tried", func() bool { return len(s.Status().Last.Failed) == maxFailures })
	st := s.Status()
	if st.Last.Rejected <= maxFailures || st.Last.Failed[0].Err.Error() != "no space left on device" || st.Files != 0 {
		t.Errorf("%d rejected, %v; %d files in the container", st.Last.Rejected, st.Last.Failed[0], st.Files)
	}
}

// TestRejectedFileIsRemoved checks that the version that a container kept, since it could not write the next one, is
// removed with the file, and that a file that cannot be removed is named once.
func TestRejectedFileIsRemoved(t *testing.T) {
	removed := make(chan string, 10)
	s := answering(t, func(r remotefs.Request) *remotefs.Answer {
		switch {
		case string(r.Data) == "the second version":
			return &remotefs.Answer{Errno: 13}
		case r.Op == remotefs.OpRemove:
			removed <- r.Path
			if r.Path == "c" {
				return &remotefs.Answer{Errno: 13}
			}
		}
		return is(r)
	})
	testenv.Until(t, "all files", func() bool { return s.Status().Files == 3 })
	write(t, s.cfg.Dir, "b", "the second version")
	testenv.Until(t, "the failure", func() bool { return s.Status().Last.Rejected == 1 })
	must(t, os.Remove(filepath.Join(s.cfg.Dir, "b")))
	if name := <-removed; name != "b" {
		t.Errorf("removed %q", name)
	}
	testenv.Until(t, "a and c remain", func() bool { return s.Status().Files == 2 })
	must(t, os.Remove(filepath.Join(s.cfg.Dir, "c")))
	<-removed
	testenv.Until(t, "the failure", func() bool { return s.Status().Last.Rejected == 1 && len(removed) == 0 })
	write(t, s.cfg.Dir, "a", "saved later")
	testenv.Until(t, "the save", func() bool { return s.Status().Last.Files == 1 })
	if st := s.Status(); len(removed) > 0 || st.Files != 2 || !st.Synced {
		t.Errorf("removed again: %d; %+v", len(removed), st)
	}
}

// TestSourceReportsWhyTheConnectionEnds checks the error that the laptop shows.
func TestSourceReportsWhyTheConnectionEnds(t *testing.T) {
	for name, test := range map[string]struct {
		dial func(context.Context) (net.Conn, string, error)
		want string
	}{
		"dial": {func(context.Context) (net.Conn, string, error) { return nil, "", errForbidden },
			"forbidden"},
		"on read": {func(context.Context) (net.Conn, string, error) { // as pods/exec does
			a, b := net.Pipe()
			b.Close()
			return forbidden{a}, ".", nil
		}, "the remote files have gone: forbidden"},
		"a file in the place of the directory": {func(context.Context) (net.Conn, string, error) {
			a, b := net.Pipe()
			server, _, err := remotefs.Open(t.TempDir(), true)
			must(t, err)
			go func() { _ = server.Serve(t.Context(), b) }() // until the source closes its end
			return a, "new", nil
		}, "cannot create the directory new at the other end: read-only file system"},
	} {
		t.Run(name, func(t *testing.T) {
			s := runSource(t, t.TempDir(), test.dial)
			testenv.Until(t, "refused", func() bool { return s.Status().Err != nil })
			for range 3 { // the reason must survive the next attempts
				if err := s.Status().Err; err == nil || err.Error() != test.want {
					t.Errorf("status: %v", err)
				}
			}
		})
	}
}

var errForbidden = errors.New("forbidden")

// forbidden is a connection whose other end is closed.
type forbidden struct{ net.Conn }

func (forbidden) Read([]byte) (int, error) { return 0, errForbidden }

// TestSourceGivesUpSilentEnd checks that a source gives up an other end that does not answer, at once or later.
func TestSourceGivesUpSilentEnd(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSource(SourceConfig{Dir: "x", Logger: discarding(), Dial: func(ctx context.Context) (net.Conn, string, error) {
			<-ctx.Done()
			return nil, "", ctx.Err()
		}})
		began := time.Now()
		if _, _, err := s.dial(t.Context()); err == nil || err.Error() != "the other end of the file sync has not answered within 20s" {
			t.Error(err)
		}
		if took := time.Since(began); took != dialTimeout {
			t.Errorf("after %v", took)
		}
	})
	synctest.Test(t, func(t *testing.T) {
		ctx, end := context.WithCancelCause(t.Context())
		near, far := net.Pipe()
		client := remotefs.NewClient()
		se := newSender(NewSource(SourceConfig{Logger: discarding()}), client, ".", end)
		server, _, err := remotefs.Open(t.TempDir(), false)
		must(t, err)
		asks, answers := net.Pipe()
		mute := make(chan struct{})
		var work sync.WaitGroup
		work.Go(func() { _ = server.Serve(ctx, answers) })
		work.Go(func() { _ = client.Serve(ctx, near) })
		work.Go(func() { se.keepAlive(ctx) })
		work.Go(func() { _, _ = io.Copy(asks, far) })
		work.Go(func() {
			defer far.Close()
			for buf := make([]byte, 4096); ; {
				n, err := asks.Read(buf)
				if err != nil {
					return
				}
				select {
				case <-mute:
				default:
					_, _ = far.Write(buf[:n])
				}
			}
		})
		select {
		case <-ctx.Done():
			t.Fatal(context.Cause(ctx))
		case <-time.After(10 * silence):
		}
		close(mute)
		<-ctx.Done()
		if err := context.Cause(ctx); err != errSilent {
			t.Error(err)
		}
		asks.Close()
		work.Wait()
	})
}
