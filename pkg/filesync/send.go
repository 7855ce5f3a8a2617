package filesync

import (
	"archive/tar"
	"bufio"
	"cmp"
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"strings"
	"time"
)

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
