package filesync

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"
	"time"

	"kubevpn/pkg/wakeup"

	"github.com/fsnotify/fsnotify"
)

const (
	removeDelay = 50 * time.Millisecond  // until a missing path is removed: an editor may be replacing it
	rest        = 100 * time.Millisecond // after which a file that changes is read again
	restMost    = 10 * time.Second       // after which it is sent as it is
	readEvery   = time.Minute            // everything, since network file systems do not report all changes
	pollEvery   = time.Second
	tick        = 10 * time.Millisecond // the kernel's clock for modification times is at least that fine
	bigFile     = 8 << 20               // bytes from which on a file is sent last, and has to rest first
)

// errRoot ends a connection whose hello has become wrong.
var errRoot = errors.New("a file became a directory, or a directory a file")

// sender is one connection of a Source. All but receive runs on one goroutine.
type sender struct {
	*Source
	w        *wire
	target   map[string]entry     // entries of the target
	rejected map[string]entry     // entries that could not be read or written; they are sent again after they change
	changing map[string]time.Time // files that change while they are read, since when; they are read again after a rest

	completed bool // the target had everything once
	buf       [maxFrame]byte
	frames    chan frame // from receive
}

type frame struct {
	kind    kind
	payload []byte
}

func newSender(s *Source, w *wire) *sender {
	return &sender{
		Source: s, w: w, target: make(map[string]entry), rejected: make(map[string]entry),
		changing: make(map[string]time.Time), frames: make(chan frame),
	}
}

// receive passes frames on until the connection or ctx ends, or the target refuses to continue.
func (se *sender) receive(ctx context.Context) error {
	for {
		k, payload, err := se.w.receive()
		if err != nil {
			return unexpected(err)
		}
		if k == kindRefused {
			return fmt.Errorf("%w: %s", errRefused, payload)
		}
		select {
		case se.frames <- frame{k, bytes.Clone(payload)}:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// next returns the next frame.
func (se *sender) next(ctx context.Context) (frame, error) {
	select {
	case f := <-se.frames:
		return f, nil
	case <-ctx.Done():
		return frame{}, ctx.Err()
	}
}

// run sends what differs and then what changes, until ctx ends or an error breaks the connection.
func (se *sender) run(ctx context.Context) error {
	se.set(func(st *Status) { st.Synced = false })
	now := changes{all: true, since: time.Now()}
	if err := se.readTarget(ctx); err != nil {
		return err
	}
	// Files that were written just before the start are then older than a tick, and the first round has all of them.
	if !wakeup.Pause(ctx, tick) {
		return ctx.Err()
	}
	var readAt time.Time   // when everything was read
	var took time.Duration // to read it
	resentAt := time.Now() // when the source last cleared rejected
	for {
		began := time.Now()
		retry, err := se.sync(ctx, now)
		if err != nil {
			return err
		}
		if now.all {
			readAt, took = time.Now(), time.Since(began)
		}
		// Reading everything takes no more than a hundredth of the time, or a tenth if the system does not watch.
		resendEvery := max(readEvery, 100*took)
		every := resendEvery
		if se.tree.watch.poll {
			every = max(pollEvery, 10*took)
		}
		var again <-chan time.Time
		if retry.all || len(retry.paths) > 0 {
			again = time.After(rest)
		}
		now = changes{}
		select {
		case f := <-se.frames:
			return fmt.Errorf("%w: a frame of kind %d outside of a round", errProtocol, f.kind)
		case <-ctx.Done():
			return ctx.Err()
		case <-se.tree.watch.wake:
			if err := se.settle(ctx); err != nil {
				return err
			}
			now = se.tree.watch.take()
		case <-again:
		case <-time.After(time.Until(readAt.Add(every))):
			now = changes{all: true, since: time.Now()}
			if time.Since(resentAt) >= resendEvery {
				clear(se.rejected)
				resentAt = time.Now()
			}
		}
		now.merge(retry)
	}
}

// readTarget receives the entries that the target has from earlier connections.
func (se *sender) readTarget(ctx context.Context) error {
	length := 0
	for {
		f, err := se.next(ctx)
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
		if length += len(name); len(se.target) >= maxEntries || length > se.namesMost {
			return fmt.Errorf("%w: too many entries", errProtocol)
		}
		se.target[name] = e
	}
}

// settle waits until a save is complete.
func (se *sender) settle(ctx context.Context) error {
	most := time.After(quietMost)
	for {
		select {
		case <-most:
			return nil
		case <-time.After(quiet):
			return nil
		case <-se.tree.watch.wake:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// sync reads the paths that may have changed and sends the differences. It returns the changes to read after a rest.
func (se *sender) sync(ctx context.Context, now changes) (retry changes, err error) {
	if slices.ContainsFunc(ignoreFiles[:], func(name string) bool { return isGone(now.paths[name]) }) {
		// An editor may be replacing it. Without it, everything would be sent.
		if !wakeup.Pause(ctx, removeDelay) {
			return changes{}, ctx.Err()
		}
		now.merge(se.tree.watch.take())
	}
	if err := se.read(now); err != nil {
		return se.rootGone(err)
	}
	p := se.plan()
	if before := p.remove; len(before) > 0 {
		se.set(func(st *Status) { st.Synced = false })
		if !wakeup.Pause(ctx, removeDelay) {
			return changes{}, ctx.Err()
		}
		late := se.tree.watch.take()
		if err := se.read(late); err != nil {
			return se.rootGone(err)
		}
		now.merge(late)
		p = se.plan()
		p.remove = slices.DeleteFunc(p.remove, func(name string) bool {
			_, found := slices.BinarySearchFunc(before, name, backward)
			if !found {
				retry.add(name, 0)
			}
			return !found
		})
	}
	err = se.round(ctx, p, now.since)
	for name := range se.changing {
		retry.add(name, 0)
	}
	retry.since = now.since
	return retry, err
}

// read updates the tree. Files whose modification time may not show that they were written are sent again.
func (se *sender) read(now changes) error {
	if err := se.tree.read(now); err != nil {
		return err
	}
	for name, op := range now.paths {
		if e := se.tree.entries[name]; e.kind != file || !coarse(e.mtime) || op&(fsnotify.Write|fsnotify.Create) == 0 {
			continue
		}
		delete(se.rejected, name)
		if _, ok := se.target[name]; ok {
			se.target[name] = entry{}
		}
	}
	return nil
}

// rootGone reports that the root is gone or cannot be read, and lets it be read again.
func (se *sender) rootGone(err error) (changes, error) {
	if errors.Is(err, errRoot) {
		return changes{}, err
	}
	se.set(func(st *Status) { st.Err, st.Synced = rootError(err), false })
	return changes{all: true, lost: true}, nil
}

// plan lists the paths that a round sends and removes.
type plan struct {
	send   []string // in this order: directories, files and links, big files
	remove []string // children before parents
}

// plan compares the entries of the laptop with those of the target.
func (se *sender) plan() plan {
	var p plan
	t := se.tree
	for name, e := range t.entries {
		if rejected, ok := se.rejected[name]; se.target[name] != e && (!ok || rejected != e) && !se.waits(name, e) {
			p.send = append(p.send, name)
		}
	}
	for name, e := range se.target {
		if _, ok := t.entries[name]; !ok && !t.unreadableAbove(name) && !t.ignored.above(name, e.kind == dir) {
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
		return cmp.Or(rank(t.entries[a])-rank(t.entries[b]), strings.Compare(a, b))
	})
	slices.SortFunc(p.remove, backward)
	for name := range se.changing {
		if e, ok := t.entries[name]; !ok || e == se.target[name] || e == se.rejected[name] {
			delete(se.changing, name)
		}
	}
	return p
}

// backward orders children before parents.
func backward(a, b string) int { return strings.Compare(b, a) }

// waits reports whether a file was written a moment ago: it may be written again without its modification time showing
// it, and more of a big file may follow.
func (se *sender) waits(name string, e entry) bool {
	age := time.Since(time.Unix(0, e.mtime))
	recent := age >= 0 && (age < tick || age < rest && e.size >= bigFile)
	return e.kind == file && recent && se.later(name)
}

// later notes that a file changes, and reports whether to read it again later. That ends after restMost, since a file
// that is written all the time would never arrive.
func (se *sender) later(name string) bool {
	since, ok := se.changing[name]
	if !ok {
		since = time.Now()
		se.changing[name] = since
	}
	return time.Since(since) < se.restMost
}

// round sends a plan, waits for the acknowledgement and reports the result.
func (se *sender) round(ctx context.Context, p plan, since time.Time) error {
	result := Batch{Failed: se.tree.failed}
	se.tree.failed = nil
	if len(p.send)+len(p.remove) > 0 || !se.completed {
		se.set(func(st *Status) { st.Synced = false })
		sent, err := se.send(p, &result)
		if err != nil {
			return err
		}
		if err := se.acknowledged(ctx, sent, p.remove, &result); err != nil {
			return err
		}
	}
	if !since.IsZero() {
		result.Took = time.Since(since)
	}
	report := result.Complete || result.Changed() || len(result.Failed) > 0
	se.set(func(st *Status) {
		st.Synced, st.Files, st.Err = len(se.changing) == 0, len(se.target), nil
		if report {
			st.Last, st.LastAt = result, time.Now()
		}
	})
	if report && se.cfg.OnSync != nil {
		se.cfg.OnSync(result)
	}
	return nil
}

// acknowledged receives the target's report of a round and updates the entries of the target.
func (se *sender) acknowledged(
	ctx context.Context, sent map[string]entry, removed []string, result *Batch,
) error {
	for _, name := range removed {
		delete(se.target, name)
	}
	for {
		f, err := se.next(ctx)
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
				se.rejected[name] = e
				delete(sent, name)
				if _, ok := se.target[name]; ok {
					se.target[name] = entry{} // the target may still have what was sent earlier
				}
			}
			result.Rejected++
			result.Failed = addFailure(result.Failed, name, errors.New(report.Error[:min(len(report.Error), maxPath)]))
		case kindDone:
			if err := json.Unmarshal(f.payload, result); err != nil {
				return fmt.Errorf("%w: %w", errProtocol, err)
			}
			maps.Copy(se.target, sent)
			result.Complete = !se.completed && len(se.changing) == 0
			se.completed = se.completed || result.Complete
			return nil
		default:
			return fmt.Errorf("%w: a frame of kind %d within a round", errProtocol, f.kind)
		}
	}
}
