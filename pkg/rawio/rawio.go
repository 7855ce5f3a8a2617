// Package rawio is the system calls of the data path: reads and writes of nonblocking descriptors that the runtime's
// poller waits for, made without telling Go's scheduler.
//
//	os.File, net.TCPConn: poller ─ entersyscall ─ read(2) ─ exitsyscall     wakes sysmon when the program was idle;
//	                                                                        after 20 µs another thread gets the processor
//	rawio:                poller ─ read(2)
//
// The scheduler is told of a system call because it may block. These cannot, but they can be long: a write to a TUN
// device runs the receiver's TCP on up to 64 KiB. The scheduler then hands the goroutine's processor to another
// thread, and the goroutine has to wait for one when it comes back; and when the program has been idle, the first
// system call wakes the scheduler's monitor, which looks around every 20 µs from then on. Both cost more than the
// call itself where a round trip crosses several programs on few cores: 609 against 576 µs for the byte that goes to a
// pod and back. (Between two goroutines that are never idle there is no difference.) gVisor's package rawfile does the same.
//
// A Batch, beneath TLS, makes fewer and larger ones of them.
//
// It is at the bottom of the layers: pkg/tun reads and writes the device with it, internal/cluster the laptop's
// connections to the API server, internal/manager those to pods and those that laptops come by.
package rawio

import (
	"fmt"
	"net"
)

// Listener accepts connections as *Conn. The listener beneath must be TCP's.
type Listener struct {
	net.Listener
	Unsent int // LimitUnsent's, if not 0
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
		return nil, fmt.Errorf("a connection of type %T where TCP was expected", c)
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
