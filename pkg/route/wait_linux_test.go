package route

import (
	"net"
	"testing"
	"time"
)

// waitGone waits until a link has gone: the kernel may finish removing a device after close has returned.
func waitGone(t *testing.T, name string) {
	t.Helper()
	for deadline := time.Now().Add(5 * time.Second); ; {
		if _, err := net.InterfaceByName(name); err != nil {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("%s is still there", name)
		}
		time.Sleep(time.Millisecond)
	}
}
