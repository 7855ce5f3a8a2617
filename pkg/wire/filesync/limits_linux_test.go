package filesync

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"kubevpn/internal/testenv"
)

// child runs the test again in another process and reports whether this is the parent.
func child(t *testing.T, attr *syscall.SysProcAttr) bool {
	t.Helper()
	const variable = "FILESYNC_TEST_CHILD"
	if os.Getenv(variable) == t.Name() {
		return false
	}
	cmd := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$", "-test.v")
	cmd.Env = append(os.Environ(), variable+"="+t.Name())
	cmd.SysProcAttr = attr
	out, err := cmd.CombinedOutput()
	t.Logf("%s", out)
	if err != nil {
		t.Fatal(err)
	}
	if !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Fatal("the test did not run in the child process")
	}
	return true
}

// TestUnreadableFilesAreNamed checks that the batch names files that an ordinary user cannot read or write, and that
// the rest is copied.
func TestUnreadableFilesAreNamed(t *testing.T) {
	if os.Getuid() == 0 && child(t, &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: 65534, Gid: 65534}}) {
		return
	}
	r := newRig(t, options{before: func(r *rig) {
		write(t, r.src, "a", "a")
		write(t, r.src, "unreadable", "x")
		must(t, os.Chmod(filepath.Join(r.src, "unreadable"), 0))
		write(t, r.src, "closed/x", "x")
		must(t, os.Chmod(filepath.Join(r.src, "closed"), 0))
		write(t, r.src, "refused/x", "x")
		write(t, r.src, "refused/y", "y")
		write(t, r.dst, "refused/y", "image")
		write(t, r.src, "z", "z")
	}})
	b := r.source.Status().Last
	named := map[string]string{}
	for _, f := range b.Failed {
		named[f.Path] = f.Err.Error()
	}
	if len(named) != 2 || named["unreadable"] != "permission denied" || named["closed"] != "permission denied" {
		t.Errorf("named: %v", named)
	}
	for name, want := range map[string]string{"a": "a", "z": "z", "refused/x": "x", "refused/y": "y"} {
		if got := read(t, r.dst, name); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}
	// A big file that was just written may still grow. The source reports an unreadable one instead of waiting for it.
	write(t, r.src, "late", "x")
	must(t, os.Truncate(filepath.Join(r.src, "late"), bigFile))
	must(t, os.Chmod(filepath.Join(r.src, "late"), 0))
	testenv.Until(t, "the failure is reported and nothing is awaited", func() bool {
		st := r.source.Status()
		return st.Synced && len(st.Last.Failed) == 1 && st.Last.Failed[0].Path == "late"
	})
	// A file that becomes unreadable stays at the target.
	must(t, os.Chmod(filepath.Join(r.src, "closed"), 0o755))
	must(t, os.Chmod(filepath.Join(r.src, "unreadable"), 0o644))
	for read(t, r.dst, "unreadable") != "x" {
		r.next()
	}
	write(t, r.src, "closed/y", "y")
	for read(t, r.dst, "closed/y") != "y" || read(t, r.dst, "closed/x") != "x" {
		r.next()
	}
	must(t, os.Chmod(filepath.Join(r.src, "closed"), 0))
	r.breakOff()
	r.connect()
	r.complete()
	must(t, os.Chmod(filepath.Join(r.src, "closed"), 0o755))
	if read(t, r.dst, "closed/x") != "x" {
		t.Error("an unreadable file was removed")
	}

	// The target cannot write to another user's directory.
	r2 := newRig(t, options{dst: "/proc/self", src: t.TempDir()})
	write(t, r2.src, "file", "x")
	if b := r2.next(); len(b.Failed) != 1 || b.Failed[0].Path != "file" || b.Files != 0 {
		t.Errorf("%+v", b)
	}
}

// limited runs the test in a process whose inotify limit is n.
func limited(t *testing.T, what string, n int) bool {
	if child(t, &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER,
		UidMappings: []syscall.SysProcIDMap{{HostID: os.Getuid(), Size: 1}},
		GidMappings: []syscall.SysProcIDMap{{HostID: os.Getgid(), Size: 1}},
	}) {
		return false
	}
	if err := os.WriteFile("/proc/sys/user/"+what, []byte(fmt.Sprint(n)), 0o644); err != nil {
		t.Skip(err)
	}
	return true
}

func TestWatchLimitFallsBackToPolling(t *testing.T) {
	if !limited(t, "max_inotify_watches", 4) {
		return
	}
	testPolled(t, "fs.inotify.max_user_watches")
}

func TestInstanceLimitFallsBackToPolling(t *testing.T) {
	if !limited(t, "max_inotify_instances", 0) {
		return
	}
	testPolled(t, "fs.inotify.max_user_instances")
}

func testPolled(t *testing.T, advice string) {
	var log testenv.Buffer
	dst := t.TempDir()
	src := t.TempDir()
	for i := range 20 {
		write(t, src, fmt.Sprintf("d%02d/f", i), "one")
	}
	r := &rig{t: t, src: src, dst: dst, sent: make(chan Batch, 1000), taken: make(chan told, 1000)}
	source := NewSource(SourceConfig{Dir: src, Dial: r.dial, OnSync: func(b Batch) { r.sent <- b }, Logger: slog.New(slog.NewTextHandler(&log, nil))})
	r.source = source
	r.ctx = t.Context()
	var running sync.WaitGroup
	running.Go(func() { source.Run(t.Context()) })
	t.Cleanup(func() { running.Wait(); r.serving.Wait() })
	r.complete()
	for i := range 20 {
		write(t, src, fmt.Sprintf("d%02d/f", i), "two")
		write(t, src, fmt.Sprintf("d%02d/new/deep/f", i), "new")
	}
	r.same()
	must(t, os.RemoveAll(filepath.Join(src, "d19")))
	must(t, os.Rename(filepath.Join(src, "d18"), filepath.Join(src, "d17/moved")))
	must(t, os.Chmod(filepath.Join(src, "d16/f"), 0o600))
	r.same()
	write(t, src, "d17/moved/new/deep/f", "changed")
	r.same()
	if got := strings.Count(log.String(), advice); got != 1 {
		t.Errorf("the log has the advice %d times:\n%s", got, log.String())
	}
}

// TestOverflowReadsEverything exceeds the kernel's event queue: the source reads everything and watches again.
func TestOverflowReadsEverything(t *testing.T) {
	r := newRig(t, options{before: func(r *rig) {
		write(t, r.src, "d1/f1", "x")
		write(t, r.src, "d2/f2", "x")
	}})
	var queue int
	_, err := fmt.Sscan(read(t, "/proc/sys/fs/inotify", "max_queued_events"), &queue)
	must(t, err)
	r.change(func() {
		for range queue { // two events each, of which one buffer is out of the queue
			must(t, os.Chmod(filepath.Join(r.src, "d1/f1"), 0o644))
			must(t, os.Chmod(filepath.Join(r.src, "d2/f2"), 0o644))
		}
		must(t, os.Rename(filepath.Join(r.src, "d1"), filepath.Join(r.src, "renamed")))
	})
	r.same()
	write(t, r.src, "renamed/f1", "changed")
	testenv.Until(t, "the save is copied", func() bool { return read(t, r.dst, "renamed/f1") == "changed" })
}
