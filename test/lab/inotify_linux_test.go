package lab

import (
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

func TestInotifyLimitIsChecked(t *testing.T) {
	left := 20
	err := tryInotify(2, func() (int, error) {
		if left--; left < 0 {
			return -1, unix.EMFILE
		}
		return unix.InotifyInit1(unix.IN_CLOEXEC)
	})
	for _, want := range []string{"only 20 inotify instances are left", "2 nodes take up to 34", "sysctl -w fs.inotify.max_user_instances=1024"} {
		if err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("got %v, want the text %q", err, want)
		}
	}
	if err := checkInotify(1); err != nil {
		t.Errorf("one node, after the instances were given back: %v", err)
	}
}
