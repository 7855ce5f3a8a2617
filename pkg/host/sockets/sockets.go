// Package sockets lists the TCP and UDP sockets of this machine with what the kernel knows about each, and the programs
// that own them. It needs no root: without it, the programs of other users remain unknown. On other systems than Linux,
// both functions fail with errors.ErrUnsupported.
package sockets

import (
	"net/netip"
	"time"
)

// Socket is a TCP or UDP socket in the network namespace of this process.
type Socket struct {
	Proto  uint8          // IP protocol number
	Local  netip.AddrPort // with the unspecified address: an unconnected UDP socket
	Remote netip.AddrPort // with the unspecified address and port 0: likewise
	Inode  uint32         // 0: no program has the socket any more
	Unread int            // bytes that the program has not read
	TCP    *TCP           // nil for UDP
}

// TCP is the state of a TCP connection.
type TCP struct {
	Connecting     bool // the handshake is not complete
	Sent, Received uint64
	Unsent         int // bytes that wait for acknowledgements, or for room in the peer's window
	RTT            time.Duration
	Retransmits    uint32
}

// Process is a program that has a socket.
type Process struct {
	PID  int
	Name string // at most 15 bytes, which the program may change
}
