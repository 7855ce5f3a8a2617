package filesync

import (
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fxamacker/cbor/v2"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/remotefs"
)

// TestChangesAreCopied applies steps to the laptop. After each, both directories are equal and the batch counts the
// changes.
func TestChangesAreCopied(t *testing.T) {
	type step struct {
		name   string
		change func(t *testing.T, src string)
		want   Batch // what is compared: Files, Removed
	}
	file := func(name, content string) func(*testing.T, string) {
		return func(t *testing.T, src string) { write(t, src, name, content) }
	}
	at := func(src, name string) string { return filepath.Join(src, filepath.FromSlash(name)) }
	steps := []step{
		{"create", file("a.txt", "one"), Batch{Files: 1}},
		{"write", file("a.txt", "two, longer"), Batch{Files: 1}},
		{"same-size", file("a.txt", "TWO, LONGER"), Batch{Files: 1}},
		{"shrink", file("a.txt", ""), Batch{Files: 1}},
		{"new-directories", file("x/y/z/b.txt", "b"), Batch{Files: 4}},
		{"in-new-directory", file("x/y/z/c.txt", "c"), Batch{Files: 1}},
		{"mode", func(t *testing.T, src string) { must(t, os.Chmod(at(src, "a.txt"), 0o755)) }, Batch{Files: 1}},
		{"read-only", func(t *testing.T, src string) { must(t, os.Chmod(at(src, "a.txt"), 0o400)) }, Batch{Files: 1}},
		{"directory-mode", func(t *testing.T, src string) { must(t, os.Chmod(at(src, "x/y"), 0o750)) }, Batch{Files: 1}},
		{"time", func(t *testing.T, src string) {
			must(t, os.Chtimes(at(src, "x/y/z/c.txt"), time.Now(), time.Unix(1700000000, 123456789)))
		}, Batch{Files: 1}},
		{"empty-directory", func(t *testing.T, src string) { must(t, os.Mkdir(at(src, "empty"), 0o700)) }, Batch{Files: 1}},
		{"rename", func(t *testing.T, src string) { must(t, os.Rename(at(src, "a.txt"), at(src, "x/a2.txt"))) }, Batch{Files: 1, Removed: 1}},
		{"rename-directory", func(t *testing.T, src string) { must(t, os.Rename(at(src, "x/y"), at(src, "w"))) }, Batch{Files: 4, Removed: 4}},
		{"in-renamed-directory", file("w/z/d.txt", "d"), Batch{Files: 1}},
		{"link", func(t *testing.T, src string) { must(t, os.Symlink("w/z/d.txt", at(src, "l"))) }, Batch{Files: 1}},
		{"link-dangling", func(t *testing.T, src string) { must(t, os.Symlink("nowhere", at(src, "w/l"))) }, Batch{Files: 1}},
		{"link-outside", func(t *testing.T, src string) { must(t, os.Symlink("/etc/passwd", at(src, "abs"))) }, Batch{Files: 1}},
		{"link-directory", func(t *testing.T, src string) { must(t, os.Symlink("w", at(src, "wl"))) }, Batch{Files: 1}},
		{"link-elsewhere", func(t *testing.T, src string) {
			must(t, os.Remove(at(src, "l")))
			must(t, os.Symlink("w/z/b.txt", at(src, "l")))
		}, Batch{Files: 1}},
		{"link-to-file", func(t *testing.T, src string) { must(t, os.Remove(at(src, "l"))); write(t, src, "l", "file") }, Batch{Files: 1}},
		{"directory-to-file", func(t *testing.T, src string) { must(t, os.RemoveAll(at(src, "w"))); write(t, src, "w", "file") }, Batch{Files: 1, Removed: 5}},
		{"file-to-directory", func(t *testing.T, src string) { must(t, os.Remove(at(src, "w"))); write(t, src, "w/f", "f") }, Batch{Files: 2}},
		{"directory-to-link", func(t *testing.T, src string) {
			must(t, os.RemoveAll(at(src, "w")))
			must(t, os.Symlink("x", at(src, "w")))
		}, Batch{Files: 1, Removed: 1}},
		{"names", func(t *testing.T, src string) {
			write(t, src, "a b/ü\n\t\"'%", "x")
			write(t, src, "-rf/*", "x")
			write(t, src, "a\\b/\xff", "x")
			write(t, src, strings.Repeat("d/", 100)+strings.Repeat("n", 250), "x")
		}, Batch{Files: 107}},
		{"remove-directories", func(t *testing.T, src string) {
			must(t, os.RemoveAll(at(src, "d")))
			must(t, os.RemoveAll(at(src, "a b")))
		}, Batch{Removed: 103}},
		{"pipe-in-its-place", func(t *testing.T, src string) {
			must(t, os.Remove(at(src, "l")))
			must(t, exec.Command("mkfifo", at(src, "pipe")).Run())
		}, Batch{Removed: 1}},
	}
	r := newRig(t, options{})
	var pipes []string
	changes := 0
	for _, s := range steps {
		ok := t.Run(s.name, func(t *testing.T) {
			r.change(func() { s.change(t, r.src) })
			var sum Batch
			want := s.want
			for sum.Files+sum.Removed < want.Files+want.Removed {
				b := r.next()
				if len(b.Failed) > 0 || b.Complete || b.Took <= 0 {
					t.Fatalf("%+v", b)
				}
				sum.Files, sum.Removed = sum.Files+b.Files, sum.Removed+b.Removed
			}
			if sum.Files != want.Files || sum.Removed != want.Removed {
				t.Errorf("%+v, want %+v", sum, want)
			}
			if s.name == "pipe-in-its-place" {
				pipes = append(pipes, "pipe")
			}
			for _, p := range pipes {
				must(t, os.Remove(at(r.src, p)))
			}
			r.same()
		})
		if !ok {
			return
		}
	}
	// The container is told of each step.
	r.stop()
	close(r.taken)
	for got := range r.taken {
		if got.changes {
			changes++
		}
	}
	if changes < len(steps) {
		t.Errorf("the container was told of %d changes, want %d", changes, len(steps))
	}
}

// TestReconnectSendsOnlyWhatDiffers checks that a new connection sends only what the target does not have.
func TestReconnectSendsOnlyWhatDiffers(t *testing.T) {
	r := newRig(t, options{before: func(r *rig) {
		for _, name := range []string{"equal", "touched", "changed", "mode", "gone", "d/equal"} {
			write(t, r.src, name, "content of "+name)
		}
		must(t, os.Symlink("equal", filepath.Join(r.src, "link")))
		write(t, r.dst, "image/own", "of the image")
	}})
	r.breakOff()
	must(t, os.Chtimes(filepath.Join(r.dst, "touched"), time.Time{}, time.Unix(1600000000, 5)))
	write(t, r.dst, "changed", "CONTENT of changed, in the container")
	must(t, os.Chmod(filepath.Join(r.dst, "mode"), 0o600))
	must(t, os.Remove(filepath.Join(r.dst, "gone")))
	must(t, os.Remove(filepath.Join(r.dst, "link")))
	must(t, os.Symlink("elsewhere", filepath.Join(r.dst, "link")))
	write(t, r.src, "new", "new")
	r.connect()
	b := r.complete()
	want := int64(len("content of touched") + len("content of changed") + len("content of mode") + len("content of gone") + len("new"))
	if b.Files != 6 || b.Removed != 0 || b.Bytes != want || len(b.Failed) > 0 {
		t.Errorf("%+v, want 6 files of %d bytes", b, want)
	}
	must(t, os.RemoveAll(filepath.Join(r.dst, "image")))
	r.same()
	if st := r.source.Status(); !st.Synced || st.Files != 9 || st.Err != nil {
		t.Errorf("%+v", st)
	}
}

// TestImageFilesStay checks that files of the image stay, also across connections, and that a new Source does not know
// what an earlier one has sent.
func TestImageFilesStay(t *testing.T) {
	r := newRig(t, options{before: func(r *rig) {
		write(t, r.dst, "image", "image")
		write(t, r.dst, "pkg/image", "image")
		write(t, r.dst, "pkg/both", "both")
		write(t, r.src, "pkg/both", "both")
		write(t, r.src, "pkg/sub/one", "one")
	}})
	must(t, os.RemoveAll(filepath.Join(r.src, "pkg")))
	for exists(r.dst, "pkg/sub") || exists(r.dst, "pkg/both") {
		r.next()
	}
	if read(t, r.dst, "image") != "image" || read(t, r.dst, "pkg/image") != "image" {
		t.Fatal("a file of the image was removed")
	}

	write(t, r.src, "kept", "kept")
	write(t, r.src, "dropped", "dropped")
	for !exists(r.dst, "kept") || !exists(r.dst, "dropped") {
		r.next()
	}
	r.breakOff()
	must(t, os.Remove(filepath.Join(r.src, "dropped")))
	write(t, r.src, "kept", "changed")
	write(t, r.src, "later", "later")
	r.connect()
	if b := r.complete(); b.Removed != 1 || b.Files != 2 {
		t.Errorf("after a reconnection: %+v", b)
	}
	if exists(r.dst, "dropped") || read(t, r.dst, "kept") != "changed" || read(t, r.dst, "later") != "later" || !exists(r.dst, "image") {
		t.Error("after a reconnection:", snapshot(t, r.dst))
	}

	r.stop()
	must(t, os.Remove(filepath.Join(r.src, "kept")))
	r = newRig(t, options{src: r.src, dst: r.dst})
	if !exists(r.dst, "kept") {
		t.Error("a new source removed files that it had not sent")
	}
	must(t, os.Remove(filepath.Join(r.src, "later")))
	for exists(r.dst, "later") {
		r.next()
	}

	// A directory of the image is not replaced by a file; the batch names the failure.
	write(t, r.src, "pkg", "a file")
	testenv.Until(t, "the failure is reported", func() bool {
		failed := r.source.Status().Last.Failed
		return len(failed) == 1 && failed[0].Path == "pkg" && failed[0].Err.Error() == errHolds.Error()
	})
	if read(t, r.dst, "pkg/image") != "image" {
		t.Error("the directory of the image was removed")
	}
}

// TestTargetStaysInside checks that symbolic links of the image or the laptop do not lead the target out of its
// directory.
func TestTargetStaysInside(t *testing.T) {
	outside := t.TempDir()
	write(t, outside, "secret", "secret")
	r := newRig(t, options{before: func(r *rig) {
		must(t, os.Symlink(outside, filepath.Join(r.dst, "link")))
		must(t, os.Symlink(filepath.Join(outside, "secret"), filepath.Join(r.dst, "file")))
		write(t, r.src, "link/secret", "overwritten")
		write(t, r.src, "file", "overwritten")
	}})
	r.same()
	if got := snapshot(t, outside); len(got) != 1 || read(t, outside, "secret") != "secret" {
		t.Errorf("outside: %v", got)
	}
}

// TestEachSaveIsOneChange checks that each kind of save is one change, and that a reader never sees the file missing
// or half-written.
func TestEachSaveIsOneChange(t *testing.T) {
	saves := []struct {
		name string
		save func(p, content string) error
	}{
		{"write-in-place", func(p, content string) error { return os.WriteFile(p, []byte(content), 0o644) }},
		{"rename-over", func(p, content string) error { // most editors, sed -i
			temp := filepath.Join(filepath.Dir(p), ".#tmp123")
			if err := os.WriteFile(temp, []byte(content), 0o644); err != nil {
				return err
			}
			return os.Rename(temp, p)
		}},
		{"backup-and-new", func(p, content string) error { // vim with backupcopy=no
			return errors.Join(os.Rename(p, p+"~"), os.WriteFile(p, []byte(content), 0o644), os.Chmod(p, 0o644), os.Remove(p+"~"))
		}},
		{"remove-and-new", func(p, content string) error {
			return errors.Join(os.Remove(p), os.WriteFile(p, []byte(content), 0o644))
		}},
		{"vim", func(p, content string) error { return vim(p, content, "nobackup writebackup backupcopy=no") }},
		{"vim-in-place", func(p, content string) error { return vim(p, content, "nobackup writebackup backupcopy=yes") }},
		{"sed", func(p, content string) error {
			return exec.Command("sed", "-i", "s/.*/"+content+"/", p).Run()
		}},
	}
	for _, s := range saves {
		t.Run(s.name, func(t *testing.T) {
			if bin, _, _ := strings.Cut(s.name, "-"); bin == "vim" || bin == "sed" {
				if _, err := exec.LookPath(bin); err != nil {
					t.Skip(err)
				}
			}
			r := newRig(t, options{before: func(r *rig) { write(t, r.src, "main.go", "version 0") }})
			stop := make(chan struct{})
			var watching sync.WaitGroup
			watching.Go(func() {
				for {
					select {
					case <-stop:
						return
					default:
					}
					if b, err := os.ReadFile(filepath.Join(r.dst, "main.go")); err != nil || !strings.HasPrefix(string(b), "version ") {
						t.Errorf("the container reads %q, %v", b, err)
						return
					}
					time.Sleep(100 * time.Microsecond) // leaves the processor to others
				}
			})
			for i := 1; i <= 5; i++ {
				content := fmt.Sprint("version ", i)
				r.change(func() { must(t, s.save(filepath.Join(r.src, "main.go"), content)) })
				b := r.next()
				if b.Files != 1 || b.Removed != 0 {
					t.Errorf("a save is %+v", b)
				}
				if got := strings.TrimSpace(read(t, r.dst, "main.go")); got != content {
					t.Errorf("after the acknowledgement there is %q, want %q", got, content)
				}
			}
			close(stop)
			watching.Wait()
			r.same()
			select {
			case b := <-r.sent:
				t.Errorf("more than one batch for a save: %+v", b)
			default:
			}
		})
	}
}

func vim(p, content, options string) error {
	cmd := exec.Command("vim", "-u", "NONE", "-i", "NONE", "-N", "-es", "-c", "set "+options, "-c", "%s/.*/"+content+"/", "-c", "wq", p)
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("vim: %w: %s", err, out)
	}
	return nil
}

// TestGitCheckoutIsFollowed switches between branches that change, rename, add and remove files.
func TestGitCheckoutIsFollowed(t *testing.T) {
	src := t.TempDir()
	git := func(args ...string) {
		t.Helper()
		cmd := exec.Command("git", append([]string{"-C", src, "-c", "user.name=t", "-c", "user.email=t@example.org", "-c", "init.defaultBranch=main"}, args...)...)
		cmd.Env = append(os.Environ(), "GIT_CONFIG_GLOBAL=/dev/null", "GIT_CONFIG_SYSTEM=/dev/null")
		if out, err := cmd.CombinedOutput(); err != nil {
			t.Fatalf("git %v: %v: %s", args, err, out)
		}
	}
	git("init")
	for i := range 200 {
		write(t, src, fmt.Sprintf("pkg%d/file%d.go", i%20, i), strings.Repeat(fmt.Sprintln("line", i), 20))
	}
	git("add", ".")
	git("commit", "-m", "main")
	git("checkout", "-b", "other")
	git("mv", "pkg1", "moved")
	git("mv", "pkg2/file2.go", "pkg3/renamed.go")
	git("rm", "-r", "pkg4")
	write(t, src, "pkg5/file5.go", "changed")
	write(t, src, "new/deep/er/file.go", "new")
	must(t, os.Remove(filepath.Join(src, "pkg6/file6.go")))
	write(t, src, "pkg6/file6.go/now/a/directory", "x")
	git("add", ".")
	git("commit", "-m", "other")
	git("checkout", "main")

	r := newRig(t, options{src: src})
	check := func() {
		t.Helper()
		testenv.Eventually(t, 30*time.Second, func() error {
			a, b := snapshot(t, src), snapshot(t, r.dst)
			for p := range a {
				if p == ".git" || strings.HasPrefix(p, ".git/") {
					delete(a, p)
				}
			}
			if len(a) != len(b) {
				return fmt.Errorf("%d here, %d there", len(a), len(b))
			}
			for p := range a {
				if a[p] != b[p] {
					return fmt.Errorf("%s: %.100s, %.100s", p, a[p], b[p])
				}
			}
			return nil
		})
	}
	check()
	for range 5 {
		git("checkout", "other")
		check()
		git("checkout", "main")
		check()
	}
	// Switch without pauses, as a rebase does.
	for range 5 {
		git("checkout", "other")
		git("checkout", "main")
	}
	git("checkout", "other")
	check()
}

// TestReconnectLosesNothing checks that a connection that breaks at any point loses nothing.
func TestReconnectLosesNothing(t *testing.T) {
	var left atomic.Int64
	left.Store(1 << 40)
	r := newRig(t, options{wrap: func(c net.Conn) net.Conn { return &breaking{c, &left} }})
	for i := range 40 {
		for j := range 10 {
			write(t, r.src, fmt.Sprintf("d%d/f%d", i%7, j), strings.Repeat("x", 1+(i*7919+j*104729)%20000)+fmt.Sprint(i))
		}
		if i%3 == 0 {
			must(t, os.RemoveAll(filepath.Join(r.src, fmt.Sprintf("d%d", (i+3)%7))))
		}
		left.Store(int64(1 + i*3571%70000))
		testenv.Until(t, "synced", func() bool {
			if left.Load() < 0 {
				left.Store(1 << 40) // it broke once
			}
			return r.source.Status().Synced && len(snapshot(t, r.src)) == len(snapshot(t, r.dst))
		})
		left.Store(1 << 40)
		r.same()
	}
	for p := range snapshot(t, r.dst) {
		if strings.Contains(p, remotefs.AsidePrefix) {
			t.Errorf("%s was left", p)
		}
	}
}

// breaking is a connection that fails after some bytes.
type breaking struct {
	net.Conn
	left *atomic.Int64
}

func (c *breaking) Write(b []byte) (int, error) {
	if left := c.left.Add(-int64(len(b))); left < 0 {
		c.Conn.Write(b[:max(0, int64(len(b))+left)])
		c.Conn.Close()
		return 0, errCut
	}
	return c.Conn.Write(b)
}

// TestSyncedAfterBreak checks that the container is told of files whose connection broke after they were written.
func TestSyncedAfterBreak(t *testing.T) {
	var hold atomic.Bool
	r := newRig(t, options{wrap: func(c net.Conn) net.Conn { return &noEnd{c, &hold} }})
	<-r.taken
	hold.Store(true)
	r.change(func() { write(t, r.src, "d/a", "a") })
	testenv.Until(t, "written", func() bool { return exists(r.dst, "d/a") })
	testenv.Until(t, "connected again", func() bool { return !hold.Load() })
	if b := r.complete(); b.Files != 0 {
		t.Errorf("the file was sent again: %+v", b)
	}
	if b := <-r.taken; !b.changes || !b.all {
		t.Errorf("the container was told %+v", b)
	}
	// A connection without any difference is no change.
	r.breakOff()
	r.connect()
	r.complete()
	if b := <-r.taken; b.changes || !b.all {
		t.Errorf("the container was told %+v", b)
	}
}

// TestSaveIsOneRequest checks that the save of a file takes one round trip, and that the container is told.
func TestSaveIsOneRequest(t *testing.T) {
	var asked ops
	r := newRig(t, options{before: func(r *rig) { write(t, r.src, "a", "a") },
		wrap: func(c net.Conn) net.Conn { return &counting{c, &asked} }})
	<-r.taken
	asked.take()
	r.change(func() { write(t, r.src, "a", "saved") })
	r.next()
	if got := asked.take(); !slices.Equal(got, []remotefs.Op{remotefs.OpPut}) {
		t.Errorf("a save is %v", got)
	}
	if b := <-r.taken; !b.changes || b.all {
		t.Errorf("the container was told %+v", b)
	}
	r.change(func() { write(t, r.src, "b", "b"); write(t, r.src, "c", "c") })
	r.next()
	if got := asked.take(); len(got) < 2 || got[len(got)-1] != remotefs.OpSynced { // puts may share a Write
		t.Errorf("two saves are %v", got)
	}
}

// ops are the operations that a source has asked for, but for those that keep the connection alive.
type ops struct {
	mu  sync.Mutex
	all []remotefs.Op
}

func (o *ops) take() []remotefs.Op {
	o.mu.Lock()
	defer o.mu.Unlock()
	all := o.all
	o.all = nil
	return all
}

type counting struct {
	net.Conn
	asked *ops
}

func (c *counting) Write(b []byte) (int, error) {
	var r remotefs.Request
	if cbor.Unmarshal(b[4:], &r) == nil && r.Op != remotefs.OpStat {
		c.asked.mu.Lock()
		c.asked.all = append(c.asked.all, r.Op)
		c.asked.mu.Unlock()
	}
	return c.Conn.Write(b)
}

// noEnd closes the connection instead of sending the end of a round.
type noEnd struct {
	net.Conn
	on *atomic.Bool
}

func (c *noEnd) Write(b []byte) (int, error) {
	var r remotefs.Request
	if cbor.Unmarshal(b[4:], &r) == nil && r.Op == remotefs.OpSynced && c.on.CompareAndSwap(true, false) {
		c.Conn.Close()
		return 0, errCut
	}
	return c.Conn.Write(b)
}

// TestChangeWithinTickIsCopied changes a file twice, with the same size, within one tick of a file system with
// timestamps in seconds.
func TestChangeWithinTickIsCopied(t *testing.T) {
	r := newRig(t, options{})
	now := time.Now().Truncate(time.Second)
	p := filepath.Join(r.src, "a")
	write(t, r.src, "a", "aaa")
	must(t, os.Chtimes(p, now, now))
	for read(t, r.dst, "a") != "aaa" {
		r.next()
	}
	testenv.Until(t, "the time too", func() bool {
		info, err := os.Stat(filepath.Join(r.dst, "a"))
		return err == nil && info.ModTime().Equal(now)
	})
	f, err := os.OpenFile(p, os.O_WRONLY, 0)
	must(t, err)
	_, err = f.WriteString("bbb")
	must(t, errors.Join(err, f.Close(), os.Chtimes(p, now, now)))
	for read(t, r.dst, "a") != "bbb" {
		r.next()
	}
}

// TestRecentFileWaits checks that a file written within the last tick of the clock is not sent yet, because it may be
// written again with the same time, and that a big file has to rest first.
func TestRecentFileWaits(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := NewSource(SourceConfig{Dir: t.TempDir(), Dial: (&rig{}).dial, Logger: discarding()})
		se := newSender(s, nil, ".", nil)
		for name, e := range map[string]struct {
			age  time.Duration
			size int64
		}{
			"future":   {-time.Hour, 1},
			"recent":   {tick / 2, 1},
			"settled":  {tick, 1},
			"big":      {rest / 2, bigFile},
			"rested":   {rest, bigFile},
			"big-once": {rest / 2, bigFile - 1},
		} {
			se.tree.entries[name] = entry{kind: file, size: e.size, mtime: time.Now().Add(-e.age).UnixNano()}
		}
		if got, want := se.plan().send, []string{"big-once", "future", "settled", "rested"}; !slices.Equal(got, want) {
			t.Errorf("%q are sent, want %q", got, want)
		}
		if waiting := slices.Sorted(maps.Keys(se.changing)); !slices.Equal(waiting, []string{"big", "recent"}) {
			t.Errorf("%q wait", waiting)
		}
	})
}

func TestIgnoredFilesAreNotCopied(t *testing.T) {
	r := newRig(t, options{before: func(r *rig) {
		write(t, r.src, ".gitignore", "node_modules/\n*.log\n*.secret\n")
		write(t, r.src, "node_modules/x/index.js", "x")
		write(t, r.src, "a.log", "log")
		write(t, r.src, "b/my.secret", "secret")
		write(t, r.src, ".git/HEAD", "ref")
		write(t, r.src, ".main.go.swp", "vim's")
		write(t, r.src, "main.go", "main")
	}})
	has := func(want ...string) {
		t.Helper()
		got := snapshot(t, r.dst)
		ok := len(got) == len(want)
		for _, p := range want {
			ok = ok && got[p] != ""
		}
		if !ok {
			t.Fatalf("there is %v, want %v", got, want)
		}
	}
	has(".gitignore", "b", "main.go")
	// A change of the file, also by vim, never sends everything again.
	gitignore := filepath.Join(r.src, ".gitignore")
	r.change(func() { must(t, vimless(gitignore, "node_modules/\n*.secret\n")) })
	for !exists(r.dst, "a.log") {
		r.next()
	}
	has(".gitignore", "b", "main.go", "a.log")
	// Newly ignored files stay, and are not removed with the ignore file.
	r.change(func() { write(t, r.src, ".gitignore", "node_modules/\n*.log\n*.secret\nmain.go\n") })
	for read(t, r.dst, ".gitignore") != read(t, r.src, ".gitignore") {
		r.next()
	}
	must(t, os.Remove(filepath.Join(r.src, "main.go")))
	must(t, os.Remove(filepath.Join(r.src, "a.log")))
	write(t, r.src, "marker", "")
	for !exists(r.dst, "marker") {
		r.next()
	}
	has(".gitignore", "b", "main.go", "a.log", "marker")
	r.breakOff()
	r.connect()
	r.complete()
	has(".gitignore", "b", "main.go", "a.log", "marker")
	// .kubevpnignore replaces .gitignore.
	write(t, r.src, ".kubevpnignore", "/b\n*.secret\n")
	for !exists(r.dst, "node_modules/x/index.js") {
		r.next()
	}
}

func vimless(p, content string) error {
	return errors.Join(os.Rename(p, p+"~"), os.WriteFile(p, []byte(content), 0o644), os.Remove(p+"~"))
}

func TestOneFileIsCopied(t *testing.T) {
	for _, tt := range []struct{ name, dst, at string }{
		{"new-name", "etc/conf.yaml", "etc/conf.yaml"},
		{"into-directory", ".", "app.yaml"},
	} {
		t.Run(tt.name, func(t *testing.T) {
			dir, dst := t.TempDir(), t.TempDir()
			write(t, dir, "app.yaml", "one")
			write(t, dir, "other", "other")
			r := newRig(t, options{src: filepath.Join(dir, "app.yaml"), dst: filepath.Join(dst, tt.dst)})
			if read(t, dst, tt.at) != "one" {
				t.Fatal(snapshot(t, dst))
			}
			write(t, dir, "other", "changed")
			r.change(func() { must(t, vimless(filepath.Join(dir, "app.yaml"), "two")) })
			if b := r.next(); b.Files != 1 || read(t, dst, tt.at) != "two" {
				t.Errorf("%+v: %v", b, snapshot(t, dst))
			}
			must(t, os.Remove(filepath.Join(dir, "app.yaml")))
			if b := r.next(); b.Removed != 1 || exists(dst, tt.at) {
				t.Errorf("%+v: %v", b, snapshot(t, dst))
			}
			r.change(func() { write(t, dir, "app.yaml", "three") })
			if b := r.next(); b.Files != 1 || read(t, dst, tt.at) != "three" {
				t.Errorf("%+v: %v", b, snapshot(t, dst))
			}
			if exists(dst, "other") || exists(dst, "etc/other") {
				t.Error("another file was sent")
			}
		})
	}
}

// TestRenameWithIgnoreFile renames a directory and changes the ignore file in one batch, which makes the source read
// everything. A later save in the directory must arrive under the new name.
func TestRenameWithIgnoreFile(t *testing.T) {
	r := newRig(t, options{before: func(r *rig) { write(t, r.src, "old/deep/a", "a") }})
	r.change(func() {
		must(t, os.Rename(filepath.Join(r.src, "old"), filepath.Join(r.src, "new")))
		write(t, r.src, ".kubevpnignore", "*.log\n")
	})
	r.same()
	write(t, r.src, "new/deep/a", "saved")
	testenv.Until(t, "the save is copied", func() bool { return read(t, r.dst, "new/deep/a") == "saved" })
}

// TestMissingDirectoryRemovesNothing checks that nothing is removed while the directory itself is missing.
func TestMissingDirectoryRemovesNothing(t *testing.T) {
	parent := t.TempDir()
	src := filepath.Join(parent, "dist")
	write(t, src, "a", "a")
	write(t, src, "b", "b")
	r := newRig(t, options{src: src})
	must(t, os.Rename(src, src+".old"))
	testenv.Until(t, "the missing directory is reported", func() bool { return r.source.Status().Err != nil })
	if !exists(r.dst, "a") {
		t.Fatal("removed")
	}
	write(t, src+".new", "a", "changed")
	write(t, src+".new", "c/d", "d")
	must(t, os.Rename(src+".new", src))
	for !exists(r.dst, "c/d") || exists(r.dst, "b") {
		r.next()
	}
	r.same()
	if err := r.source.Status().Err; err != nil {
		t.Error(err)
	}
	write(t, src, "c/d", "seen")
	for read(t, r.dst, "c/d") != "seen" {
		r.next()
	}
}

// TestFileArrivesWhileWritten checks that a file that is always being written arrives.
func TestFileArrivesWhileWritten(t *testing.T) {
	r := newRig(t, options{})
	stop := make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		f, err := os.Create(filepath.Join(r.src, "growing"))
		if err != nil {
			t.Error(err)
			return
		}
		defer f.Close()
		for i := 0; ; i++ {
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
				fmt.Fprintf(f, "line %d of a log that grows all the time\n", i)
			}
		}
	})
	for !strings.Contains(read(t, r.dst, "growing"), "line 50 ") {
		r.next()
	}
	close(stop)
	writing.Wait()
	r.same()
}

// TestBusyFileIsSentAsIs checks that a big file that is always being written is sent as it is after a while.
func TestBusyFileIsSentAsIs(t *testing.T) {
	src := t.TempDir()
	f, err := os.Create(filepath.Join(src, "big"))
	must(t, err)
	must(t, f.Truncate(bigFile))
	stop := make(chan struct{})
	var writing sync.WaitGroup
	writing.Go(func() {
		for n := 0; ; n++ {
			if _, err := f.WriteAt([]byte(fmt.Sprintf("%08d", n)), 0); err != nil {
				t.Error(err)
			}
			select {
			case <-stop:
				return
			case <-time.After(time.Millisecond):
			}
		}
	})
	r := newRig(t, options{src: src, adjust: func(s *Source) { s.restMost = 300 * time.Millisecond }})
	testenv.Until(t, "the file is complete", func() bool { return exists(r.dst, "big") && r.source.Status().Synced })
	close(stop)
	writing.Wait()
	must(t, f.Close())
	r.same() // including the last write
}
