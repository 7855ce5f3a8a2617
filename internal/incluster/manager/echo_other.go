//go:build !linux

package manager

import (
	"fmt"
	"net/netip"
	"runtime"
	"syscall"
)

// mayPing returns false, because the manager runs on Linux and elsewhere only in tests.
func mayPing() bool { return false }

func openPinger(netip.Addr) (datagrams, error) {
	return nil, fmt.Errorf("ICMP sockets on %s: %w", runtime.GOOS, syscall.EACCES)
}

func endsAtNextHop(netip.Addr) bool { return false }
