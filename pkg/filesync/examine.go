package filesync

import (
	"crypto/sha256"
	"errors"
	"io"
	"io/fs"
	"maps"
	"os"
	"slices"
	"time"
)

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
