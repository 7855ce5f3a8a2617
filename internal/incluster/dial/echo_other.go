//go:build !linux

package dial

import (
	"fmt"
	"net/netip"
	"runtime"
	"syscall"
)

// MayPing returns false, because the manager runs on Linux and elsewhere only in tests.
func MayPing() bool { return false }

func openPinger(netip.Addr) (datagrams, error) {
	return nil, fmt.Errorf("ICMP sockets on %s: %w", runtime.GOOS, syscall.EACCES)
}

func endsAtNextHop(netip.Addr) bool { return false }
