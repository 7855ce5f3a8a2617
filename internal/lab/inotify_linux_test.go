package lab

import (
	"strings"
	"testing"
)

func TestCheckInotify(t *testing.T) {
	if err := checkInotify(1 << 20); err == nil || !strings.Contains(err.Error(), "sysctl -w fs.inotify.max_user_instances=") {
		t.Errorf("a million nodes: %v", err)
	}
	if err := checkInotify(1); err != nil {
		t.Errorf("one node, after the instances were given back: %v", err)
	}
}
