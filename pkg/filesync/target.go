package filesync

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
)

// TargetConfig is what a Target is made of.
type TargetConfig struct {
	// Dir is the directory, which is made if it is not there. When the Source has one file, it is that file's path, or a
	// directory that there is, and that it is put into.
	Dir string
	// OnSync is called at the end of a round that changed something, and of each comparison. The acknowledgement waits for it, and its
	// error is given to the Source. Nil: nothing.
	OnSync func(Batch) error
	Logger *slog.Logger
}

// Target is the container's end. It remembers what it was sent, so there has to be one for all connections. Its methods may
// be called concurrently.
type Target struct {
	cfg TargetConfig

	turn sync.Mutex // of the connection that is served

	mu    sync.Mutex
	end   context.CancelCauseFunc // of the latest connection
	named map[string]uint32       // by a Source, and the comparison that had it last
	round uint32                  // counts comparisons

	pending Batch // what was done since OnSync was called last; a broken connection leaves something
}

// ErrReplaced is what Serve gives when another connection took its place.
var ErrReplaced = errors.New("another connection took over")

// tempPrefix begins the names of files that are being written. A Target that is killed leaves one.
const tempPrefix = ".kubevpn-sync-"

// errHolds is why a directory cannot become a file.
var errHolds = errors.New("it is a directory that holds what is not from the laptop")

// NewTarget checks the configuration. It touches no file: Serve does.
func NewTarget(cfg TargetConfig) (*Target, error) {
	if cfg.Dir == "" {
		return nil, errors.New("no directory to keep in sync")
	}
	if cfg.Logger == nil {
		return nil, errors.New("no logger")
	}
	return &Target{cfg: cfg, named: make(map[string]uint32)}, nil
}

// Serve does what a Source says over the connection, until that ends, ctx does, or Serve is called with another one. It
// closes the connection. It gives nil when the Source closed it between two rounds.
func (t *Target) Serve(ctx context.Context, conn net.Conn) error {
	ctx, end := context.WithCancelCause(ctx)
	defer end(nil)
	defer conn.Close()
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()

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
	w.patience = silence // a source receives at any time
	var work sync.WaitGroup
	defer work.Wait()
	done := make(chan struct{})
	defer close(done)
	defer conn.Close() // before the wait
	work.Go(func() { w.keepAlive(done) })

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
	// Ours is sent in any case, so that both ends can say which versions they are.
	if err := w.sendHello(hello{}); err != nil {
		return err
	}
	h, err := parseHello(k, payload)
	if err != nil {
		return err
	}
	p, err := t.openPlace(h)
	if err != nil {
		w.refuse(err)
		return err
	}
	defer p.root.Close()
	s := &serving{t: t, w: w, place: p}
	for {
		k, payload, err := w.receive()
		if errors.Is(err, io.EOF) && !s.inRound {
			return nil
		}
		if err != nil {
			return unexpected(err)
		}
		if err := s.take(k, payload); err != nil {
			w.refuse(err)
			return err
		}
	}
}

// place is where files go.
type place struct {
	root    *os.Root
	noModes bool
	// When the source has one file: what entries call it, and what it is called here.
	theirs, ours string
}

func (t *Target) openPlace(h hello) (place, error) {
	p := place{noModes: h.NoModes || runtime.GOOS == "windows"}
	parent := t.cfg.Dir
	if h.File {
		p.theirs, p.ours = h.Name, h.Name
		info, err := os.Stat(t.cfg.Dir)
		if err != nil || !info.IsDir() {
			parent, p.ours = filepath.Split(filepath.Clean(t.cfg.Dir))
			parent = filepath.Clean(parent)
		}
	}
	if err := os.MkdirAll(parent, 0o755); err != nil {
		return place{}, err
	}
	var err error
	p.root, err = os.OpenRoot(parent)
	return p, err
}

// local is an entry's path in the place.
func (p place) local(name string) (string, error) {
	if p.theirs != "" {
		if name != p.theirs {
			return "", fmt.Errorf("%w: %q is not the one file", errProtocol, name)
		}
		name = p.ours
	}
	// Not filepath.Localize: it wants UTF-8, which names on Linux need not be.
	full := filepath.FromSlash(name)
	if !filepath.IsLocal(full) || filepath.Separator != '/' && strings.ContainsRune(name, filepath.Separator) {
		return "", errors.New("this system has no such names")
	}
	return full, nil
}

// holds reports whether something is in the directory.
func (p place) holds(name string) bool {
	d, err := p.root.Open(name)
	if err != nil {
		return false
	}
	defer d.Close()
	names, _ := d.Readdirnames(1)
	return len(names) > 0
}

// serving is one connection.
type serving struct {
	t *Target
	w *wire
	place
	listed  int
	inRound bool
	round   Batch // that is going on
	buf     [copySize]byte
}

// take does what a frame says. Its error ends the connection; what is wrong with one path does not.
func (s *serving) take(k kind, payload []byte) error {
	r := &records{rest: payload}
	switch k {
	case kindList:
		return s.compare(r)
	case kindListed:
		return s.endList()
	case kindData:
		s.inRound = true
		return s.unpack(payload)
	case kindTouch:
		for r.more() {
			name, e := r.entry()
			if r.err == nil {
				s.touch(name, e)
			}
		}
		return r.err
	case kindRemove:
		for r.more() {
			name := r.path()
			if r.err == nil {
				s.remove(name)
			}
		}
		return r.err
	case kindEnd:
		compared := r.byte() == 1
		if r.err != nil {
			return r.err
		}
		return s.endRound(compared)
	}
	return fmt.Errorf("%w: a frame of kind %d", errProtocol, k)
}

// How an entry differs from what is here.
const (
	differs    = 1 // or is not here
	differMode = 2 // only the permissions do
	differTime = 3 // the size is the same, the time is not; the SHA-256 of what is here follows
)

// compare answers entries of the list that are not the same here.
func (s *serving) compare(r *records) error {
	if s.listed == 0 {
		s.t.round++
	}
	answer := list{w: s.w, kind: kindDiffers}
	var record []byte
	for r.more() {
		name, e := r.entry()
		if r.err != nil {
			break
		}
		if s.listed++; s.listed > maxEntries {
			return fmt.Errorf("%w: more than %d entries", errProtocol, maxEntries)
		}
		how, sum := s.differs(name, e)
		if err := s.t.remember(name); err != nil {
			return err
		}
		if how == 0 {
			continue
		}
		record = append(binary.AppendUvarint(record[:0], uint64(s.listed-1)), how)
		if how == differTime {
			record = append(record, sum[:]...)
		}
		if err := answer.add(record); err != nil {
			return err
		}
	}
	if r.err != nil {
		return r.err
	}
	return answer.flush()
}

// remember that a Source has named the path.
func (t *Target) remember(name string) error {
	if _, known := t.named[name]; !known && len(t.named) >= maxEntries {
		return fmt.Errorf("%w: more than %d paths", errProtocol, maxEntries)
	}
	t.named[name] = t.round
	return nil
}

func (s *serving) differs(name string, e entry) (how byte, sum [sha256.Size]byte) {
	p, err := s.local(name)
	if err != nil {
		return differs, sum // it is sent, and fails with a reason
	}
	info, err := s.root.Lstat(p)
	if err != nil {
		return differs, sum
	}
	here, ok := newEntry(info)
	switch {
	case !ok || here.kind != e.kind:
		return differs, sum
	case e.kind == link:
		if to, err := s.root.Readlink(p); err != nil || to != e.link {
			return differs, sum
		}
		return 0, sum
	case e.kind == file && here.size != e.size:
		return differs, sum
	case e.kind == file && here.mtime != e.mtime:
		sum, err := s.hash(p)
		if err != nil {
			return differs, sum
		}
		return differTime, sum
	case !s.noModes && info.Mode().Perm() != e.perm: // a directory's as it is, not as it counts
		return differMode, sum
	}
	return 0, sum
}

func (s *serving) hash(p string) (sum [sha256.Size]byte, err error) {
	f, err := s.root.Open(p)
	if err != nil {
		return sum, err
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return sum, err
	}
	h.Sum(sum[:0])
	return sum, nil
}

// endList names what a Source once had and this one did not list.
func (s *serving) endList() error {
	if s.listed == 0 {
		s.t.round++
	}
	s.listed = 0
	gone := list{w: s.w, kind: kindGone}
	var record []byte
	for name, round := range s.t.named {
		if round == s.t.round {
			continue
		}
		record = appendString(record[:0], name)
		if err := gone.add(record); err != nil {
			return err
		}
	}
	if err := gone.flush(); err != nil {
		return err
	}
	return s.w.send(kindListed, nil)
}
