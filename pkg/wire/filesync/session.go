package filesync

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"runtime"
	"slices"
	"strings"
	"time"
)

const (
	removeDelay = 50 * time.Millisecond  // for which a path has to be gone: an editor may be replacing it
	rest        = 100 * time.Millisecond // after which a file that changes is read again
	restMost    = 10 * time.Second       // after which it is sent as it is
	readEvery   = time.Minute            // everything, since network file systems do not report all changes
	pollEvery   = time.Second
	tick        = 10 * time.Millisecond // the kernel's clock for modification times is at least that fine
	bigFile     = 8 << 20               // bytes from which on a file is sent last, and has to rest first
)

// errClosed stands for the error of receive.
var errClosed = errors.New("the connection is closed")

// errRoot ends a connection whose hello is not true any more.
var errRoot = errors.New("a file became a directory, or a directory a file")

// session is one connection of a Source. All but receive runs on one goroutine.
type session struct {
	*Source
	w        *wire
	target   map[string]entry     // what the target has
	rejected map[string]entry     // what could not be read or written, and is not sent again before it changes
	changing map[string]time.Time // files that change while they are read, since when; they are read again after a rest

	completed bool // the target had everything once
	buf       [maxFrame]byte

	frames chan frame    // from receive
	ended  chan struct{} // closed when run has returned
	closed chan struct{} // closed when receive has returned
	err    error         // of receive, once closed is closed
}

type frame struct {
	kind    kind
	payload []byte
}

func newSession(s *Source, w *wire) *session {
	return &session{
		Source: s, w: w, target: make(map[string]entry), rejected: make(map[string]entry),
		changing: make(map[string]time.Time),
		frames:   make(chan frame), ended: make(chan struct{}), closed: make(chan struct{}),
	}
}

// receive passes frames on until the connection ends or the target refuses to continue. It then closes the connection,
// which ends sending too.
func (ss *session) receive() {
	defer close(ss.closed)
	defer ss.w.conn.Close()
	for {
		k, payload, err := ss.w.receive()
		if err != nil {
			ss.err = unexpected(err)
			return
		}
		if k == kindRefused {
			ss.err = &refusal{string(payload)}
			return
		}
		select {
		case ss.frames <- frame{k, bytes.Clone(payload)}:
		case <-ss.ended:
			ss.err = errClosed
			return
		}
	}
}

// next returns the next frame.
func (ss *session) next() (frame, error) {
	select {
	case f := <-ss.frames:
		return f, nil
	case <-ss.closed:
		return frame{}, errClosed
	}
}

// run sends what differs and then what changes, until the connection breaks or ctx ends.
func (ss *session) run(ctx context.Context) error {
	ss.set(func(st *Status) { st.Connected, st.Synced = true, false })
	now := changes{all: true, since: time.Now()}
	if err := ss.readTarget(); err != nil {
		return err
	}
	// Files that were written just before the start are then older than a tick, and the first round has all of them.
	if err := ss.pause(ctx, tick); err != nil {
		return err
	}
	readAll := time.NewTimer(readEvery)
	defer readAll.Stop()
	poll := time.NewTimer(pollEvery)
	defer poll.Stop()
	again := time.NewTimer(rest)
	again.Stop()
	var took time.Duration // to read everything
	for {
		began := time.Now()
		retry, err := ss.sync(ctx, now)
		if err != nil {
			return err
		}
		if now.all {
			took = time.Since(began)
		}
		if retry.paths != nil {
			again.Reset(rest)
		}
		select {
		case f := <-ss.frames:
			return fmt.Errorf("%w: a frame of kind %d outside of a round", errProtocol, f.kind)
		case <-ss.closed:
			return errClosed
		case <-ctx.Done():
			return ctx.Err()
		case <-ss.tree.watch.wake:
			if err := ss.settle(ctx); err != nil {
				return err
			}
			now = ss.tree.watch.take()
		case <-again.C:
			now = retry
			retry = changes{}
		case <-poll.C: // for no more than a tenth of the time
			now = changes{all: ss.tree.watch.poll, since: time.Now()}
			poll.Reset(max(pollEvery, 10*took))
		case <-readAll.C: // for no more than a hundredth of the time
			clear(ss.rejected)
			now = changes{all: true, since: time.Now()}
			readAll.Reset(max(readEvery, 100*took))
		}
		now.merge(retry)
	}
}

// readTarget receives what the target has from earlier connections.
func (ss *session) readTarget() error {
	length := 0
	for {
		f, err := ss.next()
		if err != nil || f.kind == kindEnd {
			return err
		}
		if f.kind != kindEntry {
			return fmt.Errorf("%w: a frame of kind %d instead of an entry", errProtocol, f.kind)
		}
		name, e, err := parseEntry(f.payload)
		if err != nil {
			return err
		}
		if length += len(name); len(ss.target) >= maxEntries || length > ss.namesMost {
			return fmt.Errorf("%w: too many entries", errProtocol)
		}
		if runtime.GOOS == "windows" {
			e.perm = 0
		}
		ss.target[name] = e
	}
}

// pause waits, unless the connection or ctx ends.
func (ss *session) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ss.closed:
		return errClosed
	case <-ctx.Done():
		return ctx.Err()
	}
}

// settle waits until a save is complete.
func (ss *session) settle(ctx context.Context) error {
	most := time.After(quietMost - quiet)
	for {
		select {
		case <-most:
			return ss.pause(ctx, quiet)
		case <-time.After(quiet):
			return nil
		case <-ss.tree.watch.wake:
		case <-ss.closed:
			return errClosed
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sync reads what may have changed and sends what differs. It returns what has to be read again after a rest.
func (ss *session) sync(ctx context.Context, now changes) (retry changes, err error) {
	if slices.ContainsFunc(ignoreFiles[:], func(name string) bool { return now.paths[name]&gone != 0 }) {
		// An editor may be replacing it. Without it, everything would be sent.
		if err := ss.pause(ctx, removeDelay); err != nil {
			return changes{}, err
		}
		now.merge(ss.tree.watch.take())
	}
	if err := ss.read(&now); err != nil {
		return ss.rootGone(err)
	}
	p := ss.plan()
	late := changes{}
	if len(p.remove) > 0 {
		ss.set(func(st *Status) { st.Synced = false })
		if err := ss.pause(ctx, removeDelay); err != nil {
			return changes{}, err
		}
		late = ss.tree.watch.take()
		if err := ss.read(&late); err != nil {
			return ss.rootGone(err)
		}
		before := make(map[string]bool, len(p.remove))
		for _, name := range p.remove {
			before[name] = true
		}
		p = ss.plan()
		p.remove = slices.DeleteFunc(p.remove, func(name string) bool {
			if !before[name] {
				retry.add(name, changed)
			}
			return !before[name]
		})
	}
	now.merge(late)
	err = ss.round(p, now.since)
	for name := range ss.changing {
		retry.add(name, changed)
	}
	retry.since = now.since
	return retry, err
}

// read updates the tree.
func (ss *session) read(now *changes) error {
	t := ss.tree
	for _, name := range ignoreFiles {
		now.all = now.all || now.paths[name] != 0 && t.only == ""
	}
	now.all = now.all || now.paths["."]&(gone|created) != 0
	if !now.all {
		t.update(now.paths)
		return nil
	}
	only := t.only
	if err := t.open(); err != nil {
		return err
	}
	if t.only != only {
		return errRoot
	}
	if now.lost {
		t.watch.reset(t.root)
	}
	t.update(now.paths)
	return t.readAll()
}

// rootGone has the root read again, which is gone or cannot be read.
func (ss *session) rootGone(err error) (changes, error) {
	if errors.Is(err, errRoot) {
		return changes{}, err
	}
	ss.set(func(st *Status) { st.Err, st.Synced = rootError(err), false })
	return changes{paths: make(map[string]mark), all: true, lost: true}, nil
}

// plan is what a round does.
type plan struct {
	send   []string // in this order: directories, files and links, big files
	remove []string // children before parents
}

// plan compares what the laptop has with what the target has.
func (ss *session) plan() plan {
	var p plan
	t := ss.tree
	for name, e := range t.entries {
		if rejected, ok := ss.rejected[name]; ss.target[name] != e && (!ok || rejected != e) && !ss.waits(name, e) {
			p.send = append(p.send, name)
		}
	}
	for name, e := range ss.target {
		if _, ok := t.entries[name]; !ok && !within(name, t.unreadable) && !t.ignored.above(name, e.kind == dir) {
			p.remove = append(p.remove, name)
		}
	}
	rank := func(e entry) int {
		switch {
		case e.kind == dir:
			return 0
		case e.size < bigFile:
			return 1
		}
		return 2
	}
	slices.SortFunc(p.send, func(a, b string) int {
		if by := rank(t.entries[a]) - rank(t.entries[b]); by != 0 {
			return by
		}
		return strings.Compare(a, b)
	})
	slices.SortFunc(p.remove, func(a, b string) int { return strings.Compare(b, a) })
	for name := range ss.changing {
		if e, ok := t.entries[name]; !ok || e == ss.target[name] || e == ss.rejected[name] {
			delete(ss.changing, name)
		}
	}
	return p
}

// waits reports whether a file was written a moment ago: it may be written again without its modification time showing
// it, and more of a big file may follow.
func (ss *session) waits(name string, e entry) bool {
	age := time.Since(time.Unix(0, e.mtime))
	recent := age >= 0 && (age < tick || age < rest && e.size >= bigFile)
	return e.kind == file && recent && ss.later(name)
}

// later notes that a file changes, and reports whether to read it again later. That ends after restMost, since a file
// that is written all the time would never arrive.
func (ss *session) later(name string) bool {
	since, ok := ss.changing[name]
	if !ok {
		since = time.Now()
		ss.changing[name] = since
	}
	return time.Since(since) < ss.restMost
}

// round sends a plan, waits for the acknowledgement and reports the result.
func (ss *session) round(p plan, since time.Time) error {
	result := Batch{Failed: ss.tree.takeFailed()}
	if len(p.send)+len(p.remove) > 0 || !ss.completed {
		ss.set(func(st *Status) { st.Synced = false })
		sent, err := ss.send(p, &result)
		if err != nil {
			return err
		}
		if err := ss.acknowledged(sent, p.remove, &result); err != nil {
			return err
		}
	}
	if !since.IsZero() {
		result.Took = time.Since(since)
	}
	report := result.Complete || result.Changed() || len(result.Failed) > 0
	ss.set(func(st *Status) {
		st.Synced, st.Files, st.Err = len(ss.changing) == 0, len(ss.target), nil
		if report {
			st.Last, st.LastAt = result, time.Now()
		}
	})
	if report && ss.cfg.OnSync != nil {
		ss.cfg.OnSync(result)
	}
	return nil
}

// acknowledged receives the target's report of a round and notes what the target has then.
func (ss *session) acknowledged(sent map[string]entry, removed []string, result *Batch) error {
	for name, e := range sent {
		ss.target[name] = e
	}
	for _, name := range removed {
		delete(ss.target, name)
	}
	for {
		f, err := ss.next()
		if err != nil {
			return err
		}
		switch f.kind {
		case kindFailed:
			var report failedReport
			if err := json.Unmarshal(f.payload, &report); err != nil {
				return fmt.Errorf("%w: %w", errProtocol, err)
			}
			name := string(report.Path)
			if e, ok := sent[name]; ok {
				delete(ss.target, name)
				ss.rejected[name] = e
			}
			result.Rejected++
			result.Failed = addFailure(result.Failed, name, errors.New(report.Error[:min(len(report.Error), maxPath)]))
		case kindDone:
			var report doneReport
			if err := json.Unmarshal(f.payload, &report); err != nil {
				return fmt.Errorf("%w: %w", errProtocol, err)
			}
			result.Files, result.Removed, result.Bytes = report.Files, report.Removed, report.Bytes
			result.Complete = !ss.completed && len(ss.changing) == 0
			ss.completed = ss.completed || result.Complete
			return nil
		default:
			return fmt.Errorf("%w: a frame of kind %d within a round", errProtocol, f.kind)
		}
	}
}
