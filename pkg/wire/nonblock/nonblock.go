// Package nonblock reads and writes the nonblocking descriptors of the data path without telling Go's scheduler. The
// runtime's poller still does the waiting.
//
//	os.File, net.TCPConn: poller ─ entersyscall ─ read(2) ─ exitsyscall     wakes sysmon when the program was idle;
//	                                                                        after 20 µs another thread gets the processor
//	nonblock:             poller ─ read(2)
//
// The scheduler must know of system calls that may block. These cannot block, but they can take long: a write to a
// TUN device runs the receiver's TCP on up to 64 KiB. The scheduler then gives the goroutine's processor to another
// thread, and the goroutine has to wait for one when the call returns. After idle time, the first system call also
// wakes the scheduler's monitor, which then polls every 20 µs. Both cost more than the call itself when a round
// trip crosses several programs on few cores: 609 instead of 576 µs for one byte to a pod and back. Between two
// goroutines that are never idle there is no difference. gVisor's package rawfile does the same.
//
// A Batch, below TLS, makes fewer and larger system calls.
//
// pkg/datapath/tun uses the package for the device, internal/kube/client for connections to the API server, and
// internal/incluster/manager for connections to pods and from laptops.
package nonblock

import (
	"fmt"
	"net"
)

// Listener accepts connections as *Conn. The embedded listener must be a TCP listener.
type Listener struct {
	net.Listener
	Unsent int // if not 0, the argument of LimitUnsent for each connection
}

// Accept implements net.Listener.
func (l Listener) Accept() (net.Conn, error) {
	c, err := l.Listener.Accept()
	if err != nil {
		return nil, err
	}
	tcp, ok := c.(*net.TCPConn)
	if !ok {
		c.Close()
		return nil, fmt.Errorf("accepted a connection of type %T, not TCP", c)
	}
	conn, err := NewConn(tcp)
	if err == nil && l.Unsent > 0 {
		err = conn.LimitUnsent(l.Unsent)
	}
	if err != nil {
		tcp.Close()
		return nil, err
	}
	return conn, nil
}
