package filesync

import (
	"archive/tar"
	"bufio"
	"cmp"
	"context"
	"crypto/sha256"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"maps"
	"os"
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

// examine finds what differs from what the target has, and what is not there any more.
func (ss *session) examine(now *changes) (*plan, map[string]bool, error) {
	p := newPlan()
	for name, m := range now.paths {
		if name == "." && m&(gone|created) != 0 || slices.Contains(ignoreFiles[:], name) && ss.tree.only == "" {
			now.all = true
		}
		if m&gone != 0 {
			ss.watch.forget(name)
		}
	}
	if now.all {
		return ss.examineAll(now, p)
	}
	if ss.tree.only != "" {
		return ss.examineFile(now, p)
	}
	s := solid{&ss.tree, make(map[string]bool)}
	absent := make(map[string]bool)  // with what is below
	walked := make(map[string]bool)  // what is below and was not seen is gone
	unknown := make(map[string]bool) // with what is below
	seen := make(map[string]bool)
	w := walk{tree: &ss.tree,
		visit: func(name string, e entry) {
			seen[name] = true
			ss.diff(p, name, e, false)
		},
		failed: func(name string, err error) {
			unknown[name] = true
			p.fail(name, err)
		},
	}
	for _, name := range slices.Sorted(maps.Keys(now.paths)) {
		if name == "." || seen[name] {
			continue
		}
		if !s.parent(name) {
			absent[name] = true
			continue
		}
		e, ok, err := ss.tree.stat(name)
		switch {
		case errors.Is(err, fs.ErrNotExist):
			absent[name] = true
			continue
		case ss.tree.ignore.above(name, e.kind == dir):
			continue
		case err != nil:
			w.failed(name, err)
			continue
		case !ok:
			absent[name] = true // a pipe is there in its place
			continue
		}
		w.visit(name, e)
		if e.kind == dir && (now.paths[name]&created != 0 || !ss.watch.knows(name)) {
			walked[name] = true
			w.subdir(name)
		}
	}
	missing := make(map[string]bool)
	deep := len(walked) > 0
	for name := range absent {
		if k, ok := ss.known[name]; ok {
			missing[name] = true
			deep = deep || k.kind == dir
		}
	}
	if deep {
		for name := range ss.known {
			if !seen[name] && (within(name, walked) && !walked[name] || within(name, absent)) && !within(name, unknown) {
				missing[name] = true
			}
		}
	}
	return p, ss.drop(p, missing), nil
}

// drop takes out what goes with something that is put into its directory's place, and what has become ignored.
func (ss *session) drop(p *plan, missing map[string]bool) map[string]bool {
	replaced := make(map[string]bool)
	for name, e := range p.send {
		if k, ok := ss.known[name]; ok && k.kind == dir && e.kind != dir {
			replaced[name] = true
		}
	}
	for name := range missing {
		if within(name, replaced) || ss.tree.ignore.above(name, ss.known[name].kind == dir) {
			delete(missing, name)
		}
	}
	return missing
}

// examineAll looks at everything.
func (ss *session) examineAll(now *changes, p *plan) (*plan, map[string]bool, error) {
	suspicious := now.lost
	if now.lost {
		ss.watch.reset(ss.watch.root)
		now.lost = false
	}
	wasFile := ss.tree.only != ""
	if err := ss.open(); err != nil {
		return nil, nil, err
	}
	if isFile := ss.tree.only != ""; isFile != wasFile {
		return nil, nil, errOther
	}
	seen := make(map[string]bool)
	unknown := make(map[string]bool)
	w := walk{tree: &ss.tree,
		visit: func(name string, e entry) {
			seen[name] = true
			_, marked := now.paths[name]
			ss.diff(p, name, e, !marked && !suspicious)
		},
		failed: func(name string, err error) {
			unknown[name] = true
			p.fail(name, err)
		},
	}
	if err := w.all(); err != nil {
		return nil, nil, err
	}
	missing := make(map[string]bool)
	for name := range ss.known {
		if !seen[name] && !within(name, unknown) {
			missing[name] = true
		}
	}
	return p, ss.drop(p, missing), nil
}

// examineFile looks at the one file.
func (ss *session) examineFile(now *changes, p *plan) (*plan, map[string]bool, error) {
	name := ss.tree.called
	if now.paths[ss.tree.only]|now.paths[name] == 0 { // another one of its directory
		return p, nil, nil
	}
	e, ok, err := ss.tree.stat(name)
	if errors.Is(err, fs.ErrNotExist) || err == nil && !ok {
		_, had := ss.known[name]
		if had {
			return p, map[string]bool{name: true}, nil
		}
		return p, nil, nil
	}
	if err != nil {
		p.fail(name, err)
		return p, nil, nil
	}
	ss.diff(p, name, e, false)
	return p, nil, nil
}

// diff plans what makes the target's entry the same. By the way means that nothing said that it changed.
func (ss *session) diff(p *plan, name string, e entry, byTheWay bool) {
	k, ok := ss.known[name]
	switch {
	case k.entry != e && ss.writing(name, e):
		ss.again[name] |= changed
	case !ok || k.kind != e.kind || k.link != e.link || k.size != e.size:
		p.send[name] = e
	case k.mtime != e.mtime:
		if k.hashed && ss.sameContent(name, k.sum) {
			p.touch[name] = e
		} else {
			p.send[name] = e
		}
	case k.perm != e.perm:
		p.touch[name] = e
	case e.kind == file && !byTheWay && k.hashed && time.Since(time.Unix(0, e.mtime)) < racyWindow:
		// A second change within one tick of the file system's clock has the time of the first.
		if !ss.sameContent(name, k.sum) {
			p.send[name] = e
		}
	}
}

// writing reports whether an entry is a big file that somebody may be writing, and that can wait for the end of that. One that is
// always being written is to be sent as it is.
func (ss *session) writing(name string, e entry) bool {
	age := time.Since(time.Unix(0, e.mtime))
	if e.kind != file || e.size < bigFile || age < 0 || age >= rest {
		delete(ss.busy, name)
		return false
	}
	since, known := ss.busy[name]
	if !known {
		ss.busy[name] = time.Now()
		return true
	}
	if time.Since(since) < ss.restless {
		return true
	}
	ss.tries[name] = maxTries // the next one counts, whatever happens to it meanwhile
	return false
}

func (ss *session) sameContent(name string, sum [sha256.Size]byte) bool {
	f, err := os.Open(ss.tree.full(name))
	if err != nil {
		return false // sending it says why
	}
	defer f.Close()
	h := sha256.New()
	if _, err := io.Copy(h, f); err != nil {
		return false
	}
	return [sha256.Size]byte(h.Sum(nil)) == sum
}

// round sends what is planned and waits for the acknowledgement.
func (ss *session) round(p *plan, since time.Time, compared bool) error {
	result := Batch{Compared: compared, Failed: p.failed}
	if !p.empty() || compared {
		ss.set(func(st *Status) { st.Synced = false })
		ss.mu.Lock()
		ss.sent, ss.failed, ss.reasons = p, make(map[string]bool), nil
		ss.mu.Unlock()
		sent, err := ss.send(p, compared)
		if err != nil {
			return err
		}
		var d done
		select {
		case d = <-ss.done:
		case <-ss.down:
			return errDown
		}
		result = d.Batch
		result.Compared, result.Failed = compared, p.failed
		if d.err != "" {
			result.Err = errors.New(d.err)
		}
		ss.learn(p, sent, &result)
	}
	if !since.IsZero() {
		result.Took = time.Since(since)
	}
	pending := false
	for name := range ss.again {
		pending = pending || !ss.known[name].moving
	}
	ss.set(func(st *Status) {
		st.Synced, st.Files, st.Polled, st.Err = !pending, len(ss.known), len(ss.watch.polled), nil
		if compared || result.Changed() || len(result.Failed) > 0 || result.Err != nil {
			st.Last, st.LastAt = result, time.Now()
		}
	})
	if ss.cfg.OnSync != nil && (compared || result.Changed() || len(result.Failed) > 0 || result.Err != nil) {
		ss.cfg.OnSync(result)
	}
	return nil
}

// learn notes what the target has after a round.
func (ss *session) learn(p *plan, sent map[string]known, result *Batch) {
	ss.mu.Lock()
	failed, reasons := ss.failed, ss.reasons
	ss.sent, ss.failed, ss.reasons = nil, nil, nil
	ss.mu.Unlock()
	slices.SortStableFunc(reasons, func(a, b Failure) int { return strings.Compare(a.Path, b.Path) })
	result.Failed = append(result.Failed, reasons[:min(len(reasons), maxFailures-len(result.Failed))]...)
	replaced := make(map[string]bool)
	for name, k := range sent {
		if before, ok := ss.known[name]; ok && before.kind == dir && k.kind != dir {
			replaced[name] = true
		}
	}
	if len(replaced) > 0 {
		for name := range ss.known {
			if within(name, replaced) {
				delete(ss.known, name)
			}
		}
	}
	for name, k := range sent {
		ss.known[name] = k
	}
	for name, e := range p.touch {
		k := ss.known[name]
		k.entry = e
		ss.known[name] = k
	}
	for name := range p.remove {
		delete(ss.known, name)
	}
	result.Refused = len(failed)
	for name := range failed {
		delete(ss.known, name)
	}
}

// send writes a round, and gives what the target has then, unless it says otherwise.
func (ss *session) send(p *plan, compared bool) (map[string]known, error) {
	sent := make(map[string]known, len(p.send))
	if len(p.send) > 0 {
		out := bufio.NewWriterSize(frames{ss.w}, maxFrame)
		archive := tar.NewWriter(out)
		for _, name := range p.order() {
			e := p.send[name]
			k := known{entry: e}
			ok := true
			var err error
			if e.kind == file {
				k, ok, err = ss.sendFile(archive, p, name)
			} else {
				err = archive.WriteHeader(header(name, e))
			}
			if err != nil {
				return nil, err
			}
			if ok {
				sent[name] = k
			}
		}
		if err := cmp.Or(archive.Close(), out.Flush(), ss.w.send(kindData, nil)); err != nil {
			return nil, err
		}
	}
	l := list{w: ss.w, kind: kindTouch}
	for _, name := range slices.Sorted(maps.Keys(p.touch)) {
		if err := l.add(p.touch[name].append(nil, name)); err != nil {
			return nil, err
		}
	}
	if err := l.flush(); err != nil {
		return nil, err
	}
	l = list{w: ss.w, kind: kindRemove}
	names := slices.Sorted(maps.Keys(p.remove))
	for _, name := range slices.Backward(names) { // below before above
		if err := l.add(appendString(nil, name)); err != nil {
			return nil, err
		}
	}
	if err := l.flush(); err != nil {
		return nil, err
	}
	end := []byte{0}
	if compared {
		end[0] = 1
	}
	return sent, ss.w.send(kindEnd, end)
}

// frames writes data frames.
type frames struct{ w *wire }

func (f frames) Write(b []byte) (int, error) {
	n := 0
	for chunk := range slices.Chunk(b, maxFrame) {
		if err := f.w.send(kindData, chunk); err != nil {
			return n, err
		}
		n += len(chunk)
	}
	return n, nil
}

func header(name string, e entry) *tar.Header {
	h := &tar.Header{Format: tar.FormatPAX, Name: name, Mode: int64(e.perm), Typeflag: tar.TypeReg}
	switch e.kind {
	case dir:
		h.Typeflag = tar.TypeDir
	case link:
		h.Typeflag, h.Linkname = tar.TypeSymlink, e.link
	case file:
		h.Size, h.ModTime = e.size, time.Unix(0, e.mtime)
	}
	return h
}

// sendFile writes a file into the archive. It reports what the target has then, and whether it has. Its error is of sending; one of
// reading is noted.
func (ss *session) sendFile(archive *tar.Writer, p *plan, name string) (known, bool, error) {
	f, err := os.Open(ss.tree.full(name))
	if errors.Is(err, fs.ErrNotExist) {
		ss.again[name] |= changed
		return known{}, false, nil
	}
	var info fs.FileInfo
	if err == nil {
		defer f.Close()
		info, err = f.Stat()
	}
	if err != nil {
		p.fail(name, err)
		return known{}, false, nil
	}
	e, ok := newEntry(info)
	if !ok || e.kind != file {
		ss.again[name] |= changed
		return known{}, false, nil
	}
	if err := archive.WriteHeader(header(name, e)); err != nil {
		return known{}, false, err
	}
	h := sha256.New()
	n, readErr, err := transfer(archive, h, f, e.size, ss.buf[:])
	if err != nil {
		return known{}, false, err
	}
	after, statErr := f.Stat()
	steady := false
	if readErr == nil && statErr == nil {
		now, _ := newEntry(after)
		steady = n == e.size && now == e
	}
	if err := pad(archive, e.size-n); err != nil {
		return known{}, false, err
	}
	if readErr = cmp.Or(readErr, statErr); readErr != nil {
		p.fail(name, readErr)
	}
	if !steady && readErr == nil {
		ss.again[name] |= changed
		ss.tries[name]++
	}
	if steady || readErr == nil && n == e.size && ss.tries[name] >= maxTries {
		delete(ss.tries, name)
		delete(ss.busy, name)
		return known{entry: e, sum: [sha256.Size]byte(h.Sum(nil)), hashed: true, moving: !steady}, true, nil
	}
	discard := &tar.Header{Typeflag: tar.TypeXGlobalHeader, Name: "discard", PAXRecords: map[string]string{discardRecord: "1"}}
	return known{}, false, archive.WriteHeader(discard)
}

// transfer copies up to size bytes, and tells apart which side failed.
func transfer(to io.Writer, sum io.Writer, from io.Reader, size int64, buf []byte) (n int64, readErr, writeErr error) {
	for n < size {
		m, err := from.Read(buf[:min(int64(len(buf)), size-n)])
		if m > 0 {
			sum.Write(buf[:m]) // a hash does not fail
			if _, err := to.Write(buf[:m]); err != nil {
				return n, nil, err
			}
			n += int64(m)
		}
		if errors.Is(err, io.EOF) {
			return n, nil, nil
		}
		if err != nil {
			return n, err, nil
		}
	}
	return n, nil, nil
}

// pad fills up what the archive's header promised.
func pad(to io.Writer, n int64) error {
	zeros := make([]byte, min(n, 32<<10))
	for n > 0 {
		m, err := to.Write(zeros[:min(int64(len(zeros)), n)])
		if err != nil {
			return err
		}
		n -= int64(m)
	}
	return nil
}
