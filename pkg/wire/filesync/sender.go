package filesync

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"math"
	"slices"
	"strings"
	"time"

	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/remotefs"

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

	aliveEvery = 5 * time.Second
	silence    = time.Minute // without an answer, until the connection counts as broken
)

// errSilent ends a connection without answers.
var errSilent = fmt.Errorf("the other end of the file sync has not answered within %v", silence)

// errRoot ends a connection, which is about either.
var errRoot = errors.New("a file became a directory, or a directory a file")

// sender is one connection of a Source.
type sender struct {
	*Source
	client   *remotefs.Client
	dest     string               // what the Server calls the destination
	end      func(error)          // ends the connection
	rejected map[string]entry     // entries that could not be read, written or (kind other) removed, until they change
	changing map[string]time.Time // files that change while they are read, since when; they are read again after a rest

	completed bool // the container had everything once
}

func newSender(s *Source, client *remotefs.Client, dest string, end func(error)) *sender {
	return &sender{Source: s, client: client, dest: dest, end: end, rejected: make(map[string]entry),
		changing: make(map[string]time.Time)}
}

// keepAlive ends a connection whose other end does not answer.
func (se *sender) keepAlive(ctx context.Context) {
	for wakeup.Pause(ctx, aliveEvery) {
		late := time.AfterFunc(silence, func() { se.end(errSilent) })
		_, _ = se.client.Do(ctx, remotefs.Request{Op: remotefs.OpStat, Path: "."}) // any answer will do
		late.Stop()
	}
}

// run sends what differs and then what changes, until ctx ends or an error breaks the connection.
func (se *sender) run(ctx context.Context) error {
	se.set(func(st *Status) { st.Synced = false })
	now := changes{all: true, since: time.Now()}
	if se.tree.only == "" && se.dest != "." {
		_, err := se.client.Do(ctx, remotefs.Request{Op: remotefs.OpMkdir, Path: se.dest, Mode: 0o755})
		if err != nil {
			return fmt.Errorf("cannot create the directory %s at the other end: %s", se.dest, remotefs.Text(err))
		}
	}
	if err := se.verify(ctx); err != nil {
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
		if has, ok := se.has[name]; ok {
			se.has[name] = received{stored: has.stored}
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

// plan compares the entries of the laptop with those of the container.
func (se *sender) plan() plan {
	var p plan
	t := se.tree
	for name, e := range t.entries {
		if rejected, ok := se.rejected[name]; se.has[name].sent != e && (!ok || rejected != e) && !se.waits(name, e) {
			p.send = append(p.send, name)
		}
	}
	for name, has := range se.has {
		_, there := t.entries[name]
		keeps := se.rejected[name].kind == other || t.unreadableAbove(name)
		if !there && !keeps && !t.ignored.above(name, has.stored.kind == dir) {
			p.remove = append(p.remove, name)
		}
	}
	slices.SortFunc(p.send, func(a, b string) int {
		return cmp.Or(se.rank(a)-se.rank(b), strings.Compare(a, b))
	})
	slices.SortFunc(p.remove, backward)
	for name := range se.changing {
		if e, ok := t.entries[name]; !ok || e == se.has[name].sent || e == se.rejected[name] {
			delete(se.changing, name)
		}
	}
	return p
}

// rank orders entries to send: directories, parents first; files and links; big files.
func (se *sender) rank(name string) int {
	switch e := se.tree.entries[name]; {
	case e.kind == dir:
		return depth(name)
	case e.size < bigFile:
		return math.MaxInt - 1
	}
	return math.MaxInt
}

func depth(name string) int { return strings.Count(name, "/") }

// backward orders children before parents.
func backward(a, b string) int { return cmp.Or(depth(b)-depth(a), strings.Compare(b, a)) }

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
		if err := se.deliver(ctx, p, &result); err != nil {
			return err
		}
	}
	if !since.IsZero() {
		result.Took = time.Since(since)
	}
	report := result.Complete || result.Changed() || len(result.Failed) > 0
	se.set(func(st *Status) {
		st.Synced, st.Files, st.Err = len(se.changing) == 0, len(se.has), nil
		if report {
			st.Last, st.LastAt = result, time.Now()
		}
	})
	if report && se.cfg.OnSync != nil {
		se.cfg.OnSync(result)
	}
	return nil
}
