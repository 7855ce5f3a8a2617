package files

import (
	"context"
	"errors"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// Paths, and links on their way, lead to files of the container, never to those of this process.
func TestOpenStaysInTheContainer(t *testing.T) {
	base := t.TempDir()
	for _, dir := range []string{"etc", "data/sub", "run"} {
		if err := os.MkdirAll(filepath.Join(base, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for name, text := range map[string]string{"etc/passwd": "of the container", "data/file": "a file", "run/here": "run"} {
		if err := os.WriteFile(filepath.Join(base, name), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for link, to := range map[string]string{"var": "/run", "up": "../../../../../etc", "proc": "/proc/self/root/etc", "loop": "loop"} {
		if err := os.Symlink(to, filepath.Join(base, link)); err != nil {
			t.Fatal(err)
		}
	}
	for _, tt := range []struct {
		path, name, file, want string // file: below what is served
		fails                  bool
	}{
		{path: "/data", name: ".", file: "file", want: "a file"},
		{path: "/data/file", name: "file", file: "file", want: "a file"},
		{path: "/data/new", name: "new", file: "file", want: "a file"},
		{path: "/var", name: ".", file: "here", want: "run"},
		{path: "/var/here", name: "here", file: "here", want: "run"},
		{path: "/up", name: ".", file: "passwd", want: "of the container"},
		{path: "../../../etc", name: ".", file: "passwd", want: "of the container"},
		{path: "/", name: ".", file: "etc/passwd", want: "of the container"},
		{path: "/none/below", fails: true},
		{path: "/proc", fails: true}, // in the container, the link leads to itself
		{path: "/loop", fails: true},
	} {
		t.Run(tt.path, func(t *testing.T) {
			root, name, err := openIn(base, tt.path)
			if err != nil {
				if !tt.fails || errors.Is(err, errUnseen) {
					t.Error(err)
				}
				return
			}
			defer root.Close()
			text, err := root.ReadFile(tt.file)
			if err != nil || string(text) != tt.want || name != tt.name || tt.fails {
				t.Errorf("serves %q, %v as %q", text, err, name)
			}
			if _, err := root.Open("../etc/passwd"); err == nil {
				t.Error("a path leads out of what is served")
			}
		})
	}
}

// The first process of a container is found by what the kubelet mounts there.
func TestEnterNeedsAProcessOfTheContainer(t *testing.T) {
	_, err := enter("no-container-has-this-name")
	if !errors.Is(err, errUnseen) {
		t.Error(err)
	}
}

func TestUserOfIsThatOfTheProcess(t *testing.T) {
	u, err := userOf("/proc/self")
	if err != nil || u.uid != os.Geteuid() || u.gid != os.Getegid() {
		t.Errorf("%+v, %v", u, err)
	}
	if _, err := userOf("/proc/0"); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("a process that has ended: %v", err)
	}
}

// The container stays while it is used, and for a while after.
func TestWaitEndsAfterTheLastUse(t *testing.T) {
	o := options{stay: 100 * time.Millisecond, keep: "kubevpn-test-" + t.Name()}
	begun := time.Now()
	ended := make(chan error, 1)
	go func() { ended <- o.wait(t.Context()) }()
	var first, second net.Conn
	var err error
	for first == nil {
		if first, err = net.Dial("unix", "@"+o.keep); err != nil && time.Since(begun) > 10*time.Second {
			t.Fatal(err)
		}
	}
	if second, err = net.Dial("unix", "@"+o.keep); err != nil {
		t.Fatal(err)
	}
	first.Close()
	select {
	case err := <-ended:
		t.Fatalf("it ended while it was used: %v", err)
	case <-time.After(3 * o.stay):
	}
	second.Close()
	if err := <-ended; err != nil {
		t.Error(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	o.stay = time.Hour
	if err := o.wait(ctx); err != nil {
		t.Error(err)
	}
}

// The first line of the far end is bounded, and nothing after it is lost.
func TestReadLineTakesOnlyTheLine(t *testing.T) {
	r := strings.NewReader("hello\nrest")
	if line, err := readLine(r, 10); string(line) != "hello" || err != nil || r.Len() != 4 {
		t.Errorf("%q, %v, left %d", line, err, r.Len())
	}
	if line, err := readLine(strings.NewReader(strings.Repeat("x", 100)), 10); err == nil {
		t.Errorf("%q", line)
	}
	if line, err := readLine(strings.NewReader("half"), 10); err == nil {
		t.Errorf("%q", line)
	}
}
