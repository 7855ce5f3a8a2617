package filesync

import (
	"archive/tar"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"
)

// archive reads the data frames of one archive, the first of which has been received.
type archive struct {
	w     *wire
	rest  []byte
	ended bool
}

func (a *archive) Read(p []byte) (int, error) {
	for len(a.rest) == 0 {
		if a.ended {
			return 0, io.EOF
		}
		k, payload, err := a.w.receive()
		if err != nil {
			return 0, unexpected(err)
		}
		if k != kindData {
			return 0, fmt.Errorf("%w: a frame of kind %d within an archive", errProtocol, k)
		}
		a.rest, a.ended = payload, len(payload) == 0
	}
	n := copy(p, a.rest)
	a.rest = a.rest[n:]
	return n, nil
}

// written is a file that is there under a temporary name.
type written struct {
	name string // the entry's
	temp string
	size int64
}

// unpack reads an archive and does what it says.
func (s *serving) unpack(first []byte) error {
	if len(first) == 0 {
		return nil
	}
	a := &archive{w: s.w, rest: first}
	r := tar.NewReader(a)
	// A file is put into place when the next header does not say that it is not to be.
	var last *written
	defer func() {
		if last != nil {
			s.discard(last)
		}
	}()
	for {
		header, err := r.Next()
		if err == nil && header.Typeflag == tar.TypeXGlobalHeader {
			if _, ok := header.PAXRecords[discardRecord]; ok && last != nil {
				s.discard(last)
				last = nil
			}
			continue
		}
		if last != nil && (err == nil || errors.Is(err, io.EOF)) {
			s.putInPlace(last)
			last = nil
		}
		if errors.Is(err, io.EOF) {
			break
		}
		if err != nil {
			return archiveError(err)
		}
		name := strings.TrimSuffix(header.Name, "/")
		if err := checkPath(name); err != nil {
			return fmt.Errorf("%w: %w", errProtocol, err)
		}
		if err := s.t.remember(name); err != nil {
			return err
		}
		switch header.Typeflag {
		case tar.TypeReg:
			if last, err = s.write(name, header, r); err != nil {
				return archiveError(err)
			}
		case tar.TypeDir:
			s.makeDir(name, header)
		case tar.TypeSymlink:
			s.makeLink(name, header)
		default:
			return fmt.Errorf("%w: the archive has a record of type %q", errProtocol, header.Typeflag)
		}
	}
	// What is behind the archive's end is padding.
	if _, err := io.Copy(io.Discard, a); err != nil {
		return archiveError(err)
	}
	return nil
}

// archiveError is one of reading the archive.
func archiveError(err error) error {
	if errors.Is(err, tar.ErrHeader) || errors.Is(err, tar.ErrFieldTooLong) {
		return fmt.Errorf("%w: %w", errProtocol, err)
	}
	return unexpected(err)
}

// write makes a temporary file of what r has. The error is one of reading; one of writing is noted, and gives nil.
func (s *serving) write(name string, header *tar.Header, r io.Reader) (*written, error) {
	for key := range header.PAXRecords {
		if strings.HasPrefix(key, "GNU.sparse.") { // its size would be what it says, not what it sends
			return nil, fmt.Errorf("%w: a sparse file", errProtocol)
		}
	}
	p, err := s.local(name)
	if err != nil {
		s.failed(name, err)
		return nil, nil
	}
	temp, f, err := s.create(p)
	if err != nil {
		s.failed(name, err)
		return nil, nil
	}
	done := &written{name: name, temp: temp, size: header.Size}
	readErr, writeErr := copyFile(f, r, s.buf[:])
	if writeErr == nil && readErr == nil {
		writeErr = f.Chmod(s.mode(p, header))
	}
	if err := f.Close(); writeErr == nil {
		writeErr = err
	}
	if writeErr == nil && readErr == nil {
		writeErr = s.root.Chtimes(temp, header.ModTime, header.ModTime)
	}
	if writeErr == nil && readErr == nil {
		return done, nil
	}
	s.discard(done)
	if readErr != nil {
		return nil, readErr
	}
	s.failed(name, writeErr)
	return nil, nil
}

// copyFile tells apart which side failed.
func copyFile(to io.Writer, from io.Reader, buf []byte) (readErr, writeErr error) {
	for {
		n, err := from.Read(buf)
		if n > 0 {
			if _, writeErr = to.Write(buf[:n]); writeErr != nil {
				return nil, writeErr
			}
		}
		if errors.Is(err, io.EOF) {
			return nil, nil
		}
		if err != nil {
			return err, nil
		}
	}
}

// mode is what a file gets: its own, or if the source has none that of the file in its place.
func (s *serving) mode(p string, header *tar.Header) fs.FileMode {
	if s.noModes {
		if info, err := s.root.Lstat(p); err == nil && info.Mode().IsRegular() {
			return info.Mode().Perm()
		}
	}
	return fs.FileMode(header.Mode).Perm()
}

func tempName(p string) string { return filepath.Join(filepath.Dir(p), tempPrefix+rand.Text()) }

// create makes a temporary file beside p.
func (s *serving) create(p string) (string, *os.File, error) {
	temp := tempName(p)
	var f *os.File
	err := s.below(p, func() (err error) {
		f, err = s.root.OpenFile(temp, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o600)
		return err
	})
	return temp, f, err
}

// below does something in p's directory, if need be after it has made that: the container may have removed it.
func (s *serving) below(p string, do func() error) error {
	err := do()
	if errors.Is(err, fs.ErrNotExist) && s.root.MkdirAll(filepath.Dir(p), 0o755) == nil {
		err = do()
	}
	return err
}

func (s *serving) discard(f *written) {
	if err := s.root.Remove(f.temp); err != nil && !errors.Is(err, fs.ErrNotExist) {
		s.t.cfg.Logger.Warn("removing a temporary file", "path", f.temp, "err", err)
	}
}

// putInPlace puts a file where it belongs.
func (s *serving) putInPlace(f *written) {
	if err := s.replace(f.name, f.temp); err != nil {
		s.discard(f)
		s.failed(f.name, err)
		return
	}
	s.count(Batch{Files: 1, Bytes: f.size})
}

// replace renames what is at temp to the entry's path.
func (s *serving) replace(name, temp string) error {
	p, err := s.local(name)
	if err != nil {
		return err
	}
	if info, err := s.root.Lstat(p); err == nil && info.IsDir() {
		if err := s.clear(name, p); err != nil {
			return err
		}
	}
	return s.root.Rename(temp, p)
}

// clear removes a directory in whose place something else comes, with what a Source named in it.
func (s *serving) clear(name, p string) error {
	var below []string
	for other := range s.t.named {
		if strings.HasPrefix(other, name+"/") {
			below = append(below, other)
		}
	}
	slices.Sort(below)
	for _, other := range slices.Backward(below) {
		s.remove(other)
	}
	if err := s.root.Remove(p); err != nil {
		if s.holds(p) {
			return errHolds
		}
		return err
	}
	return nil
}

func (s *serving) makeDir(name string, header *tar.Header) {
	p, err := s.local(name)
	if err != nil {
		s.failed(name, err)
		return
	}
	mode := fs.FileMode(header.Mode).Perm() | ownerAll
	info, err := s.root.Lstat(p)
	if err == nil && !info.IsDir() {
		err = s.root.Remove(p)
		info = nil
	}
	made := false
	if info == nil || err != nil {
		err = s.below(p, func() error { return s.root.Mkdir(p, mode) })
		made = true
	}
	if err == nil && !s.noModes && (made || info.Mode().Perm() != mode) {
		err = s.root.Chmod(p, mode) // Mkdir's is subject to the umask
	}
	if err != nil {
		s.failed(name, err)
		return
	}
	s.count(Batch{Files: 1})
}

func (s *serving) makeLink(name string, header *tar.Header) {
	p, err := s.local(name)
	if err != nil {
		s.failed(name, err)
		return
	}
	temp := tempName(p)
	if err = s.below(p, func() error { return s.root.Symlink(header.Linkname, temp) }); err == nil {
		if err = s.replace(name, temp); err != nil {
			s.discard(&written{temp: temp})
		}
	}
	if err != nil {
		s.failed(name, err)
		return
	}
	s.count(Batch{Files: 1})
}

func (s *serving) touch(name string, e entry) {
	p, err := s.local(name)
	if err != nil {
		s.failed(name, err)
		return
	}
	// Chmod and Chtimes follow links: one that has come into the file's place is to be left alone.
	info, err := s.root.Lstat(p)
	if err == nil {
		if here, ok := newEntry(info); !ok || here.kind != e.kind {
			err = errors.New("it is something else here than on the laptop")
		}
	}
	if err == nil && !s.noModes && e.kind != link {
		err = s.root.Chmod(p, e.perm)
	}
	if err == nil && e.kind == file {
		mtime := time.Unix(0, e.mtime)
		err = s.root.Chtimes(p, mtime, mtime)
	}
	if err != nil {
		s.failed(name, err)
		return
	}
	s.count(Batch{Touched: 1})
}

// remove takes away a path that a Source named. A directory that holds other things stays.
func (s *serving) remove(name string) {
	if _, ok := s.t.named[name]; !ok {
		return
	}
	p, err := s.local(name)
	if err == nil {
		err = s.root.Remove(p)
	}
	if err == nil {
		s.count(Batch{Removed: 1})
	}
	if err != nil && !errors.Is(err, fs.ErrNotExist) && !s.holds(p) {
		s.failed(name, err)
		return
	}
	delete(s.t.named, name)
}

func (s *serving) count(b Batch) {
	for _, sum := range []*Batch{&s.round, &s.t.pending} {
		sum.Files += b.Files
		sum.Touched += b.Touched
		sum.Removed += b.Removed
		sum.Bytes += b.Bytes
	}
}

func (s *serving) failed(name string, err error) {
	if pathErr, ok := errors.AsType[*fs.PathError](err); ok {
		err = pathErr.Err // the path is the entry's, not that of a temporary file
	}
	if linkErr, ok := errors.AsType[*os.LinkError](err); ok {
		err = linkErr.Err
	}
	s.round.Failed = append(s.round.Failed, Failure{name, err})
	if len(s.round.Failed) >= maxFailures {
		s.sendFailed()
	}
}

// sendFailed tells the source. An error of sending is one that receiving has too.
func (s *serving) sendFailed() {
	failed := list{w: s.w, kind: kindFailed}
	for _, f := range s.round.Failed {
		if failed.add(appendString(appendString(nil, f.Path), f.Err.Error())) != nil {
			break
		}
		if len(s.t.pending.Failed) < maxFailures {
			s.t.pending.Failed = append(s.t.pending.Failed, f)
		}
	}
	s.round.Failed = s.round.Failed[:0]
	if err := failed.flush(); err != nil {
		s.t.cfg.Logger.Debug("naming what failed", "err", err)
	}
}

func (s *serving) endRound(compared bool) error {
	s.sendFailed()
	b := s.t.pending
	b.Compared = compared
	s.t.pending = Batch{}
	var said string
	if s.t.cfg.OnSync != nil && (compared || b.Changed()) {
		if err := s.t.cfg.OnSync(b); err != nil {
			said = err.Error()
		}
	}
	done := appendDone(nil, s.round, said[:min(len(said), maxPath)])
	s.round, s.inRound = Batch{}, false
	return s.w.send(kindDone, done)
}
