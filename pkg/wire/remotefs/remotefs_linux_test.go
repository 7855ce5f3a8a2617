package remotefs

import (
	"bytes"
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// pipe counts the requests that a Client sends.
type pipe struct {
	net.Conn
	requests atomic.Int64
	head     []byte        // of a request that has begun
	left     int           // bytes of that request
	stuck    chan struct{} // not nil: writes wait for this
}

func (p *pipe) Write(b []byte) (int, error) {
	for _, c := range b {
		switch {
		case p.left > 0:
			p.left--
		case len(p.head) < 3:
			p.head = append(p.head, c)
		default:
			p.left, p.head = int(binary.BigEndian.Uint32(append(p.head, c))), nil
			p.requests.Add(1)
		}
	}
	if p.stuck != nil {
		<-p.stuck
	}
	return p.Conn.Write(b)
}

// pair returns a Client of a directory, and its end of the stream. Both end with the test.
func pair(t testing.TB, dir string, readOnly bool) (*Client, *pipe) {
	t.Helper()
	c := NewClient()
	p := &pipe{}
	serve(t, c, dir, readOnly, p)
	return c, p
}

// serve gives a Client a Server. stop ends it.
func serve(t testing.TB, c *Client, dir string, readOnly bool, p *pipe) (stop func()) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	server, err := NewServer(root, readOnly)
	if err != nil {
		t.Fatal(err)
	}
	near, far := net.Pipe()
	p.Conn = near
	ctx, cancel := context.WithCancel(context.Background())
	var work sync.WaitGroup
	work.Go(func() {
		if err := server.Serve(ctx, far); err != nil {
			t.Error(err)
		}
	})
	c.mu.Lock()
	served := c.served
	c.mu.Unlock()
	work.Go(func() { _ = c.Serve(ctx, p) })
	<-served
	stop = func() {
		cancel()
		work.Wait()
	}
	t.Cleanup(stop)
	return stop
}

func write(t testing.TB, path, text string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(text), 0o644); err != nil {
		t.Fatal(err)
	}
}

// open opens a file and gives it to an Inode.
func open(t testing.TB, c *Client, i *Inode, path string, flags int) *File {
	t.Helper()
	f, _, err := c.Open(t.Context(), path, flags, 0o644)
	if err != nil {
		t.Fatal(err)
	}
	if i.Path == nil {
		i.Path = func() string { return path }
	}
	f.Use(i)
	return f
}

func wantErr(t testing.TB, what string, err, want error) {
	t.Helper()
	if err != want {
		t.Errorf("%s: %v, and not %v", what, err, want)
	}
}

func TestServerRefusesPathsOutOfItsDirectory(t *testing.T) {
	dir := t.TempDir()
	secret := filepath.Join(dir, "secret")
	write(t, secret, "secret")
	root := filepath.Join(dir, "root")
	for _, err := range []error{os.Mkdir(root, 0o755), os.Symlink("../secret", root+"/relative"),
		os.Symlink(secret, root+"/absolute"), os.Symlink("..", root+"/up")} {
		if err != nil {
			t.Fatal(err)
		}
	}
	write(t, root+"/file", "")
	c, _ := pair(t, root, false)
	ctx := t.Context()
	for _, p := range []string{"../secret", "relative", "absolute", "up/secret", secret, "/etc/passwd",
		"x/../../secret", "..", "", "file\x00", "file/../../secret", strings.Repeat("a/", 3000),
		strings.Repeat("a", 300)} {
		for _, r := range []Request{{Op: OpOpen, Flags: FlagRead}, {Op: OpOpen, Flags: FlagWrite | FlagTruncate},
			{Op: OpOpen, Flags: FlagWrite | FlagCreate}, {Op: OpSum}, {Op: OpFsync}, {Op: OpList, Size: 10},
			{Op: OpMkdir, Mode: 0o755}, {Op: OpRename, To: "there"}, {Op: OpLink, To: "there"}, {Op: OpRemove},
			{Op: OpRemove, Flags: FlagDir}, {Op: OpSet, Set: &Set{Mode: new(uint32(0o777))}}, {Op: OpStat}} {
			r.Path = p
			inside := p == "relative" || p == "absolute" // the links themselves
			if inside && r.Op != OpOpen && r.Op != OpSum && r.Op != OpFsync {
				continue
			}
			if _, err := c.Do(ctx, r); err == nil {
				t.Errorf("operation %d of %.40q was carried out", r.Op, p)
			}
			if r = (Request{Op: OpRename, Path: "file", To: p}); !inside {
				if _, err := c.Do(ctx, r); err == nil {
					t.Errorf("a file was renamed to %.40q", p)
				}
			}
		}
	}
	if text, err := os.ReadFile(secret); err != nil || string(text) != "secret" {
		t.Errorf("outside there is %q, %v", text, err)
	}
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 2 {
		t.Errorf("outside there is %v, %v", entries, err)
	}
}

func TestServerFollowsNoLinkAtTheEndOfAPath(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/victim", "text")
	for name, to := range map[string]string{"link": "victim", "dangling": "new", "d": "."} {
		if err := os.Symlink(to, dir+"/"+name); err != nil {
			t.Fatal(err)
		}
	}
	c, _ := pair(t, dir, false)
	for _, r := range []Request{{Op: OpOpen, Path: "link", Flags: FlagRead}, {Op: OpSum, Path: "link"},
		{Op: OpOpen, Path: "link", Flags: FlagWrite | FlagCreate | FlagTruncate}, {Op: OpFsync, Path: "link"},
		{Op: OpOpen, Path: "dangling", Flags: FlagWrite | FlagCreate}, {Op: OpList, Path: "d", Size: 1}} {
		_, err := c.Do(t.Context(), r)
		wantErr(t, fmt.Sprintf("operation %d of %s", r.Op, r.Path), err, syscall.ELOOP)
	}
	for _, p := range []string{"..", "d/..", "d/../..", "victim/.."} { // the parent is opened, and not by os.Root
		for _, op := range []Op{OpStat, OpOpen, OpList, OpRemove} {
			if a, err := c.Do(t.Context(), Request{Op: op, Path: p, Flags: FlagRead}); err == nil {
				t.Errorf("operation %d of %s: %+v", op, p, a)
			}
		}
	}
	if text, err := os.ReadFile(dir + "/victim"); err != nil || string(text) != "text" {
		t.Errorf("the file has %q, %v", text, err)
	}
	if _, err := os.Lstat(dir + "/new"); err == nil {
		t.Error("a file was created where the link leads")
	}
}

func TestReadOnlyServerChangesNothing(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", "text")
	c, _ := pair(t, dir, true)
	ctx := t.Context()
	for _, r := range []Request{{Op: OpOpen, Flags: FlagWrite}, {Op: OpOpen, Flags: FlagRead | FlagTruncate},
		{Op: OpOpen, Flags: FlagRead | FlagCreate, Path: "new"}, {Op: OpOpen, Flags: FlagRead | 1<<20}, {Op: OpWrite},
		{Op: OpSet, Set: &Set{Size: new(uint64)}}, {Op: OpMkdir, Path: "new"}, {Op: OpRemove},
		{Op: OpRename, To: "new"}, {Op: OpLink, To: "new"}, {Op: OpSymlink, Path: "new", To: "file"}, {Op: 200}} {
		if r.Path == "" {
			r.Path = "file"
		}
		_, err := c.Do(ctx, r)
		wantErr(t, fmt.Sprintf("operation %d, flags %o", r.Op, r.Flags), err, syscall.EROFS)
	}
	f := open(t, c, &Inode{}, "file", FlagRead)
	if text, err := f.Read(ctx, 0, 100); err != nil || string(text) != "text" {
		t.Errorf("read %q, %v", text, err)
	}
	wantErr(t, "Write", f.Write([]byte("x"), 0), nil)
	wantErr(t, "Close", f.Close(), syscall.EROFS)
	if entries, err := os.ReadDir(dir); err != nil || len(entries) != 1 {
		t.Errorf("there is %v, %v", entries, err)
	}
}

func TestRequestsAreBounded(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", "text")
	c, _ := pair(t, dir, false)
	ctx := t.Context()
	f := open(t, c, &Inode{}, "file", FlagRead|FlagWrite)
	for _, r := range []Request{{Op: OpRead, Size: -1}, {Op: OpRead, Offset: -1},
		{Op: OpWrite, Data: make([]byte, MaxData+1)},
		{Op: OpLock}, {Op: OpLock, Lock: &Lock{Type: 9}}, {Op: OpSet}} {
		_, err := f.ask(ctx, r)
		wantErr(t, fmt.Sprintf("operation %d", r.Op), err, syscall.EINVAL)
	}
	if a, err := f.ask(ctx, Request{Op: OpRead, Size: 1 << 40}); err != nil || string(a.Data) != "text" {
		t.Errorf("read %q, %v", a.Data, err)
	}
	_, err := c.Do(ctx, Request{Op: OpRead, Handle: 12345, Size: 1})
	wantErr(t, "a handle that is not open", err, syscall.EBADF)
	for err = nil; err == nil; {
		_, _, err = c.Open(ctx, "file", FlagRead, 0)
	}
	wantErr(t, "too many handles", err, syscall.EMFILE)
}

// A Server ends a stream with a frame that is too long, or is not one.
func TestServerEndsStreamAtInvalidFrame(t *testing.T) {
	for name, b := range map[string][]byte{"too long": {0, 0xff, 0xff, 0xff}, "not CBOR": {0, 0, 0, 1, 0xff},
		"not a request": {0, 0, 0, 1, 0x01}, "short": {0, 0, 0, 9, 1}} {
		t.Run(name, func(t *testing.T) {
			root, err := os.OpenRoot(t.TempDir())
			if err != nil {
				t.Fatal(err)
			}
			server, err := NewServer(root, false)
			if err != nil {
				t.Fatal(err)
			}
			near, far := net.Pipe()
			go func() {
				_, _ = near.Write(b)
				near.Close()
			}()
			if err := server.Serve(t.Context(), far); !errors.Is(err, errFrame) {
				t.Errorf("Serve: %v", err)
			}
		})
	}
}

// hostile answers each request with what answer returns.
func hostile(t *testing.T, answer func(r *Request, far *stream) *Answer) *Client {
	t.Helper()
	c := NewClient()
	near, far := net.Pipe()
	var work sync.WaitGroup
	work.Go(func() { _ = c.Serve(context.Background(), near) })
	work.Go(func() {
		for s := newStream(far); ; {
			var r Request
			if s.receive(maxRequest, &r) != nil {
				return
			}
			if a := answer(&r, s); a != nil {
				s.send(frame(a, 0), 0)
			}
		}
	})
	t.Cleanup(func() {
		far.Close()
		near.Close()
		work.Wait()
	})
	return c
}

func TestClientSurvivesHostileServer(t *testing.T) {
	dir := func(path string, names ...string) Dir {
		d := Dir{Path: path}
		for _, name := range names {
			d.Entries = append(d.Entries, Entry{Name: name, Attr: Attr{Mode: syscall.S_IFREG, Links: 1}})
		}
		return d
	}
	lists := func(dirs ...Dir) func(*Request, *stream) *Answer {
		return func(r *Request, _ *stream) *Answer { return &Answer{ID: r.ID, Dirs: dirs} }
	}
	for name, answer := range map[string]func(r *Request, far *stream) *Answer{
		"wrong ID":          func(r *Request, _ *stream) *Answer { return &Answer{ID: r.ID + 1} },
		"no attributes":     lists(dir(".")),
		"slash":             lists(dir(".", "a/b")),
		"dots":              lists(dir(".", "..")),
		"slash below":       lists(dir("."), dir("x", "/")),
		"another directory": lists(dir("x"), dir(".")),
		"no directory":      func(r *Request, _ *stream) *Answer { return &Answer{ID: r.ID} },
		"too much data": func(r *Request, _ *stream) *Answer {
			return &Answer{ID: r.ID, Data: make([]byte, MaxData+1)}
		},
		"too long": func(_ *Request, far *stream) *Answer {
			_, _ = far.Write([]byte{0xff, 0, 0, 0})
			return nil
		},
		"not CBOR": func(_ *Request, far *stream) *Answer {
			_, _ = far.Write([]byte{0, 0, 0, 2, 0xff, 0xff})
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			c := hostile(t, answer)
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond) // without a Server, Do waits for one
			defer cancel()
			_, err := c.List(ctx, ".")
			if name != "no attributes" {
				wantErr(t, "List", err, syscall.EIO)
			}
			if name == "wrong ID" || strings.HasPrefix(name, "too") || name == "not CBOR" {
				return // the stream has ended
			}
			for _, r := range []Request{{Op: OpStat, Path: "."}, {Op: OpMkdir, Path: "a"},
				{Op: OpLink, Path: "a", To: "b"}, {Op: OpSet, Path: "a", Set: &Set{}}} {
				_, err := c.DoAttr(ctx, r)
				wantErr(t, fmt.Sprintf("operation %d", r.Op), err, syscall.EIO)
			}
			_, _, err = c.Open(ctx, "a", FlagRead, 0)
			wantErr(t, "Open", err, syscall.EIO)
		})
	}
}

// A Server cannot give a reader more than it asked for.
func TestReadReturnsNoMoreThanWasAskedFor(t *testing.T) {
	c := hostile(t, func(r *Request, _ *stream) *Answer {
		attr := &Attr{Mode: syscall.S_IFREG, Size: 1 << 40, Links: 1}
		return &Answer{ID: r.ID, Attr: attr, Data: make([]byte, MaxData)}
	})
	f := open(t, c, &Inode{}, "a", FlagRead)
	for _, off := range []int64{0, 100, chunk - 5, 1 << 30, 3 << 30} {
		if b, err := f.Read(t.Context(), off, 10); err != nil || len(b) > 10 {
			t.Errorf("%d bytes at %d, %v", len(b), off, err)
		}
	}
}

func TestClientGoesOnWithAnotherServer(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", "text")
	c, i := NewClient(), &Inode{}
	stop := serve(t, c, dir, false, &pipe{})
	f := open(t, c, i, "file", FlagRead|FlagWrite)
	ctx := t.Context()
	stop()
	short, cancel := context.WithTimeout(ctx, time.Millisecond)
	defer cancel()
	_, err := c.Stat(short, "file")
	wantErr(t, "Stat without a Server", err, syscall.EINTR)
	serve(t, c, dir, false, &pipe{})
	_, err = f.Read(ctx, 0, 4)
	wantErr(t, "Read", err, syscall.EIO)
	wantErr(t, "Write", f.Write([]byte("new"), 0), nil)
	wantErr(t, "Flush", i.Flush(c), syscall.EIO)
	wantErr(t, "the second Flush", i.Flush(c), nil)
	_, err = f.Lock(ctx, Lock{}, true)
	wantErr(t, "Lock", err, syscall.EIO)
	wantErr(t, "Fsync", f.Fsync(ctx), syscall.EIO)
	if r := i.On(c, Request{Op: OpStat}); r.Handle != 0 || r.Path != "file" {
		t.Errorf("On uses handle %d, path %q", r.Handle, r.Path)
	}
	wantErr(t, "Close", f.Close(), nil)
	f = open(t, c, i, "file", FlagRead)
	if b, err := f.Read(ctx, 0, 10); err != nil || string(b) != "text" {
		t.Errorf("the new file has %q, %v", b, err)
	}
}

// A later Serve takes the place of an earlier one whose end nobody has noticed.
func TestLaterServerTakesThePlaceOfAnEarlierOne(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	write(t, second+"/file", "")
	c := NewClient()
	stop := serve(t, c, first, false, &pipe{})
	serve(t, c, second, false, &pipe{})
	stop()
	if _, err := c.Stat(t.Context(), "file"); err != nil {
		t.Error(err)
	}
}

func TestStuckStreamDoesNotKeepARequest(t *testing.T) {
	c, p := pair(t, t.TempDir(), false)
	f := open(t, c, &Inode{}, "file", FlagWrite|FlagCreate)
	p.stuck = make(chan struct{})
	var work sync.WaitGroup
	work.Go(func() { // more than may be on the way
		for n := range int64(2 * window) {
			if err := f.Write(make([]byte, chunk), n*chunk); err != nil {
				t.Error(err)
			}
		}
	})
	defer work.Wait()
	defer close(p.stuck)
	time.Sleep(50 * time.Millisecond)
	ctx, cancel := context.WithTimeout(t.Context(), time.Millisecond)
	defer cancel()
	begin := time.Now()
	_, err := c.Stat(ctx, "file")
	wantErr(t, "Stat", err, syscall.EINTR)
	if took := time.Since(begin); took > 5*time.Second {
		t.Errorf("it took %v", took)
	}
}

func TestReadAheadAndWriteBehind(t *testing.T) {
	dir := t.TempDir()
	text := make([]byte, 100*chunk+5000)
	for n := range text {
		text[n] = byte(n * 7 / 1000)
	}
	c, p := pair(t, dir, false)
	i := &Inode{}
	f := open(t, c, i, "file", FlagRead|FlagWrite|FlagCreate)
	for off := 0; off < len(text); off += chunk {
		if err := f.Write(text[off:min(off+chunk, len(text))], int64(off)); err != nil {
			t.Fatal(err)
		}
	}
	wantErr(t, "Fsync", f.Fsync(t.Context()), nil)
	if got, err := os.ReadFile(dir + "/file"); err != nil || !bytes.Equal(got, text) {
		t.Fatalf("%d bytes were written, %v", len(got), err)
	}
	if n := p.requests.Load(); n != 1+101+1 {
		t.Errorf("writing took %d requests", n)
	}
	p.requests.Store(0)
	g := open(t, c, i, "file", FlagRead)
	var got []byte
	most := 0
	for {
		b, err := g.Read(t.Context(), int64(len(got)), chunk)
		if err != nil {
			t.Fatal(err)
		}
		got = append(got, b...)
		g.mu.Lock()
		most = max(most, len(g.chunks))
		g.mu.Unlock()
		if len(b) < chunk {
			break
		}
	}
	if !bytes.Equal(got, text) {
		t.Errorf("%d bytes were read", len(got))
	}
	if n := p.requests.Load(); n != 1+101 {
		t.Errorf("reading took %d requests", n)
	}
	if most < window || most > window+2*slack+2 {
		t.Errorf("up to %d chunks were there", most)
	}
}

// Small files come with the answer to Open, and a directory's attributes with its list.
func TestSmallFilesTakeFewRequests(t *testing.T) {
	dir := t.TempDir()
	for n := range 100 {
		if err := os.MkdirAll(fmt.Sprintf("%s/%d", dir, n%10), 0o755); err != nil {
			t.Fatal(err)
		}
		write(t, fmt.Sprintf("%s/%d/%d", dir, n%10, n), "text")
	}
	c, p := pair(t, dir, false)
	for n := range 100 {
		if _, err := c.Stat(t.Context(), fmt.Sprint(n%10)); err != nil { // as the kernel does
			t.Error(err)
		}
		name := fmt.Sprintf("%d/%d", n%10, n)
		if a, err := c.Stat(t.Context(), name); err != nil || a.Size != 4 {
			t.Errorf("%s: %+v, %v", name, a, err)
		}
	}
	if n := p.requests.Load(); n != 1 {
		t.Errorf("100 files took %d requests", n)
	}
	f := open(t, c, &Inode{}, "1/1", FlagRead)
	if b, err := f.Read(t.Context(), 0, 4096); err != nil || string(b) != "text" {
		t.Errorf("read %q, %v", b, err)
	}
	if n := p.requests.Load(); n != 2 {
		t.Errorf("one file took %d requests", n-1)
	}
}

func TestFilesOfAnInodeAreCoherent(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", strings.Repeat("a", 3*chunk))
	c, _ := pair(t, dir, false)
	i := &Inode{}
	f, g := open(t, c, i, "file", FlagRead), open(t, c, i, "file", FlagWrite)
	for n := range 50 {
		if b, err := f.Read(t.Context(), 0, chunk); err != nil || len(b) != chunk { // and it asks for more
			t.Fatalf("%d bytes, %v", len(b), err)
		}
		text := fmt.Sprint("text ", n)
		wantErr(t, "Write", g.Write([]byte(text), chunk+10), nil)
		b, err := f.Read(t.Context(), chunk, chunk)
		if got := string(b[10 : 10+len(text)]); err != nil || got != text {
			t.Fatalf("read %q after %q, %v", got, text, err)
		}
	}
	wantErr(t, "Close", g.Close(), nil)
	if a, err := c.Stat(t.Context(), "file"); err != nil || a.Size != 3*chunk {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestGrowingFileIsSeen(t *testing.T) {
	dir := t.TempDir()
	var all string
	c, _ := pair(t, dir, false)
	write(t, dir+"/log", "")
	f := open(t, c, &Inode{}, "log", FlagRead)
	for n := range 30 {
		more := strings.Repeat(fmt.Sprint(n%10), 20_000)
		all += more
		write(t, dir+"/log", all)
		b, err := f.Read(t.Context(), int64(len(all)-len(more)), chunk)
		if err != nil || string(b) != more {
			t.Fatalf("%d: read %d bytes, %v", n, len(b), err)
		}
	}
}

func TestFlushReturnsErrorOfAWriteOnce(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/file", "")
	c, _ := pair(t, dir, false)
	i := &Inode{}
	f := open(t, c, i, "file", FlagRead) // so each write fails
	wantErr(t, "Write", f.Write([]byte("x"), 0), nil)
	wantErr(t, "Flush", i.Flush(c), syscall.EBADF)
	wantErr(t, "the second Flush", i.Flush(c), nil)
	wantErr(t, "Write", f.Write([]byte("x"), 0), nil)
	wantErr(t, "Settle", i.Settle(c), syscall.EBADF)
	wantErr(t, "Fsync", f.Fsync(t.Context()), syscall.EBADF)
	wantErr(t, "Close", f.Close(), nil)
}

func TestAppendsOfTwoFilesDoNotMix(t *testing.T) {
	dir := t.TempDir()
	c, _ := pair(t, dir, false)
	d, _ := pair(t, dir, false)
	var work sync.WaitGroup
	for _, client := range []*Client{c, d} {
		f := open(t, client, &Inode{}, "log", FlagWrite|FlagCreate|FlagAppend)
		work.Go(func() {
			for range 100 {
				if err := f.Write([]byte("line\n"), 0); err != nil {
					t.Error(err)
				}
			}
		})
	}
	work.Wait()
	if b, err := os.ReadFile(dir + "/log"); err != nil || string(b) != strings.Repeat("line\n", 200) {
		t.Errorf("%d bytes, %v", len(b), err)
	}
}

func TestChangesAreSeenAtOnce(t *testing.T) {
	dir := t.TempDir()
	c, _ := pair(t, dir, false)
	ctx := t.Context()
	names := func(want string) {
		t.Helper()
		entries, err := c.List(ctx, ".")
		var got []string
		for _, e := range entries {
			got = append(got, e.Name)
			if a, err := c.Stat(ctx, e.Name); err != nil || a.Mode != e.Attr.Mode {
				t.Errorf("%s: %+v, %v", e.Name, a, err)
			}
		}
		if strings.Join(got, " ") != want || err != nil {
			t.Errorf("there is %q, and not %q, %v", got, want, err)
		}
	}
	do := func(r Request) {
		t.Helper()
		if _, err := c.Do(ctx, r); err != nil {
			t.Errorf("operation %d of %s: %v", r.Op, r.Path, err)
		}
	}
	names("")
	do(Request{Op: OpMkdir, Path: "d", Mode: 0o755})
	do(Request{Op: OpSymlink, Path: "l", To: "d"})
	names("d l")
	do(Request{Op: OpMkdir, Path: "d/e", Mode: 0o755})
	do(Request{Op: OpSymlink, Path: "d/e/x", To: "y"})
	if _, err := c.Stat(ctx, "d/e/x"); err != nil {
		t.Error(err)
	}
	do(Request{Op: OpRename, Path: "d", To: "f"})
	names("f l")
	do(Request{Op: OpMkdir, Path: "d", Mode: 0o755})
	_, err := c.Stat(ctx, "d/e")
	wantErr(t, "Stat of what was moved", err, syscall.ENOENT)
	if _, err := c.Stat(ctx, "f/e/x"); err != nil {
		t.Error(err)
	}
	do(Request{Op: OpRemove, Path: "d", Flags: FlagDir})
	names("f l")
	do(Request{Op: OpLink, Path: "f/e/x", To: "h"})
	for _, name := range []string{"h", "f/e/x"} {
		if a, err := c.Stat(ctx, name); err != nil || a.Links != 2 {
			t.Errorf("%s has %d links, %v", name, a.Links, err)
		}
	}
	do(Request{Op: OpRemove, Path: "h"})
	if a, err := c.Stat(ctx, "f/e/x"); err != nil || a.Links != 1 {
		t.Errorf("it has %d links, %v", a.Links, err)
	}
	_, err = c.Do(ctx, Request{Op: OpRemove, Path: "f"})
	wantErr(t, "unlink of a directory", err, syscall.EISDIR)
	_, err = c.Do(ctx, Request{Op: OpRemove, Path: "l", Flags: FlagDir})
	wantErr(t, "rmdir of a link", err, syscall.ENOTDIR)
	_, err = c.Do(ctx, Request{Op: OpRemove, Path: "..", Flags: FlagDir})
	if err == nil {
		t.Error("the directory above was removed")
	}
}

// Names are bytes, and need not be UTF-8.
func TestNameNeedsNotBeUTF8(t *testing.T) {
	dir := t.TempDir()
	write(t, dir+"/\xff\xfe", "text")
	c, _ := pair(t, dir, false)
	if a, err := c.Stat(t.Context(), "\xff\xfe"); err != nil || a.Size != 4 {
		t.Errorf("%+v, %v", a, err)
	}
}

func TestPipeAtTheOtherEndDoesNotBlock(t *testing.T) {
	dir := t.TempDir()
	if err := syscall.Mkfifo(dir+"/pipe", 0o644); err != nil {
		t.Fatal(err)
	}
	c, _ := pair(t, dir, false)
	_, _, err := c.Open(t.Context(), "pipe", FlagRead, 0)
	wantErr(t, "Open", err, syscall.ENXIO)
	_, err = c.Do(t.Context(), Request{Op: OpSum, Path: "pipe"})
	wantErr(t, "sum", err, syscall.EINVAL)
}

func TestLargeDirectory(t *testing.T) {
	if testing.Short() {
		t.Skip("it makes 65,537 files")
	}
	dir := t.TempDir()
	add := func(n int) {
		if err := os.Link(dir+"/0", fmt.Sprint(dir, "/", n)); err != nil && !errors.Is(err, syscall.EMLINK) {
			t.Fatal(err)
		} else if err != nil {
			write(t, fmt.Sprint(dir, "/", n), "")
		}
	}
	write(t, dir+"/0", "")
	for n := 1; n < maxEntries; n++ {
		add(n)
	}
	c, _ := pair(t, dir, false)
	if entries, err := c.List(t.Context(), "."); err != nil || len(entries) != maxEntries {
		t.Errorf("%d entries, %v", len(entries), err)
	}
	add(maxEntries)
	d, _ := pair(t, dir, false)
	_, err := d.List(t.Context(), ".")
	wantErr(t, "List of too many", err, syscall.EFBIG)
	if _, err := d.Stat(t.Context(), "77"); err != nil {
		t.Error(err)
	}
}

type readWriteCloser struct {
	io.Reader
	io.Writer
}

func (readWriteCloser) Close() error { return nil }

// writes counts Writes, and tells of each.
type writes struct{ told chan int }

func (w writes) Write(p []byte) (int, error) {
	w.told <- len(p)
	return len(p), nil
}

func TestFramesOfACrowdShareAWrite(t *testing.T) {
	const frames = 100
	one := frame(&Request{Op: OpStat, Path: "a"}, 0)
	for _, onTheWay := range []int{crowd, crowd + 1} {
		w := writes{make(chan int, frames)}
		s := newStream(readWriteCloser{nil, w})
		for range frames {
			s.send(one, onTheWay)
		}
		got, size := 0, 0
		for size < frames*len(one) {
			size += <-w.told
			got++
		}
		if share := got < frames; share != (onTheWay > crowd) {
			t.Errorf("%d on the way: %d Writes for %d frames", onTheWay, got, frames)
		}
	}
}

func FuzzServer(f *testing.F) {
	for _, r := range []Request{{ID: 1, Op: OpList, Path: ".", Size: 10},
		{ID: 2, Op: OpOpen, Path: "a", Flags: FlagRead},
		{ID: 3, Op: OpSet, Path: "a", Set: &Set{}}, {ID: 4, Op: OpLock, Handle: 1, Lock: &Lock{}},
		{ID: 5, Op: OpRename, Path: "a", To: "../b"},
		{ID: 6, Op: OpPut, Path: "../a", Data: []byte("x"), Set: &Set{}}, {ID: 7, Op: OpPut, Path: "l/a", To: ".."},
		{ID: 8, Op: OpOpen, Path: "../a", Flags: FlagWrite | FlagAside}, {ID: 9, Op: OpSynced, Flags: 3}} {
		var b bytes.Buffer
		newStream(readWriteCloser{&b, &b}).send(frame(&r, 0), 0)
		f.Add(b.Bytes())
	}
	outside := f.TempDir()
	f.Fuzz(func(t *testing.T, b []byte) {
		if err := os.MkdirAll(outside+"/root", 0o755); err != nil {
			t.Fatal(err)
		}
		root, err := os.OpenRoot(outside + "/root")
		if err != nil {
			t.Fatal(err)
		}
		server, err := NewServer(root, false)
		if err != nil {
			t.Fatal(err)
		}
		_ = server.Serve(t.Context(), readWriteCloser{bytes.NewReader(b), io.Discard})
		if entries, err := os.ReadDir(outside); err != nil || len(entries) != 1 || entries[0].Name() != "root" {
			t.Errorf("outside there is %v, %v", entries, err)
		}
	})
}

func FuzzClient(f *testing.F) {
	for _, a := range []Answer{{ID: 1, Dirs: []Dir{{Path: ".", Entries: []Entry{{Name: "a"}}}}},
		{ID: 1, Attr: &Attr{Mode: 1}},
		{ID: 1, Errno: 5}, {ID: 2, Data: []byte("x")}, {ID: 1, Statfs: &Statfs{}}} {
		var b bytes.Buffer
		newStream(readWriteCloser{&b, &b}).send(frame(&a, 0), 0)
		f.Add(b.Bytes())
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		c := NewClient()
		near, far := net.Pipe()
		var work sync.WaitGroup
		work.Go(func() { _ = c.Serve(t.Context(), near) })
		ctx, cancel := context.WithCancel(t.Context())
		work.Go(func() { _, _ = c.Stat(ctx, "a") })
		head := make([]byte, 1)
		_, _ = far.Read(head)
		work.Go(func() { _, _ = io.Copy(io.Discard, far) })
		_, _ = far.Write(b)
		cancel()
		far.Close()
		work.Wait()
	})
}

func BenchmarkSequentialRead(b *testing.B) {
	dir := b.TempDir()
	write(b, dir+"/file", strings.Repeat("x", 64*chunk))
	c, _ := pair(b, dir, false)
	f := open(b, c, &Inode{}, "file", FlagRead)
	b.SetBytes(chunk)
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if data, err := f.Read(context.Background(), int64(n%64)*chunk, chunk); err != nil || len(data) != chunk {
			b.Fatal(len(data), err)
		}
	}
}

func BenchmarkSequentialWrite(b *testing.B) {
	c, _ := pair(b, b.TempDir(), false)
	f := open(b, c, &Inode{}, "file", FlagWrite|FlagCreate)
	data := make([]byte, chunk)
	b.SetBytes(chunk)
	b.ReportAllocs()
	for n := 0; b.Loop(); n++ {
		if err := f.Write(data, int64(n%64)*chunk); err != nil {
			b.Fatal(err)
		}
	}
	if err := f.Close(); err != nil {
		b.Fatal(err)
	}
}
