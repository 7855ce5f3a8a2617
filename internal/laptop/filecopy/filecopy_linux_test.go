package filecopy

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"math/rand/v2"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/fxamacker/cbor/v2"
	"go.uber.org/goleak"

	"kubevpn/pkg/wire/remotefs"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// conn counts what arrives and what is sent, and breaks when either reaches a limit.
type conn struct {
	net.Conn
	in, out, limit atomic.Int64
}

func (c *conn) count(n *atomic.Int64, more int) {
	if limit := c.limit.Load(); n.Add(int64(more)) > limit && limit > 0 {
		c.Close()
	}
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.count(&c.in, n)
	return n, err
}

func (c *conn) Write(p []byte) (int, error) {
	c.count(&c.out, len(p))
	return c.Conn.Write(p)
}

// served serves a directory to the Copy.
func served(t testing.TB, dir string, readOnly bool) *conn {
	t.Helper()
	root, err := os.OpenRoot(dir)
	must(t, err)
	s, err := remotefs.NewServer(root, readOnly)
	must(t, err)
	near, far := net.Pipe()
	var serving sync.WaitGroup
	serving.Go(func() { _ = s.Serve(context.Background(), far) }) // it ends with the conn
	t.Cleanup(func() { near.Close(); serving.Wait() })
	return &conn{Conn: near}
}

// copied runs a copy between the local path and the one in the directory of the server.
func copied(t testing.TB, c Copy) (Stats, error) {
	t.Helper()
	if c.Path == "" {
		c.Path = c.Remote
	}
	c.Progress = func(Stats) {}
	s, err := c.Run(t.Context())
	return s, err
}

// whole is copied, and nothing must fail.
func whole(t testing.TB, c Copy) Stats {
	t.Helper()
	s, err := copied(t, c)
	must(t, err)
	if s.Failed > 0 || s.Files != s.TotalFiles {
		t.Fatalf("%+v", s)
	}
	return s
}

func write(t testing.TB, p, text string) {
	t.Helper()
	must(t, os.MkdirAll(filepath.Dir(p), 0o755))
	must(t, os.WriteFile(p, []byte(text), 0o644))
}

func read(t testing.TB, p string) string {
	t.Helper()
	text, err := os.ReadFile(p)
	must(t, err)
	return string(text)
}

// tree describes all files below a directory.
func tree(t testing.TB, dir string) string {
	t.Helper()
	var all strings.Builder
	must(t, filepath.WalkDir(dir, func(p string, _ fs.DirEntry, err error) error {
		if err != nil || p == dir {
			return err
		}
		info, err := os.Lstat(p)
		must(t, err)
		fmt.Fprint(&all, strings.TrimPrefix(p, dir), " ", info.Mode())
		switch {
		case info.Mode()&fs.ModeSymlink != 0:
			to, err := os.Readlink(p)
			must(t, err)
			fmt.Fprintln(&all, " ->", to)
			return nil
		case info.Mode().IsRegular():
			fmt.Fprintf(&all, " %x", sha256.Sum256([]byte(read(t, p))))
		}
		fmt.Fprintln(&all, "", info.ModTime().UnixNano())
		return nil
	}))
	return all.String()
}

// grow makes a random tree.
func grow(t testing.TB, random *rand.Rand, dir string, depth int) {
	t.Helper()
	for n := range 2 + random.IntN(6) {
		p := filepath.Join(dir, fmt.Sprintf("n%d ü", n))
		switch kind := random.IntN(20); {
		case kind < 8 && depth < 3:
			must(t, os.Mkdir(p, 0o755))
			grow(t, random, p, depth+1)
			must(t, os.Chmod(p, fs.FileMode(0o500|random.IntN(0o400))))
		case kind < 10:
			must(t, os.Symlink([]string{"n1", "/etc/passwd", "../n0", "nowhere"}[random.IntN(4)], p))
			continue
		default:
			text := bytes.Repeat([]byte(fmt.Sprint(random.Uint64())), random.IntN(20000)*random.IntN(2))
			must(t, os.WriteFile(p, text, 0o600))
			must(t, os.Chmod(p, fs.FileMode(0o400|random.IntN(0o400))))
		}
		at := time.Unix(random.Int64N(2e9), random.Int64N(1e9))
		must(t, os.Chtimes(p, at, at))
	}
}

func TestTreesArriveAsTheyAre(t *testing.T) {
	for seed := range uint64(4) {
		for _, upload := range []bool{false, true} {
			t.Run(fmt.Sprint(seed, upload), func(t *testing.T) {
				far, near := t.TempDir(), t.TempDir()
				src, dst := far, near
				if upload {
					src, dst = near, far
				}
				random := rand.New(rand.NewPCG(seed, 1))
				grow(t, random, src, 0)
				write(t, filepath.Join(src, "big"), strings.Repeat("0123456789abcde\n", 50_000))
				must(t, os.MkdirAll(filepath.Join(src, "empty/deep"), 0o755))
				copyAll := func() Stats {
					return whole(t, Copy{Conn: served(t, far, !upload), Remote: ".", Path: "/x", Local: near, Upload: upload})
				}
				copyAll()
				if got, want := tree(t, dst), tree(t, src); got != want {
					t.Fatalf("got\n%s\nwant\n%s", got, want)
				}
				again := copyAll()
				if again.Bytes != 0 || again.Skipped == 0 {
					t.Errorf("the second copy: %+v", again)
				}
			})
		}
	}
}

func TestDestinationStaysTheSame(t *testing.T) {
	for _, test := range []struct{ from, to, want string }{
		{"file", "", "file"}, {"file", "dir", "dir/file"}, {"file", "new", "new"}, {"file", "old", "old"},
		{"tree", "", "tree/a"}, {"tree", "dir", "dir/a"}, {"tree", "dir/", "dir/tree/a"}, {"tree", "dir/.", "dir/tree/a"}, {"tree", "new", "new/a"}, {"tree/.", "dir", "dir/a"},
		{"link", "dir", "dir/link"},
	} {
		for _, upload := range []bool{false, true} {
			t.Run(fmt.Sprint(test, upload), func(t *testing.T) {
				src, dst := t.TempDir(), t.TempDir()
				write(t, src+"/file", "x")
				write(t, src+"/tree/a", "x")
				must(t, os.Symlink("file", src+"/link"))
				write(t, dst+"/old", "old")
				must(t, os.Mkdir(dst+"/dir", 0o755))
				// The far end serves a directory that is named, or the parent of another path.
				serve := func(dir, p string) (*conn, string) {
					if info, err := os.Stat(dir + "/" + p); err == nil && info.IsDir() {
						return served(t, dir+"/"+p, false), "."
					}
					return served(t, dir, false), p
				}
				c := Copy{Upload: upload}
				if upload {
					c.Conn, c.Remote = serve(dst, test.to)
					c.Path, c.Local = dst+"/"+test.to, src+"/"+test.from
				} else {
					if test.from == "link" {
						t.Skip("the server's end opens what the path leads to")
					}
					c.Conn, c.Remote = serve(src, test.from)
					c.Path, c.Local = src+"/"+test.from, dst+"/"+test.to
				}
				whole(t, c)
				if got := read(t, dst+"/"+test.want); got != "x" {
					t.Error(got)
				}
			})
		}
	}
	t.Run("no parent", func(t *testing.T) {
		far := t.TempDir()
		write(t, far+"/a", "x")
		if _, err := copied(t, Copy{Conn: served(t, far, true), Remote: "a", Local: t.TempDir() + "/no/b"}); err == nil {
			t.Error("no error")
		}
	})
	t.Run("a directory onto a file", func(t *testing.T) {
		far, near := t.TempDir(), t.TempDir()
		write(t, near+"/a", "x")
		s, err := copied(t, Copy{Conn: served(t, far, true), Remote: ".", Path: "d", Local: near + "/a"})
		must(t, err)
		if s.Failed != 1 || read(t, near+"/a") != "x" {
			t.Errorf("%+v", s)
		}
	})
}

func TestInterruptedCopyContinues(t *testing.T) {
	const size = 32 << 20
	text := strings.Repeat("0123456789abcdef", size/16)
	for _, upload := range []bool{false, true} {
		t.Run(fmt.Sprint(upload), func(t *testing.T) {
			far, near := t.TempDir(), t.TempDir()
			src, dst := far, near
			if upload {
				src, dst = near, far
			}
			write(t, src+"/a", text)
			copyOver := func(c *conn) (Stats, error) {
				if upload {
					return copied(t, Copy{Conn: c, Remote: ".", Path: "/x", Local: near + "/a", Upload: true})
				}
				return copied(t, Copy{Conn: c, Remote: "a", Local: near})
			}
			c := served(t, far, false)
			c.limit.Store(size / 2)
			s, err := copyOver(c)
			if err == nil || s.Failed > 0 || !strings.Contains(err.Error(), "has ended") {
				t.Fatalf("%+v, %v", s, err)
			}
			var part fs.FileInfo
			for range 100 { // the server may still write
				part, err = os.Stat(dst + "/a" + partSuffix)
				must(t, err)
				time.Sleep(time.Millisecond)
			}
			if part.Size() < size/4 || part.Size() > size*3/4 {
				t.Fatalf("the part has %d bytes", part.Size())
			}
			c = served(t, far, false)
			s, err = copyOver(c)
			must(t, err)
			if sent := c.in.Load() + c.out.Load(); s.Bytes != size-part.Size()+rewind || sent > size*4/5 || s.Files != 1 || s.TotalBytes != s.Bytes {
				t.Errorf("%+v; %d bytes on the wire, the part has %d", s, sent, part.Size())
			}
			if read(t, dst+"/a") != text {
				t.Error("the content is different")
			}
			if _, err := os.Lstat(dst + "/a" + partSuffix); err == nil {
				t.Error("the part is still there")
			}
		})
	}
}

func TestCanceledCopyEnds(t *testing.T) {
	far, near := t.TempDir(), t.TempDir()
	write(t, far+"/a", strings.Repeat("x", 8<<20))
	ctx, cancel := context.WithCancel(t.Context())
	s, err := Copy{Conn: served(t, far, true), Remote: "a", Path: "a", Local: near, Progress: func(s Stats) {
		if s.Bytes > 4<<20 { // up to 2 MiB are in flight
			cancel()
		}
	}}.Run(ctx)
	if !errors.Is(err, context.Canceled) || s.Failed > 0 {
		t.Fatalf("%+v, %v", s, err)
	}
	if info, err := os.Stat(near + "/a" + partSuffix); err != nil || info.Size() < 1<<20 {
		t.Error("the part is not there", err)
	}
}

func TestWrongPartIsReplaced(t *testing.T) {
	for _, upload := range []bool{false, true} {
		for name, part := range map[string]string{"other content": "abc", "as long": "abcdefgh", "longer": "abcdefghijk", "link": ""} {
			t.Run(fmt.Sprint(name, upload), func(t *testing.T) {
				far, near := t.TempDir(), t.TempDir()
				src, dst := far, near
				if upload {
					src, dst = near, far
				}
				write(t, src+"/a", "12345678")
				write(t, dst+"/victim", "v")
				if part == "" {
					must(t, os.Symlink("victim", dst+"/a"+partSuffix))
				} else {
					write(t, dst+"/a"+partSuffix, part)
					must(t, os.Chmod(dst+"/a"+partSuffix, 0o400))
				}
				c := Copy{Conn: served(t, far, false), Remote: "a", Local: near, Upload: upload}
				if upload {
					c.Remote, c.Local = ".", near+"/a"
				}
				whole(t, c)
				if read(t, dst+"/a") != "12345678" || read(t, dst+"/victim") != "v" {
					t.Error(tree(t, dst))
				}
			})
		}
	}
}

func TestLocalLinksAreNotFollowed(t *testing.T) {
	far, near, other := t.TempDir(), t.TempDir(), t.TempDir()
	write(t, far+"/d/a", "new")
	write(t, far+"/b", "new")
	write(t, other+"/b", "old")
	must(t, os.Symlink(other, near+"/d"))
	must(t, os.Symlink(other+"/b", near+"/b"))
	s, err := copied(t, Copy{Conn: served(t, far, true), Remote: ".", Local: near})
	must(t, err)
	if s.Failed != 1 || s.Files != 1 || len(s.Notes) != 1 || !strings.HasPrefix(s.Notes[0], "d: ") {
		t.Errorf("%+v", s)
	}
	if read(t, near+"/b") != "new" || read(t, other+"/b") != "old" {
		t.Error("the link was followed")
	}
	if _, err := os.Lstat(other + "/a"); err == nil {
		t.Error("the directory's link was followed")
	}
	if info, err := os.Lstat(near + "/b"); err != nil || !info.Mode().IsRegular() {
		t.Error("the link is still there")
	}
}

func TestOtherKindsAreSkipped(t *testing.T) {
	far, near := t.TempDir(), t.TempDir()
	must(t, syscall.Mkfifo(far+"/fifo", 0o600))
	write(t, far+"/old"+partSuffix, "x")
	write(t, far+"/a", "x")
	s := whole(t, Copy{Conn: served(t, far, true), Remote: ".", Local: near})
	if s.Files != 1 || len(s.Notes) != 2 {
		t.Errorf("%+v", s)
	}
}

func TestReadOnlyServerFailsEachFile(t *testing.T) {
	far, near := t.TempDir(), t.TempDir()
	for n := range 20 {
		write(t, fmt.Sprintf("%s/d/%d", near, n), "x")
	}
	s, err := copied(t, Copy{Conn: served(t, far, true), Remote: ".", Local: near + "/d/.", Upload: true})
	must(t, err)
	if s.Failed != 20 || len(s.Notes) != maxNotes || !strings.HasSuffix(s.Notes[0], ": read-only file system") {
		t.Errorf("%+v", s)
	}
}

// delayed is a line with a latency.
func delayed(t testing.TB, c net.Conn, latency time.Duration) net.Conn {
	t.Helper()
	near, far := net.Pipe()
	var lines sync.WaitGroup
	line := func(to, from net.Conn) {
		type packet struct {
			at   time.Time
			data []byte
		}
		queue := make(chan packet, 1<<16)
		lines.Go(func() {
			defer close(queue)
			for {
				data := make([]byte, 64<<10)
				n, err := from.Read(data)
				if err != nil {
					return
				}
				queue <- packet{time.Now().Add(latency), data[:n]}
			}
		})
		lines.Go(func() {
			defer to.Close()
			for p := range queue {
				time.Sleep(time.Until(p.at))
				if _, err := to.Write(p.data); err != nil {
					from.Close()
				}
			}
		})
	}
	line(c, far)
	line(far, c)
	t.Cleanup(func() { near.Close(); c.Close(); lines.Wait() })
	return near
}

func TestSmallFilesShareRoundTrips(t *testing.T) {
	for _, upload := range []bool{false, true} {
		t.Run(fmt.Sprint(upload), func(t *testing.T) {
			far, near := t.TempDir(), t.TempDir()
			for n := range 1000 {
				dir := far
				if upload {
					dir = near
				}
				write(t, fmt.Sprintf("%s/d%d/%d", dir, n/50, n), fmt.Sprint("text ", n))
			}
			synctest.Test(t, func(t *testing.T) { // only the line takes time
				start := time.Now()
				line := delayed(t, served(t, far, false), 50*time.Millisecond)
				s := whole(t, Copy{Conn: line, Remote: ".", Local: near + "/.", Upload: upload})
				took := time.Since(start)
				t.Log(took)
				if s.Files != 1000 || took > 4*time.Second { // one after the other: at least 100 s
					t.Errorf("%+v took %v", s, took)
				}
			})
		})
	}
}

// hostile answers requests as answer says.
func hostile(t testing.TB, answer func(remotefs.Request) remotefs.Answer) net.Conn {
	t.Helper()
	near, far := net.Pipe()
	var serving sync.WaitGroup
	serving.Go(func() {
		defer far.Close()
		for {
			var size uint32
			if binary.Read(far, binary.BigEndian, &size) != nil {
				return
			}
			frame := make([]byte, size)
			var r remotefs.Request
			if _, err := io.ReadFull(far, frame); err != nil || cbor.Unmarshal(frame, &r) != nil {
				return
			}
			a := answer(r)
			a.ID = r.ID
			frame, err := cbor.Marshal(a)
			if err != nil {
				return
			}
			if _, err := far.Write(append(binary.BigEndian.AppendUint32(nil, uint32(len(frame))), frame...)); err != nil {
				return
			}
		}
	})
	t.Cleanup(func() { near.Close(); serving.Wait() })
	return near
}

func TestHostileServerStaysInTheDestination(t *testing.T) {
	regular := remotefs.Attr{Mode: syscall.S_IFREG | 0o644, Size: 1 << 62}
	link := remotefs.Attr{Mode: syscall.S_IFLNK | 0o777}
	dir := remotefs.Attr{Mode: syscall.S_IFDIR | 0o755}
	base := t.TempDir()
	near := base + "/near"
	write(t, base+"/victim", "v")
	write(t, near+"/victim", "v")
	must(t, os.Symlink("victim", near+"/c"+partSuffix))
	must(t, os.Symlink("..", near+"/up"))
	lists := map[string][]remotefs.Entry{ // the Client rejects the list of a directory with an invalid name
		".": {{Name: "d1", Attr: dir}, {Name: "d2", Attr: dir}, {Name: "d3", Attr: dir}, {Name: "up", Attr: dir},
			{Name: "c", Attr: regular}, {Name: "c" + partSuffix, Attr: link}, {Name: "l", Attr: link},
			{Name: "nil", Attr: remotefs.Attr{}}},
		"d1": {{Name: "../../victim", Attr: regular}},
		"d2": {{Name: "..", Attr: dir}},
		"d3": {{Name: "a/b", Attr: regular}},
		"up": {{Name: "victim", Attr: regular}},
	}
	c := hostile(t, func(r remotefs.Request) remotefs.Answer {
		switch r.Op {
		case remotefs.OpStat:
			return remotefs.Answer{Attr: &dir}
		case remotefs.OpList:
			return remotefs.Answer{Dirs: []remotefs.Dir{{Path: r.Path, Entries: lists[r.Path]}}}
		case remotefs.OpReadlink:
			return remotefs.Answer{Data: []byte("../victim")}
		case remotefs.OpOpen:
			return remotefs.Answer{Handle: 1, Attr: &regular}
		case remotefs.OpRead:
			if r.Offset > 4<<20 {
				return remotefs.Answer{}
			}
			return remotefs.Answer{Data: bytes.Repeat([]byte("x"), remotefs.MaxData)}
		}
		return remotefs.Answer{}
	})
	s, err := copied(t, Copy{Conn: c, Remote: ".", Local: near})
	must(t, err)
	if read(t, base+"/victim") != "v" || read(t, near+"/victim") != "v" {
		t.Error("a victim has changed")
	}
	entries, err := os.ReadDir(base)
	must(t, err)
	if len(entries) != 2 || s.Failed != 5 || s.Files != 1 { // d1, d2, d3, up and c failed; l is a link
		t.Errorf("%v, %+v", entries, s)
	}
}

func TestEndlessTreeEnds(t *testing.T) {
	dir := remotefs.Attr{Mode: syscall.S_IFDIR | 0o755}
	c := hostile(t, func(r remotefs.Request) remotefs.Answer {
		if r.Op == remotefs.OpStat {
			return remotefs.Answer{Attr: &dir}
		}
		return remotefs.Answer{Dirs: []remotefs.Dir{{Path: r.Path, Entries: []remotefs.Entry{{Name: "d", Attr: dir}}}}}
	})
	if s, err := copied(t, Copy{Conn: c, Remote: ".", Local: t.TempDir()}); err == nil || !strings.Contains(err.Error(), "more than") {
		t.Errorf("%+v, %v", s, err)
	}
}

func TestFileThatChangesFails(t *testing.T) {
	regular := remotefs.Attr{Mode: syscall.S_IFREG | 0o644, Size: 3}
	c := hostile(t, func(r remotefs.Request) remotefs.Answer {
		switch r.Op {
		case remotefs.OpStat:
			return remotefs.Answer{Attr: &regular}
		case remotefs.OpList:
			return remotefs.Answer{Dirs: []remotefs.Dir{{Path: ".", Entries: []remotefs.Entry{{Name: "a", Attr: regular}}}}}
		case remotefs.OpOpen:
			return remotefs.Answer{Handle: 1, Attr: &regular, Data: []byte("abc")}
		case remotefs.OpSum:
			return remotefs.Answer{Data: []byte("that of something else")}
		}
		return remotefs.Answer{}
	})
	near := t.TempDir()
	s, err := copied(t, Copy{Conn: c, Remote: "a", Local: near})
	must(t, err)
	if s.Failed != 1 || s.Notes[0] != "a: it changed while it was copied" || tree(t, near) != "" {
		t.Errorf("%+v\n%s", s, tree(t, near))
	}
}
