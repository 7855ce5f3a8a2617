package daemon

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
)

func TestOneDaemonHoldsTheLock(t *testing.T) {
	path := filepath.Join(t.TempDir(), "daemon.lock")
	for range 2 { // also after the first has ended
		unlock, err := lock(path)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := lock(path); !errors.Is(err, ErrRunning) {
			t.Errorf("the second lock: %v", err)
		}
		if pid, err := os.ReadFile(path); err != nil || strings.TrimSpace(string(pid)) != strconv.Itoa(os.Getpid()) {
			t.Errorf("the lock contains %q, %v", pid, err)
		}
		if err := unlock(); err != nil {
			t.Fatal(err)
		}
	}
}

func TestSocketOfAnEarlierDaemonIsReplaced(t *testing.T) {
	path := filepath.Join(t.TempDir(), "daemon.sock")
	for range 2 {
		l, err := listen(path, nil)
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { l.Close() })
		if unixListener, ok := l.(*net.UnixListener); ok {
			unixListener.SetUnlinkOnClose(false) // as after a kill
		}
		conn, err := net.Dial("unix", path)
		if err != nil {
			t.Fatal(err)
		}
		conn.Close()
		l.Close()
	}
}
