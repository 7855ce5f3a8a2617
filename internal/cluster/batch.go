package cluster

import (
	"bufio"
	"net"
	"sync"
)

// readAhead is how much one read of the kernel may take. The API server writes its side of a WebSocket in TLS
// records of 4 KiB, and TLS reads about a record at a time. Taking what is there at once gave 1.1 to 1.6 times
// the download over WebSocket, on a busy machine, and nothing over SPDY, whose records are of 16 KiB.
const readAhead = 64 << 10

// batchConn is a TCP connection beneath TLS with fewer, larger system calls: reads take what is there, and the
// TLS records of one frame leave together, so that the kernel can make large segments of them.
type batchConn struct {
	net.Conn
	br *bufio.Reader

	mu   sync.Mutex // TLS may write by itself, from Read: alerts, key updates
	held bool
	out  []byte
}

func newBatchConn(conn net.Conn) *batchConn {
	return &batchConn{Conn: conn, br: bufio.NewReaderSize(conn, readAhead)}
}

// Read belongs to one goroutine at a time: TLS's.
func (c *batchConn) Read(p []byte) (int, error) { return c.br.Read(p) }

// Write writes p, or keeps it until release.
func (c *batchConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.held {
		c.out = append(c.out, p...)
		return len(p), nil
	}
	return c.Conn.Write(p)
}

// hold makes Write keep what it is given.
func (c *batchConn) hold() {
	c.mu.Lock()
	c.held = true
	c.mu.Unlock()
}

// release writes what was kept. After an error nothing may follow: part of it may be out.
func (c *batchConn) release() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	_, err := c.Conn.Write(c.out)
	c.held, c.out = false, c.out[:0]
	return err
}
