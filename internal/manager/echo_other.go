//go:build !linux

package manager

import (
	"fmt"
	"net/netip"
	"runtime"
	"syscall"
)

// mayPing reports whether ICMP sockets are permitted. The manager runs on Linux; elsewhere nobody wrote it.
func mayPing() bool { return false }

func openPinger(netip.Addr) (pinger, error) {
	return nil, fmt.Errorf("ICMP sockets on %s: %w", runtime.GOOS, syscall.EACCES)
}
