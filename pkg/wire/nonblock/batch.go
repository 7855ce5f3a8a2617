package nonblock

import (
	"bufio"
	"io"
	"net"
	"sync"
)

// readAhead is the size of one read in bytes. The API server writes to a WebSocket in TLS records of 4 KiB, and TLS
// reads about one record at a time. Larger reads made downloads over WebSocket 1.1 to 1.6 times as fast on a busy
// machine, and changed nothing over SPDY, whose records have 16 KiB.
const readAhead = 64 << 10

// Batch is a connection below TLS that makes fewer, larger system calls. Read reads ahead, and the TLS records written
// between Hold and Release go out in one write, so that the kernel can build large segments.
type Batch struct {
	net.Conn
	br *bufio.Reader

	mu   sync.Mutex // TLS may also write from Read: alerts, key updates
	held bool
	out  []byte
}

// NewBatch returns a Batch that owns conn.
func NewBatch(conn net.Conn) *Batch {
	return &Batch{Conn: conn, br: bufio.NewReaderSize(conn, readAhead)}
}

// Read implements net.Conn. Only one goroutine may call it, as TLS does.
func (b *Batch) Read(p []byte) (int, error) { return b.br.Read(p) }

// Write writes p, or buffers it until Release.
func (b *Batch) Write(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.held {
		b.out = append(b.out, p...)
		return len(p), nil
	}
	return b.Conn.Write(p)
}

// Through writes p to w, which must write to b, and sends the result in one write. It calls Hold and Release.
func (b *Batch) Through(w io.Writer, p []byte) (int, error) {
	b.Hold()
	n, err := w.Write(p)
	if e := b.Release(); err == nil && e != nil {
		n, err = 0, e
	}
	return n, err
}

// Hold makes Write buffer until Release.
func (b *Batch) Hold() {
	b.mu.Lock()
	b.held = true
	b.mu.Unlock()
}

// Release writes the buffer. After an error the caller must not write again, because a part may have been sent.
func (b *Batch) Release() error {
	b.mu.Lock()
	defer b.mu.Unlock()
	_, err := b.Conn.Write(b.out)
	b.held, b.out = false, b.out[:0]
	return err
}
