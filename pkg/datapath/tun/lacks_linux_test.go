package tun

import (
	"testing"

	"golang.org/x/sys/unix"
)

// Sandboxes put /dev/null in the place of /dev/net/tun.
func TestAnotherDeviceIsNoTUN(t *testing.T) {
	if !lacksTUN(unix.ENOTTY) {
		t.Error("a device that knows no TUNSETIFF is a TUN device")
	}
	if lacksTUN(unix.EPERM) {
		t.Error("a device that this user may not open is none")
	}
}
