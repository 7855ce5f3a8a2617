//go:build !linux

package manager

import (
	"net/netip"

	"kubevpn/pkg/transport"
)

// mayPing reports whether ICMP sockets are permitted. The manager runs on Linux; elsewhere nobody wrote it.
func mayPing() bool { return false }

func openPinger(netip.Addr) (pinger, error) { return nil, transport.CodeProhibited.Err() }
