package remotefs

import (
	"fmt"
	"os"
	"testing"
	"time"

	"kubevpn/internal/testenv"
)

// content opens a file, as a program does that looks at its attributes first, and returns what it holds.
func content(t *testing.T, c *Client, path string) string {
	t.Helper()
	if _, err := c.Stat(t.Context(), path); err != nil {
		t.Fatal(err)
	}
	f := open(t, c, &Inode{}, path, FlagRead)
	defer f.Close()
	text, err := f.Read(t.Context(), 0, chunk)
	if err != nil {
		t.Fatal(err)
	}
	return string(text)
}

// asked returns how many files are open early.
func (c *Client) asked() int {
	c.mu.Lock()
	defer c.mu.Unlock()
	return len(c.early.files)
}

// Files that are opened in order are there before they are asked for, and are opened once.
func TestFilesInOrderAreOpenedEarly(t *testing.T) {
	dir := t.TempDir()
	for _, d := range []string{"a", "b"} {
		if err := os.MkdirAll(dir+"/"+d+"/0dir", 0o755); err != nil {
			t.Fatal(err)
		}
		for n := range 200 {
			write(t, fmt.Sprintf("%s/%s/%03d", dir, d, n), fmt.Sprint(d, n))
		}
	}
	c, p := pair(t, dir, true)
	begun, most := time.Now(), 0
	for _, d := range []string{"a", "b"} {
		for n := range 200 {
			if got, want := content(t, c, fmt.Sprintf("%s/%03d", d, n)), fmt.Sprint(d, n); got != want {
				t.Fatalf("%s/%03d holds %q", d, n, got)
			}
			most = max(most, c.asked())
		}
		if c.asked() > 0 {
			t.Errorf("%d files are open early at the end of %s", c.asked(), d)
		}
	}
	if most < maxEarly/2 || most > maxEarly {
		t.Errorf("at most %d files were open early", most)
	}
	// An open and a close each; lists, once a second for each directory.
	if n, lists := p.requests.Load(), 4+4*int64(time.Since(begun)/Fresh); n > 800+lists {
		t.Errorf("it took %d requests", n)
	}
	content(t, c, "a/100")
	content(t, c, "a/050")
	content(t, c, "a/150")
	if c.asked() > 0 {
		t.Error("files are open early although nobody reads in order")
	}
}

// What was opened early is not what a program gets after a change, and is closed if nobody wants it.
func TestFilesThatWereOpenedEarlyAreNotOld(t *testing.T) {
	dir := t.TempDir()
	for n := range 20 {
		write(t, fmt.Sprintf("%s/%02d", dir, n), "old")
	}
	c, _ := pair(t, dir, false)
	for n := range 4 {
		content(t, c, fmt.Sprintf("%02d", n))
	}
	if c.asked() == 0 {
		t.Fatal("no file is open early")
	}
	i := &Inode{Path: func() string { return "05" }}
	f := open(t, c, i, "05", FlagWrite)
	if err := f.Write([]byte("new"), 0); err != nil {
		t.Fatal(err)
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	if got := content(t, c, "05"); got != "new" {
		t.Errorf("after a change of this machine: %q", got)
	}
	for n := 6; n < 9; n++ {
		content(t, c, fmt.Sprintf("%02d", n))
	}
	write(t, dir+"/12", "new")
	testenv.Eventually(t, 10*time.Second, func() error {
		if got := content(t, c, "12"); got != "new" {
			return fmt.Errorf("after a change of the other end: %q", got)
		}
		return nil
	})
	testenv.Eventually(t, 10*time.Second, func() error { // two are open while a program reads here
		content(t, c, "00")
		descriptors, err := os.ReadDir("/proc/self/fd")
		if err != nil {
			return err
		}
		left := 0
		for _, d := range descriptors {
			if to, _ := os.Readlink("/proc/self/fd/" + d.Name()); len(to) > len(dir) && to[:len(dir)] == dir {
				left++
			}
		}
		if left > 0 {
			return fmt.Errorf("%d files are open", left)
		}
		return nil
	})
}
