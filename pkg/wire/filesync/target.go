package filesync

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
)

// TargetConfig is the configuration of a Target.
type TargetConfig struct {
	// Dir is the directory, which Serve creates if necessary. If the Source has one file, Dir is the path of that file,
	// or an existing directory to put it into.
	Dir string
	// OnSync is called at the end of each round that changed or completed something. The acknowledgement waits for it.
	// It may be nil.
	OnSync func(Batch)
	Logger *slog.Logger
}

// Target is the container's end. It remembers what it received, so there is one Target for all connections. Its methods
// are safe for concurrent use.
type Target struct {
	cfg TargetConfig

	turn sync.Mutex // held by the connection that is served, which owns:
	has  map[string]received
	done Batch // since the last call of OnSync, also from connections that broke

	mu  sync.Mutex
	end context.CancelCauseFunc // of the latest connection
}

// received is something that a Source sent.
type received struct {
	sent   entry
	stored entry // how the file system then described it: it may round times and change permissions
}

// ErrReplaced is the error of Serve when another connection took its place.
var ErrReplaced = errors.New("another connection took over")

// tempPrefix begins the names of files that are being written. A Target that is killed may leave one.
const tempPrefix = ".kubevpn-sync-"

// NewTarget returns a Target. It touches no file: Serve does.
func NewTarget(cfg TargetConfig) *Target { return &Target{cfg: cfg, has: make(map[string]received)} }

// Serve applies what a Source sends over the connection, until the connection or ctx ends, or Serve is called with
// another connection. It closes the connection. It returns nil when the Source closed it between two rounds.
func (t *Target) Serve(ctx context.Context, conn net.Conn) error {
	ctx, end := context.WithCancelCause(ctx)
	var work sync.WaitGroup
	defer work.Wait()
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	defer end(nil)

	t.mu.Lock()
	if t.end != nil {
		t.end(ErrReplaced)
	}
	t.end = end
	t.mu.Unlock()

	t.turn.Lock()
	defer t.turn.Unlock()
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	w := newWire(conn)
	w.writeTimeout = silence // a source receives at any time
	work.Go(func() { w.keepAlive(ctx.Done()) })
	err := t.serve(w)
	if ctx.Err() != nil {
		return context.Cause(ctx)
	}
	return err
}

func (t *Target) serve(w *wire) error {
	k, payload, err := w.receive()
	if err != nil {
		return err
	}
	// The hello goes out in any case, so that both ends can report both versions.
	if err := w.sendHello(hello{}); err != nil {
		return err
	}
	h, err := parseHello(k, payload)
	if err != nil {
		return err
	}
	p, err := t.openDestination(h)
	if err != nil {
		w.refuse(err)
		return err
	}
	defer p.root.Close()
	r := &receiver{target: t, w: w, destination: p}
	defer r.abandon()
	if err := r.sendEntries(); err != nil {
		return err
	}
	for {
		k, payload, err := w.receive()
		if errors.Is(err, io.EOF) && !r.inRound {
			return nil
		}
		if err != nil {
			return unexpected(err)
		}
		if err := r.apply(k, payload); err != nil {
			w.refuse(err)
			return err
		}
	}
}

// destination is where files go. The Target touches nothing outside of root.
type destination struct {
	root *os.Root
	// If the source has one file: its name there, and here.
	theirs, ours string
}

func (t *Target) openDestination(h hello) (destination, error) {
	var p destination
	parent := t.cfg.Dir
	if h.File != "" {
		p.theirs, p.ours = h.File, h.Name
		info, err := os.Stat(t.cfg.Dir)
		if err != nil || !info.IsDir() {
			parent, p.ours = filepath.Dir(t.cfg.Dir), filepath.Base(t.cfg.Dir)
		}
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return destination{}, err
	}
	var err error
	p.root, err = os.OpenRoot(parent)
	return p, err
}

// local converts a path of the wire to one below the root.
func (p destination) local(name string) (string, error) {
	switch p.theirs {
	case "":
		return name, checkPath(name)
	case name:
		return p.ours, nil
	}
	return "", fmt.Errorf("%w: %q is not the one file", errProtocol, name)
}

// stat describes what is at a local path.
func (p destination) stat(path string) (entry, error) {
	info, err := p.root.Lstat(path)
	if err != nil {
		return entry{}, err
	}
	e := newEntry(info)
	if e.kind == symlink {
		e.link, err = p.root.Readlink(path)
	}
	return e, err
}

// holds reports whether a local path is a directory that is not empty.
func (p destination) holds(path string) bool {
	d, err := p.root.Open(path)
	if err != nil {
		return false
	}
	defer d.Close()
	names, _ := d.Readdirnames(1)
	return len(names) > 0
}

// sendEntries sends the source the entries that exist from earlier connections.
func (r *receiver) sendEntries() error {
	for name, has := range r.target.has {
		path, err := r.local(name)
		var now entry
		if err == nil {
			now, err = r.stat(path)
		}
		if err != nil {
			delete(r.target.has, name)
			continue
		}
		if now == has.stored {
			now = has.sent
		}
		if err := r.w.sendEntry(name, now); err != nil {
			return err
		}
	}
	return r.w.send(kindEnd, nil)
}

// endRound reports a round to OnSync and to the source.
func (r *receiver) endRound(complete bool) error {
	for _, f := range r.failed {
		text := f.Err.Error()
		if err := r.w.sendJSON(kindFailed, failedReport{[]byte(f.Path), text[:min(len(text), maxPath)]}); err != nil {
			return err
		}
	}
	t := r.target
	t.done.Complete = complete
	done := t.done
	t.done = Batch{}
	if t.cfg.OnSync != nil && (complete || done.Changed()) {
		t.cfg.OnSync(done)
	}
	report := r.round
	r.round, r.failed, r.inRound = Batch{}, nil, false
	return r.w.sendJSON(kindDone, report)
}
