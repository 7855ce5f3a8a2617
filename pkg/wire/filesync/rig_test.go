package filesync

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/google/go-cmp/cmp"
	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/remotefs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// rig is a Source and a container connected by pipes.
type rig struct {
	t        testing.TB
	src, dst string
	source   *Source
	sent     chan Batch // of the source
	taken    chan told  // of the container

	mu      sync.Mutex
	conn    net.Conn // the source's end of the latest connection
	cut     bool     // dialing fails
	wrap    func(net.Conn) net.Conn
	serving sync.WaitGroup
	ctx     context.Context
	stop    func()
}

// told is what Server.Synced was told.
type told struct{ changes, all bool }

type options struct {
	src    string // instead of a new directory
	dst    string
	wrap   func(net.Conn) net.Conn
	before func(*rig)
	adjust func(*Source)
}

func logger(t testing.TB) *slog.Logger {
	return slog.New(slog.NewTextHandler(t.Output(), &slog.HandlerOptions{Level: slog.LevelDebug}))
}

// newRig starts both and waits for the first comparison.
func newRig(t testing.TB, o options) *rig {
	t.Helper()
	r := &rig{t: t, src: o.src, dst: o.dst, wrap: o.wrap, sent: make(chan Batch, 1000), taken: make(chan told, 1000)}
	if r.src == "" {
		r.src = t.TempDir()
	}
	if r.dst == "" {
		r.dst = t.TempDir()
	}
	if o.before != nil {
		o.before(r)
	}
	r.source = NewSource(SourceConfig{
		Dir: r.src, Dial: r.dial, OnSync: func(b Batch) { r.sent <- b }, Logger: logger(t),
	})
	if o.adjust != nil {
		o.adjust(r.source)
	}
	ctx, cancel := context.WithCancel(context.Background())
	r.ctx = ctx
	r.serving.Go(func() { r.source.Run(ctx) })
	r.stop = sync.OnceFunc(func() {
		cancel()
		r.serving.Wait()
	})
	t.Cleanup(r.stop)
	r.complete()
	return r
}

var errCut = errors.New("cut")

func (r *rig) dial(context.Context) (net.Conn, string, error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.cut {
		return nil, "", errCut
	}
	a, b := net.Pipe()
	if r.wrap != nil {
		a = r.wrap(a)
	}
	r.conn = a
	name := container(r.ctx, r.t, r.dst, b, &r.serving, func(c, all bool) { r.taken <- told{c, all} })
	return a, name, nil
}

// container serves a destination as the supervisor of a clone does.
func container(
	ctx context.Context, t testing.TB, dst string, conn net.Conn, serving *sync.WaitGroup, synced func(bool, bool),
) string {
	must(t, os.MkdirAll(filepath.Dir(dst), 0o755))
	server, name, err := remotefs.Open(dst, false)
	must(t, err)
	server.Synced = synced
	serving.Go(func() { t.Log("Serve:", server.Serve(ctx, conn)) })
	return name
}

// breakOff ends the connection; dialing fails until connect.
func (r *rig) breakOff() {
	r.mu.Lock()
	r.cut = true
	r.conn.Close()
	r.mu.Unlock()
	testenv.Until(r.t, "disconnected", func() bool { return r.source.Status().Err != nil })
}

// change makes several changes that the source sees at once, however slow the machine is.
func (r *rig) change(f func()) {
	r.source.tree.watch.mu.Lock() // holds back the events
	defer r.source.tree.watch.mu.Unlock()
	f()
}

func (r *rig) connect() {
	r.mu.Lock()
	r.cut = false
	r.mu.Unlock()
}

// next returns the next batch that the target acknowledged.
func (r *rig) next() Batch {
	r.t.Helper()
	select {
	case b := <-r.sent:
		return b
	case <-time.After(30 * time.Second):
		r.t.Fatalf("no batch; status %+v", r.source.Status())
		return Batch{}
	}
}

// complete waits until the target of the next connection has everything.
func (r *rig) complete() Batch {
	r.t.Helper()
	for {
		if b := r.next(); b.Complete {
			return b
		}
	}
}

func (r *rig) same() {
	r.t.Helper()
	testenv.Eventually(r.t, 30*time.Second, func() error {
		if diff := cmp.Diff(snapshot(r.t, r.src), snapshot(r.t, r.dst)); diff != "" {
			return fmt.Errorf("laptop (-) and container (+) differ:\n%s", diff)
		}
		return nil
	})
}

// snapshot describes everything in a directory.
func snapshot(t testing.TB, root string) map[string]string {
	t.Helper()
	all := make(map[string]string)
	err := filepath.WalkDir(root, func(p string, d fs.DirEntry, err error) error {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ENOTDIR) { // the directory is changing
			return nil
		}
		if err != nil || p == root {
			return err
		}
		info, err := d.Info()
		if err != nil {
			return nil //nolint:nilerr // the directory is changing
		}
		rel, _ := filepath.Rel(root, p)
		switch info.Mode().Type() {
		case fs.ModeDir:
			all[rel] = fmt.Sprintf("%v", info.Mode()|0o700)
		case fs.ModeSymlink:
			to, _ := os.Readlink(p)
			all[rel] = "-> " + to
		default:
			b, _ := os.ReadFile(p)
			all[rel] = fmt.Sprintf("%v %d %q", info.Mode(), info.ModTime().UnixNano(), b)
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	return all
}

func write(t testing.TB, root, name, content string) {
	t.Helper()
	p := filepath.Join(root, filepath.FromSlash(name))
	if err := os.MkdirAll(filepath.Dir(p), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(p, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func read(t testing.TB, root, name string) string {
	t.Helper()
	b, err := os.ReadFile(filepath.Join(root, filepath.FromSlash(name)))
	if err != nil {
		return err.Error()
	}
	return string(b)
}

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func exists(root, name string) bool {
	_, err := os.Lstat(filepath.Join(root, filepath.FromSlash(name)))
	return err == nil
}

// discarding returns a logger for benchmarks.
func discarding() *slog.Logger { return slog.New(slog.NewTextHandler(io.Discard, nil)) }
