package rawio

import (
	"bufio"
	"io"
	"net"
	"sync"
)

// readAhead is how much one read of the kernel may take. The API server writes its side of a WebSocket in TLS
// records of 4 KiB, and TLS reads about a record at a time. Taking what is there at once gave 1.1 to 1.6 times
// the download over WebSocket, on a busy machine, and nothing over SPDY, whose records are of 16 KiB.
const readAhead = 64 << 10

// Batch is a connection beneath TLS with fewer, larger system calls: reads take what is there, and the TLS records
// that are written between Hold and Release leave together, so that the kernel can make large segments of them.
type Batch struct {
	net.Conn
	br *bufio.Reader

	mu   sync.Mutex // TLS may write by itself, from Read: alerts, key updates
	held bool
	out  []byte
}

// NewBatch takes conn over.
func NewBatch(conn net.Conn) *Batch {
	return &Batch{Conn: conn, br: bufio.NewReaderSize(conn, readAhead)}
}

// Read belongs to one goroutine at a time: TLS's.
func (b *Batch) Read(p []byte) (int, error) { return b.br.Read(p) }

// Write writes p, or keeps it until Release.
func (b *Batch) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held {
		b.out = append(b.out, p...)
		return len(p), nil
	}
	return b.Conn.Write(p)
}

// Through writes p to w, which writes to b, as one write. Hold and Release are then not the caller's.
func (b *Batch) Through(w io.Writer, p []byte) (int, error) {
	b.Hold()
	n, err := w.Write(p)
	if e := b.Release(); err == nil && e != nil {
		n, err = 0, e
	}
	return n, err
}

// Hold makes Write keep what it is given.
func (b *Batch) Hold() {
	b.mu.Lock()
	b.held = true
	b.mu.Unlock()
}

// Release writes what was kept. After an error nothing may follow: part of it may be out.
func (b *Batch) Release() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, err := b.Conn.Write(b.out)
	b.held, b.out = false, b.out[:0]
	return err
}
