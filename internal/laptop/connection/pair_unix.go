//go:build unix

package connection

import (
	"net"
	"os"
	"sync/atomic"

	"kubevpn/pkg/host/unixsocket"
)

// pair returns the two ends of a connection within this process.
func pair() (a, b *end, err error) {
	near, far, err := unixsocket.Pair("shortcut")
	if err != nil {
		return nil, nil, err
	}
	x, y := new(atomic.Bool), new(atomic.Bool)
	if a, err = newEnd(near, x, y); err != nil {
		far.Close()
		return nil, nil, err
	}
	if b, err = newEnd(far, y, x); err != nil {
		a.Close()
		return nil, nil, err
	}
	return a, b, nil
}

// newEnd returns the end with this socket, which it closes.
func newEnd(socket *os.File, own, other *atomic.Bool) (*end, error) {
	defer socket.Close()
	conn, err := net.FileConn(socket)
	if err != nil {
		return nil, err
	}
	return &end{conn.(*net.UnixConn), own, other}, nil // FileConn returns the kind of the socket
}
