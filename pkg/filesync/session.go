package filesync

import (
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"
	"sync"
	"time"
)

const (
	hold       = 50 * time.Millisecond  // for what is gone, until it is believed to be
	rest       = 100 * time.Millisecond // before a file is read again that changed while it was, and a big one at all
	restless   = 10 * time.Second       // after which a big one is sent that has not rested
	maxTries   = 3
	maxGone    = 64 << 20 // bytes of the paths that a target may say are gone
	copySize   = 32 << 10
	lookEvery  = time.Minute // at everything, but for no more than a hundredth of the time
	racyWindow = 2 * time.Second
)

// errDown is in place of the error that receive had.
var errDown = errors.New("the connection is down")

// known is what the target has at a path.
type known struct {
	entry
	sum    [sha256.Size]byte // of a file that was sent
	hashed bool              // there is a sum
	moving bool              // it was sent as it was read, while somebody wrote it
}

// session is one connection of a Source.
type session struct {
	*Source
	w        *wire
	known    map[string]known
	tries    map[string]int       // how often a file changed while it was read
	busy     map[string]time.Time // since when a big file was always found just written
	again    map[string]mark      // paths to look at after a rest
	since    time.Time            // when the first of them changed
	compared bool
	buf      [copySize]byte

	down   chan struct{} // closed when nothing is received any more
	err    error         // why, from then on
	listed chan struct{}
	done   chan done

	mu      sync.Mutex // what may be received, and what has been
	count   int        // of the list
	differs []difference
	asked   bool // what is gone
	gone    []string
	length  int             // of those together
	sent    *plan           // in the round that goes on, or nil
	failed  map[string]bool // of the plan
	reasons []Failure       // the first of them
}

type difference struct {
	number int
	how    byte
	sum    [sha256.Size]byte
}

// done ends a round.
type done struct {
	Batch
	err string // of OnSync
}

// receive takes what the target says, at any time: it would wait otherwise while we do.
func (ss *session) receive() error {
	for {
		k, payload, err := ss.w.receive()
		if err != nil {
			return unexpected(err)
		}
		if k == kindRefused {
			return &refusal{string(payload)}
		}
		r := &records{rest: payload}
		ss.mu.Lock()
		for r.more() {
			switch k {
			case kindDiffers:
				d := difference{number: int(r.uvarint(maxEntries)), how: r.byte()}
				if d.how == differTime {
					copy(d.sum[:], r.bytes(len(d.sum)))
				}
				if len(ss.differs) >= ss.count || d.number >= ss.count {
					r.fail("an answer to what was not asked")
				}
				ss.differs = append(ss.differs, d)
			case kindGone:
				p := r.path()
				ss.length += len(p)
				switch {
				case !ss.asked:
					r.fail("what is gone, which was not asked")
				case len(ss.gone) >= maxEntries || ss.length > maxGone:
					r.fail("too many paths")
				default:
					ss.gone = append(ss.gone, p)
				}
			case kindFailed:
				p, why := r.path(), r.string()
				if ss.sent == nil {
					r.fail("what failed, and nothing was sent")
					break
				}
				if ss.sent.has(p) {
					ss.failed[p] = true
				}
				if len(ss.reasons) < maxFailures {
					ss.reasons = append(ss.reasons, Failure{p, errors.New(strings.Clone(why[:min(len(why), maxPath)]))})
				}
			case kindDone:
				d := done{Batch: Batch{Files: int(r.uvarint(1 << 62)), Touched: int(r.uvarint(1 << 62)), Removed: int(r.uvarint(1 << 62)), Bytes: int64(r.uvarint(1 << 62))}}
				d.err = r.string()
				select {
				case ss.done <- d:
				default:
					r.fail("the end of a round that there was not")
				}
			default:
				r.fail("a frame of an unknown kind")
			}
		}
		if k == kindListed {
			ss.asked = false
		}
		ss.mu.Unlock()
		if r.err != nil {
			return r.err
		}
		if k == kindListed {
			select {
			case ss.listed <- struct{}{}:
			default:
				return fmt.Errorf("%w: the end of a list that there was not", errProtocol)
			}
		}
	}
}

// run compares, and then sends what changes, until the connection is down or ctx ends.
func (ss *session) run(ctx context.Context) error {
	if err := ss.compare(ctx); err != nil {
		return err
	}
	look := time.NewTimer(lookEvery)
	defer look.Stop()
	poll := time.NewTimer(pollEvery)
	defer poll.Stop()
	resting := time.NewTimer(rest)
	defer resting.Stop()
	for {
		var now changes
		select {
		case <-ss.down:
			return errDown
		case <-ctx.Done():
			return ctx.Err()
		case <-ss.watch.wake:
			if err := ss.settle(ctx); err != nil {
				return err
			}
			now = ss.watch.take()
		case <-poll.C:
			poll.Reset(ss.watch.poll())
			continue
		case <-resting.C:
			now = changes{paths: ss.again, since: ss.since}
			ss.again, ss.since = make(map[string]mark), time.Time{}
		case <-look.C:
			now = changes{paths: map[string]mark{}, all: true, since: time.Now()}
		}
		began := time.Now()
		all, err := ss.sync(ctx, now)
		if err != nil {
			return err
		}
		if all {
			look.Reset(max(lookEvery, 100*time.Since(began)))
		}
		if len(ss.again) > 0 {
			if ss.since.IsZero() {
				ss.since = now.since
			}
			resting.Reset(rest)
		}
	}
}

// pause waits, unless there is a reason not to.
func (ss *session) pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ss.down:
		return errDown
	case <-ctx.Done():
		return ctx.Err()
	}
}

// settle waits until a save is complete.
func (ss *session) settle(ctx context.Context) error {
	last := time.After(quietAtMax - quiet)
	for {
		select {
		case <-last:
			return ss.pause(ctx, quiet)
		case <-time.After(quiet):
			return nil
		case <-ss.watch.wake:
		case <-ss.down:
			return errDown
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// compare lists everything, and sends what is not the same at the target.
func (ss *session) compare(ctx context.Context) error {
	began := time.Now()
	ss.set(func(st *Status) { st.Connected, st.Synced = true, false })
	// What has changed is seen by looking; only which watches are wrong has to be known.
	before := ss.watch.take()
	if before.lost {
		ss.watch.reset(ss.watch.root)
	}
	for name, m := range before.paths {
		if m&gone != 0 {
			ss.watch.forget(name)
		}
	}

	var paths []string
	entries := make(map[string]entry)
	p := newPlan()
	unknown := make(map[string]bool)
	l := list{w: ss.w, kind: kindList}
	var record []byte
	var sendErr error
	w := walk{tree: &ss.tree,
		visit: func(name string, e entry) {
			if sendErr != nil {
				return
			}
			paths = append(paths, name)
			entries[name] = e
			ss.mu.Lock()
			ss.count = len(paths)
			ss.mu.Unlock()
			record = e.append(record[:0], name)
			if len(record) > maxFrame || checkPath(name) != nil || len(paths) > maxEntries {
				sendErr = fmt.Errorf("more than %d files, or a path that is too long: %.100q", maxEntries, name)
				return
			}
			sendErr = l.add(record)
		},
		failed: func(name string, err error) {
			unknown[name] = true
			p.fail(name, err)
		},
	}
	if err := w.all(); err != nil {
		return unreadable(err)
	}
	if err := cmp.Or(sendErr, l.flush()); err != nil {
		return err
	}
	ss.mu.Lock()
	ss.asked = true
	ss.mu.Unlock()
	if err := ss.w.send(kindListed, nil); err != nil {
		return err
	}
	select {
	case <-ss.listed:
	case <-ss.down:
		return errDown
	}
	ss.mu.Lock()
	differing, gone := ss.differs, ss.gone
	ss.count, ss.differs, ss.gone, ss.length = 0, nil, nil, 0
	ss.mu.Unlock()

	for _, name := range paths {
		ss.known[name] = known{entry: entries[name]}
	}
	for _, d := range differing {
		name := paths[d.number]
		e := entries[name]
		delete(ss.known, name)
		switch {
		case ss.writing(name, e):
			ss.again[name] |= changed
		case d.how == differMode:
			p.touch[name] = e
		case d.how == differTime && ss.sameContent(name, d.sum):
			p.touch[name] = e
		default:
			p.send[name] = e
		}
	}
	if len(gone) > 0 {
		if err := ss.pause(ctx, hold); err != nil {
			return err
		}
		s := solid{&ss.tree, make(map[string]bool)}
		for _, name := range gone {
			if ss.isGone(name, &s) && !within(name, unknown) && !ss.tree.ignore.above(name, true) && !ss.tree.ignore.above(name, false) {
				p.remove[name] = true
			}
		}
	}
	if err := ss.round(p, began, true); err != nil {
		return err
	}
	ss.compared = true
	return nil
}

// isGone reports whether there is nothing at a path.
func (ss *session) isGone(name string, s *solid) bool {
	if !s.parent(name) {
		return true
	}
	_, _, err := ss.tree.stat(name)
	return errors.Is(err, fs.ErrNotExist)
}

// sync sends what differs of what may have changed. It reports whether that was everything.
func (ss *session) sync(ctx context.Context, now changes) (all bool, err error) {
	if slices.ContainsFunc(ignoreFiles[:], func(name string) bool { return now.paths[name]&gone != 0 }) {
		// While it is being saved, it is not there, and without it everything would be sent.
		if err := ss.pause(ctx, hold); err != nil {
			return false, err
		}
		now.merge(ss.watch.take())
	}
	p, gone, err := ss.examine(&now)
	if err != nil {
		return false, ss.wait(err)
	}
	if len(gone) > 0 {
		// An editor that saves by renaming, or git, may be about to put it back.
		ss.set(func(st *Status) { st.Synced = false })
		if err := ss.pause(ctx, hold); err != nil {
			return false, err
		}
		now.merge(ss.watch.take())
		var still map[string]bool
		if p, still, err = ss.examine(&now); err != nil {
			return false, ss.wait(err)
		}
		for name := range still {
			if gone[name] {
				p.remove[name] = true
			} else {
				ss.watch.mark(name, changed)
			}
		}
	}
	return now.all, ss.round(p, now.since, false)
}

// wait has the root looked at again, which was not there, or could not be read.
func (ss *session) wait(err error) error {
	if errors.Is(err, errOther) {
		return err
	}
	ss.set(func(st *Status) { st.Err, st.Synced = unreadable(err), false })
	ss.again["."] |= gone
	return nil
}

// errOther ends a connection that began with a file where there is a directory, or the other way round.
var errOther = errors.New("a file became a directory, or a directory a file")
