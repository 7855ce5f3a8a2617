package filesync

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func newTarget(dir string) *Target { return NewTarget(TargetConfig{Dir: dir, Logger: discarding()}) }

func TestServeEndsWithContextOrConn(t *testing.T) {
	target := newTarget(t.TempDir())
	serve := func(ctx context.Context) (*wire, chan error) {
		a, b := net.Pipe()
		ended := make(chan error, 1)
		go func() { ended <- target.Serve(ctx, b) }()
		w := newWire(a)
		if err := w.sendHello(hello{}); err != nil {
			t.Fatal(err)
		}
		if _, err := w.receiveHello(); err != nil {
			t.Fatal(err)
		}
		must(t, w.until(kindEnd))
		return w, ended
	}
	_, first := serve(t.Context())
	w, second := serve(t.Context())
	if err := <-first; !errors.Is(err, ErrReplaced) {
		t.Errorf("the first ended with %v", err)
	}
	w.conn.Close()
	if err := <-second; err != nil {
		t.Errorf("the second ended with %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	_, third := serve(ctx)
	cancel()
	if err := <-third; !errors.Is(err, context.Canceled) {
		t.Errorf("the third ended with %v", err)
	}
	w, fourth := serve(t.Context())
	if err := errors.Join(w.send(kindEntry, entryBytes(t, "x", entry{kind: file})), w.flush()); err != nil {
		t.Fatal(err)
	}
	w.conn.Close()
	if err := <-fourth; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the fourth ended with %v", err)
	}
}

func TestVersionsMustMatch(t *testing.T) {
	other := []byte(`{"protocol":"kubevpn-filesync","version":99}`)

	a, b := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- newTarget(t.TempDir()).Serve(t.Context(), b) }()
	w := newWire(a)
	if err := errors.Join(w.send(kindHello, other), w.flush()); err != nil {
		t.Fatal(err)
	}
	k, payload, err := w.receive()
	var h hello
	if err != nil || k != kindHello || json.Unmarshal(payload, &h) != nil || h.Version != version {
		t.Errorf("the target answers %d %s, %v", k, payload, err)
	}
	if err := <-ended; !errors.Is(err, ErrVersion) {
		t.Errorf("Serve: %v", err)
	}
	a.Close()

	var peer sync.WaitGroup
	source := NewSource(SourceConfig{Dir: t.TempDir(), Logger: discarding(), Dial: func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		peer.Go(func() {
			defer b.Close()
			w := newWire(b)
			if _, err := w.receiveHello(); err == nil {
				_ = errors.Join(w.send(kindHello, other), w.flush())
			}
		})
		return a, nil
	}})
	if err := source.Run(t.Context()); !errors.Is(err, ErrVersion) || err.Error() != "the two ends of the file sync have different versions: 2 here, 99 there" {
		t.Errorf("Run: %v", err)
	}
	peer.Wait()
}

// TestSilentConnectionTimesOut checks that an end gives up a connection on which nothing arrives, and that
// keep-alives prevent that.
func TestSilentConnectionTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		defer a.Close()
		defer b.Close()
		mute, other := newWire(a), newWire(b)
		other.writeTimeout = silence
		done := make(chan struct{})
		var alive sync.WaitGroup
		alive.Go(func() { mute.keepAlive(done) })
		received := make(chan error, 1)
		go func() {
			_, _, err := other.receive()
			received <- err
		}()
		select {
		case err := <-received:
			t.Fatal(err)
		case <-time.After(10 * silence):
		}
		close(done)
		alive.Wait()
		if err := <-received; !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Error(err)
		}
		if err := errors.Join(other.send(kindEnd, nil), other.flush()); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("sending to an end that does not read: %v", err)
		}
	})
}

// script is a connection whose input is fixed.
type script struct {
	io.Reader
	net.Conn
	said *bytes.Buffer // what the target sends; nil: discarded
}

func (s script) Read(b []byte) (int, error) { return s.Reader.Read(b) }
func (s script) Write(b []byte) (int, error) {
	if s.said != nil {
		s.said.Write(b)
	}
	return len(b), nil
}
func (s script) Close() error                     { return nil }
func (s script) SetReadDeadline(time.Time) error  { return nil }
func (s script) SetWriteDeadline(time.Time) error { return nil }
func frameBytes(k kind, payload []byte) []byte {
	return append([]byte{byte(k), 0, 0, byte(len(payload) >> 8), byte(len(payload))}, payload...)
}
func frameOf(t testing.TB, k kind, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return frameBytes(k, b)
}

func helloFrame(t testing.TB) []byte {
	return frameOf(t, kindHello, hello{Protocol: helloProtocol, Version: version, Name: "x"})
}

// entryFrame returns a frame with an entry.
func entryFrame(t testing.TB, name string, e entry) []byte {
	return frameBytes(kindEntry, entryBytes(t, name, e))
}

// fileFrames returns the frames of a file.
func fileFrames(t testing.TB, name, content string) []byte {
	all := append(entryFrame(t, name, entry{kind: file, perm: 0o644, size: int64(len(content))}), frameBytes(kindData, []byte(content))...)
	return append(all, frameBytes(kindPut, nil)...)
}

// TestTargetRejectsInvalidFrames checks that invalid frames end the connection and leave nothing.
func TestTargetRejectsInvalidFrames(t *testing.T) {
	directory := func(p string) []byte { return entryFrame(t, p, entry{kind: dir}) }
	start := entryFrame(t, "x", entry{kind: file, size: 5000})
	tests := []struct {
		name  string
		input []byte
	}{
		{"kind", frameBytes(99, nil)},
		{"second-hello", helloFrame(t)},
		{"too-long", []byte{byte(kindEntry), 0, 1, 0, 1}},
		{"far-too-long", []byte{byte(kindEntry), 255, 255, 255, 255}},
		{"path-parent", directory("../x")},
		{"path-parent-within", directory("a/../../x")},
		{"path-absolute", directory("/etc/passwd")},
		{"path-empty", directory("")},
		{"path-dot", directory(".")},
		{"path-unclean", directory("a//b")},
		{"path-zero", directory("a\x00b")},
		{"path-long", directory(strings.Repeat("a", maxPath+1))},
		{"file-parent", fileFrames(t, "../x", "abc")},
		{"file-absolute", fileFrames(t, "/x", "abc")},
		{"entry-rubbish", frameBytes(kindEntry, []byte("rubbish!"))},
		{"entry-kind", entryFrame(t, "x", entry{kind: "device"})},
		{"entry-other", entryFrame(t, "x", entry{kind: other})},
		{"entry-mode", entryFrame(t, "a", entry{kind: file, perm: 0o4755})},
		{"entry-size", entryFrame(t, "a", entry{kind: file, size: -1})},
		{"remove-parent", frameBytes(kindRemove, []byte("../x"))},
		{"end-empty", frameBytes(kindEnd, nil)},
		{"data-without-file", frameBytes(kindData, []byte("x"))},
		{"put-without-file", frameBytes(kindPut, nil)},
		{"file-cut-off", append(start, frameBytes(kindData, make([]byte, 2000))...)},
		{"end-within-file", append(start, frameBytes(kindEnd, []byte{0})...)},
		{"entry-within-file", append(start, start...)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			parent := t.TempDir()
			dst := filepath.Join(parent, "dst")
			err := newTarget(dst).Serve(t.Context(), script{Reader: bytes.NewReader(append(helloFrame(t), tt.input...))})
			if !errors.Is(err, errProtocol) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("Serve: %v", err)
			}
			for p := range snapshot(t, parent) {
				if p != "dst" {
					t.Errorf("there is %s", p)
				}
			}
		})
	}
}

// TestTargetFollowsNoLinkOut checks that links that the source sends do not lead the target out of its directory.
func TestTargetFollowsNoLinkOut(t *testing.T) {
	parent := t.TempDir()
	write(t, parent, "outside/file", "outside")
	must(t, os.Chmod(filepath.Join(parent, "outside/file"), 0o600))
	dst := filepath.Join(parent, "dst")
	input := helloFrame(t)
	for _, to := range []string{"../outside", filepath.Join(parent, "outside")} {
		input = slices.Concat(input,
			entryFrame(t, "link", entry{kind: symlink, link: to}),
			entryFrame(t, "file", entry{kind: symlink, link: to + "/file"}),
			fileFrames(t, "link/file", "abc"),
			entryFrame(t, "link/new", entry{kind: dir}),
			entryFrame(t, "link/l", entry{kind: symlink, link: "x"}),
			frameBytes(kindRemove, []byte("link/file")),
			frameBytes(kindEnd, []byte{0}))
	}
	var told Batch
	said := &bytes.Buffer{}
	target := NewTarget(TargetConfig{Dir: dst, Logger: discarding(), OnSync: func(b Batch) { told = b }})
	must(t, target.Serve(t.Context(), script{Reader: bytes.NewReader(input), said: said}))
	if told.Files != 2 {
		t.Errorf("%+v", told)
	}
	failed := 0
	for w := newWire(script{Reader: said}); ; {
		k, _, err := w.receive()
		if err != nil {
			break
		}
		if k == kindFailed {
			failed++
		}
	}
	if failed != 6 {
		t.Errorf("%d paths failed, want 3 in each round", failed)
	}
	info, err := os.Stat(filepath.Join(parent, "outside/file"))
	if err != nil || info.Mode() != 0o600 || read(t, parent, "outside/file") != "outside" || len(snapshot(t, filepath.Join(parent, "outside"))) != 1 {
		t.Errorf("outside: %v", snapshot(t, parent))
	}
}

// recorded returns what a real source sends.
func recorded(t testing.TB) []byte {
	var said bytes.Buffer
	var mu sync.Mutex
	r := newRig(t, options{
		wrap: func(c net.Conn) net.Conn { return &recording{c, &mu, &said} },
		before: func(r *rig) {
			write(t, r.src, "a", "a")
			write(t, r.src, "d/b", strings.Repeat("b", 1000))
			write(t, r.dst, "d/b", strings.Repeat("c", 1000))
			must(t, os.Symlink("a", filepath.Join(r.src, "l")))
		}})
	must(t, os.Remove(filepath.Join(r.src, "a")))
	must(t, os.Chmod(filepath.Join(r.src, "d/b"), 0o600))
	for exists(r.dst, "a") {
		r.next()
	}
	r.stop()
	return said.Bytes()
}

type recording struct {
	net.Conn
	mu   *sync.Mutex
	said *bytes.Buffer
}

func (c *recording) Write(b []byte) (int, error) {
	c.mu.Lock()
	c.said.Write(b)
	c.mu.Unlock()
	return c.Conn.Write(b)
}

// FuzzTarget checks that the target ends for any input, and never writes outside of its directory.
func FuzzTarget(f *testing.F) {
	hi := helloFrame(f)
	f.Add(recorded(f)[len(frameOf(f, kindHello, hello{Protocol: helloProtocol, Version: version, Name: "001"})):])
	f.Add(frameBytes(kindRemove, []byte("a")))
	f.Add(append(entryFrame(f, "l", entry{kind: symlink, link: ".."}), fileFrames(f, "l/outside", "abc")...))
	f.Add(entryFrame(f, "image", entry{kind: file, perm: 0o777, size: 5, mtime: -1}))
	parent := f.TempDir()
	write(f, parent, "outside", "outside")
	dst := filepath.Join(parent, "dst")
	before := snapshot(f, parent)
	f.Fuzz(func(t *testing.T, input []byte) {
		must(t, os.RemoveAll(dst))
		write(t, dst, "image", "image")
		target := newTarget(dst)
		err := target.Serve(t.Context(), script{Reader: bytes.NewReader(append(bytes.Clone(hi), input...))})
		if err == nil && len(input) > 0 && len(input) < headerSize {
			t.Error("the target ended without an error within a frame")
		}
		for p := range snapshot(t, dst) {
			if strings.Contains(p, tempPrefix) && !bytes.Contains(input, []byte(tempPrefix)) {
				t.Errorf("%s was left", p)
			}
		}
		must(t, os.RemoveAll(dst))
		if after := snapshot(t, parent); len(after) != 1 || after["outside"] != before["outside"] {
			t.Errorf("outside there is %v, was %v", after, before)
		}
	})
}

// Ends one version apart use the one that both speak.
func TestNeighbouringVersionsAreAccepted(t *testing.T) {
	for name, test := range map[string]struct {
		newest, oldest int
		ok             bool
	}{
		"first":     {version, 0, true},
		"same":      {version, oldestVersion, true},
		"ahead":     {version + 1, version, true},
		"too new":   {version + 2, version + 1, false},
		"of before": {oldestVersion - 1, 0, false},
		"nonsense":  {oldestVersion - 1, version, false},
	} {
		payload, err := json.Marshal(hello{Protocol: helloProtocol, Version: test.newest, Oldest: test.oldest})
		if err != nil {
			t.Fatal(err)
		}
		if _, err := parseHello(kindHello, payload); (err == nil) != test.ok || err != nil && !errors.Is(err, ErrVersion) {
			t.Errorf("%s: %v", name, err)
		}
	}
}
