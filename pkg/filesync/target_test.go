package filesync

import (
	"archive/tar"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"
)

func newTarget(t testing.TB, dir string) *Target {
	t.Helper()
	target, err := NewTarget(TargetConfig{Dir: dir, Logger: discarding()})
	if err != nil {
		t.Fatal(err)
	}
	return target
}

func TestConfig(t *testing.T) {
	dial := func(context.Context) (net.Conn, error) { return nil, errCut }
	for _, cfg := range []SourceConfig{{Dial: dial, Logger: discarding()}, {Dir: "x", Logger: discarding()}, {Dir: "x", Dial: dial}} {
		if _, err := NewSource(cfg); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
	for _, cfg := range []TargetConfig{{Logger: discarding()}, {Dir: "x"}} {
		if _, err := NewTarget(cfg); err == nil {
			t.Errorf("%+v is taken", cfg)
		}
	}
}

func TestServeEnds(t *testing.T) {
	target := newTarget(t, t.TempDir())
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
	if err := w.send(kindData, make([]byte, 100)); err != nil {
		t.Fatal(err)
	}
	w.conn.Close()
	if err := <-fourth; !errors.Is(err, io.ErrUnexpectedEOF) {
		t.Errorf("the fourth ended with %v", err)
	}
}

func TestVersions(t *testing.T) {
	other := []byte(`{"protocol":"kubevpn-filesync","version":99}`)

	a, b := net.Pipe()
	ended := make(chan error, 1)
	go func() { ended <- newTarget(t, t.TempDir()).Serve(t.Context(), b) }()
	w := newWire(a)
	if err := w.send(kindHello, other); err != nil {
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
	source, err := NewSource(SourceConfig{Dir: t.TempDir(), Logger: discarding(), Dial: func(context.Context) (net.Conn, error) {
		a, b := net.Pipe()
		peer.Go(func() {
			defer b.Close()
			w := newWire(b)
			if _, err := w.receiveHello(); err == nil {
				w.send(kindHello, other)
			}
		})
		return a, nil
	}})
	if err != nil {
		t.Fatal(err)
	}
	if err := source.Run(t.Context()); !errors.Is(err, ErrVersion) || err.Error() != "the two ends of the file sync have different versions: 1 here, 99 there" {
		t.Errorf("Run: %v", err)
	}
	peer.Wait()
}

// An end from which nothing comes is given up, and one that has nothing to say is not.
func TestSilence(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		a, b := net.Pipe()
		defer a.Close()
		defer b.Close()
		mute, other := newWire(a), newWire(b)
		other.patience = silence
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
		if err := other.send(kindEnd, nil); !errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("sending to nobody: %v", err)
		}
	})
}

// script is a connection that a target is given: what it says is thrown away.
type script struct {
	io.Reader
	net.Conn
}

func (s script) Read(b []byte) (int, error)       { return s.Reader.Read(b) }
func (s script) Write(b []byte) (int, error)      { return len(b), nil }
func (s script) Close() error                     { return nil }
func (s script) SetReadDeadline(time.Time) error  { return nil }
func (s script) SetWriteDeadline(time.Time) error { return nil }
func frame(k kind, payload []byte) []byte {
	return append([]byte{byte(k), 0, 0, byte(len(payload) >> 8), byte(len(payload))}, payload...)
}
func frameOf(t testing.TB, k kind, v any) []byte {
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return frame(k, b)
}

func helloFrame(t testing.TB) []byte {
	return frameOf(t, kindHello, hello{Protocol: helloProtocol, Version: version, Name: "x"})
}

func archiveOf(t testing.TB, headers ...*tar.Header) []byte {
	t.Helper()
	var b bytes.Buffer
	w := tar.NewWriter(&b)
	for _, h := range headers {
		if err := w.WriteHeader(h); err != nil {
			t.Fatal(err)
		}
		if _, err := w.Write(make([]byte, h.Size)); err != nil {
			t.Fatal(err)
		}
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return b.Bytes()
}

// What a source must not say ends the connection, and leaves nothing.
func TestTargetRefuses(t *testing.T) {
	data := func(headers ...*tar.Header) []byte {
		return append(frame(kindData, archiveOf(t, headers...)), frame(kindData, nil)...)
	}
	list := func(p string) []byte { return frame(kindList, entry{kind: dir}.append(nil, p)) }
	tests := []struct {
		name  string
		input []byte
	}{
		{"kind", frame(99, nil)},
		{"second-hello", helloFrame(t)},
		{"too-long", []byte{byte(kindList), 0, 1, 0, 1}},
		{"far-too-long", []byte{byte(kindList), 255, 255, 255, 255}},
		{"path-parent", list("../x")},
		{"path-parent-within", list("a/../../x")},
		{"path-absolute", list("/etc/passwd")},
		{"path-empty", list("")},
		{"path-dot", list(".")},
		{"path-unclean", list("a//b")},
		{"path-zero", list("a\x00b")},
		{"path-long", list(strings.Repeat("a", maxPath+1))},
		{"entry-kind", frame(kindList, []byte{'x', 1, 'a'})},
		{"entry-cut-off", frame(kindList, entry{kind: file, size: 1 << 40}.append(nil, "a")[:5])},
		{"entry-mode", frame(kindList, entry{kind: file, perm: 0o4755}.append(nil, "a"))},
		{"remove-parent", frame(kindRemove, appendString(nil, "../x"))},
		{"end-empty", frame(kindEnd, nil)},
		{"tar-parent", data(&tar.Header{Name: "../x", Typeflag: tar.TypeReg, Size: 3})},
		{"tar-absolute", data(&tar.Header{Name: "/x", Typeflag: tar.TypeReg, Size: 3})},
		{"tar-hard-link", data(&tar.Header{Name: "x", Typeflag: tar.TypeLink, Linkname: "/etc/passwd"})},
		{"tar-device", data(&tar.Header{Name: "x", Typeflag: tar.TypeChar})},
		{"tar-sparse", bytes.ReplaceAll(data(&tar.Header{Name: "x", Typeflag: tar.TypeReg, Format: tar.FormatPAX, PAXRecords: map[string]string{
			"XXX.sparse.major": "0", "XXX.sparse.minor": "1", "XXX.sparse.numblocks": "1", "XXX.sparse.map": "0,0", "XXX.sparse.size": "1000000000000",
		}}), []byte("XXX."), []byte("GNU."))},
		{"tar-rubbish", append(frame(kindData, bytes.Repeat([]byte("rubbish!"), 512)), frame(kindData, nil)...)},
		{"tar-cut-off", frame(kindData, archiveOf(t, &tar.Header{Name: "x", Typeflag: tar.TypeReg, Size: 5000})[:2000])},
		{"frame-within-tar", append(frame(kindData, archiveOf(t, &tar.Header{Name: "x", Typeflag: tar.TypeReg, Size: 5000})[:2000]), frame(kindEnd, []byte{0})...)},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			parent := t.TempDir()
			dst := filepath.Join(parent, "dst")
			err := newTarget(t, dst).Serve(t.Context(), script{Reader: bytes.NewReader(append(helloFrame(t), tt.input...))})
			if !errors.Is(err, errProtocol) && !errors.Is(err, io.ErrUnexpectedEOF) {
				t.Errorf("Serve: %v", err)
			}
			for p := range snapshot(t, parent) {
				if p != "dst" && p != filepath.Join("dst", "x") || strings.Contains(p, tempPrefix) {
					t.Errorf("there is %s", p)
				}
			}
		})
	}
}

// A target that is made to follow links by what it is sent does not leave its directory.
func TestTargetFollowsNoLinkOut(t *testing.T) {
	parent := t.TempDir()
	write(t, parent, "outside/file", "outside")
	must(t, os.Chmod(filepath.Join(parent, "outside/file"), 0o600))
	dst := filepath.Join(parent, "dst")
	input := helloFrame(t)
	for _, to := range []string{"../outside", filepath.Join(parent, "outside")} {
		input = append(input, frame(kindData, archiveOf(t,
			&tar.Header{Name: "link", Typeflag: tar.TypeSymlink, Linkname: to},
			&tar.Header{Name: "file", Typeflag: tar.TypeSymlink, Linkname: to + "/file"},
			&tar.Header{Name: "link/file", Typeflag: tar.TypeReg, Size: 3},
			&tar.Header{Name: "link/new", Typeflag: tar.TypeDir},
			&tar.Header{Name: "link/l", Typeflag: tar.TypeSymlink, Linkname: "x"}))...)
		input = append(input, frame(kindData, nil)...)
		input = append(input, frame(kindTouch, entry{kind: file, perm: 0o777}.append(entry{kind: file, perm: 0o777}.append(nil, "file"), "link/file"))...)
		input = append(input, frame(kindRemove, appendString(nil, "link/file"))...)
		input = append(input, frame(kindEnd, []byte{0})...)
	}
	var told Batch
	target, err := NewTarget(TargetConfig{Dir: dst, Logger: discarding(), OnSync: func(b Batch) error { told = b; return nil }})
	must(t, err)
	must(t, target.Serve(t.Context(), script{Reader: bytes.NewReader(input)}))
	if len(told.Failed) != 6 || told.Files != 2 {
		t.Errorf("%+v", told)
	}
	info, err := os.Stat(filepath.Join(parent, "outside/file"))
	if err != nil || info.Mode() != 0o600 || read(t, parent, "outside/file") != "outside" || len(snapshot(t, filepath.Join(parent, "outside"))) != 1 {
		t.Errorf("outside: %v", snapshot(t, parent))
	}
}

// recorded is what a real source says.
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

// Whatever is sent, the target ends, and stays in its directory.
func FuzzTarget(f *testing.F) {
	hi := helloFrame(f)
	f.Add(recorded(f)[len(frameOf(f, kindHello, hello{Protocol: helloProtocol, Version: version, Name: "001"})):])
	f.Add(frame(kindRemove, appendString(nil, "a")))
	f.Add(append(frame(kindData, archiveOf(f, &tar.Header{Name: "l", Typeflag: tar.TypeSymlink, Linkname: ".."}, &tar.Header{Name: "l/outside", Typeflag: tar.TypeReg, Size: 3})), frame(kindData, nil)...))
	f.Add(frame(kindTouch, entry{kind: file, perm: 0o777, size: 5, mtime: -1}.append(nil, "image")))
	parent := f.TempDir()
	write(f, parent, "outside", "outside")
	dst := filepath.Join(parent, "dst")
	before := snapshot(f, parent)
	f.Fuzz(func(t *testing.T, input []byte) {
		must(t, os.RemoveAll(dst))
		write(t, dst, "image", "image")
		target := newTarget(t, dst)
		err := target.Serve(t.Context(), script{Reader: bytes.NewReader(append(bytes.Clone(hi), input...))})
		if err == nil && len(input) > 0 && len(input) < headerSize {
			t.Error("it ended well within a frame")
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

func FuzzRecords(f *testing.F) {
	for _, e := range []entry{{kind: file, perm: 0o644, size: 1 << 40, mtime: -5}, {kind: dir, perm: 0o755}, {kind: link, link: "../x"}} {
		f.Add(e.append(e.append(nil, "a/b"), "c"))
	}
	f.Add([]byte{'f', 255, 255, 255, 255, 255, 255, 255, 255, 255, 255, 1})
	f.Fuzz(func(t *testing.T, input []byte) {
		r := &records{rest: input}
		for r.more() {
			p, e := r.entry()
			if r.err != nil {
				return
			}
			again := &records{rest: e.append(nil, p)}
			if p2, e2 := again.entry(); again.err != nil || again.more() || p2 != p || e2 != e {
				t.Errorf("%q %+v becomes %q %+v, %v", p, e, p2, e2, again.err)
			}
		}
	})
}
