package unixsocket

import (
	"bytes"
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
)

// A frame is one message on a stream: the length of the message in bytes, then the message in JSON. The length has four
// bytes, the most significant first. A descriptor arrives with the first byte of its message's frame.
const frameHeader = 4

// Conn is one end of a stream of messages between two processes. A message can carry one file. One goroutine may
// receive while any number send.
type Conn struct {
	*net.UnixConn
	limit int // of a message in bytes, in both directions

	sending sync.Mutex
	broken  error // the first failed write, which may have sent a part of a frame
}

// NewConn returns a Conn that owns socket, which must be a stream. limit bounds the bytes of a message in JSON.
func NewConn(socket *net.UnixConn, limit int) *Conn { return &Conn{UnixConn: socket, limit: limit} }

// Open is NewConn for a file, which it closes. It returns an error unless the file is a stream socket of this kind.
func Open(file *os.File, limit int) (*Conn, error) {
	defer file.Close()
	conn, err := net.FileConn(file)
	if err != nil {
		return nil, err
	}
	socket, ok := conn.(*net.UnixConn)
	if !ok || socket.LocalAddr().Network() != "unix" {
		conn.Close()
		return nil, errors.New("not a unix stream socket")
	}
	return NewConn(socket, limit), nil
}

// Send writes one message, with the descriptor of file unless that is nil. It does not close file. After a failed
// write, each Send returns that error.
func (c *Conn) Send(message any, file syscall.Conn) error {
	b, err := frame(message, c.limit)
	if err != nil {
		return err
	}
	c.sending.Lock()
	defer c.sending.Unlock()
	if c.broken != nil {
		return c.broken
	}
	n := 0
	if file != nil {
		n, c.broken = Send(c.UnixConn, b, file)
	}
	if c.broken == nil && n < len(b) { // the socket had no room for all
		_, c.broken = c.Write(b[n:])
	}
	return c.broken
}

// Receive reads one message into message, and returns the file that came with it, named name, or nil. The caller owns
// the file. If name is empty, the kernel closes descriptors that come with the message; otherwise more than one are an
// error, and none stays open. At the end of the stream Receive returns io.EOF, but io.ErrUnexpectedEOF inside a frame.
func (c *Conn) Receive(message any, name string) (*os.File, error) {
	r := reader{conn: c.UnixConn, name: name}
	err := readFrame(&r, message, c.limit)
	if err != nil && r.file != nil {
		r.file.Close()
		r.file = nil
	}
	return r.file, err
}

// reader reads one message, and keeps the file that comes with it.
type reader struct {
	conn *net.UnixConn
	name string
	file *os.File
}

// Read returns no bytes with an error: io.ReadFull drops the error of a read that completes what it wants.
func (r *reader) Read(b []byte) (n int, err error) {
	var file *os.File
	if r.name == "" {
		n, err = r.conn.Read(b)
	} else {
		n, file, err = Receive(r.conn, b, r.name)
	}
	switch {
	case errors.Is(err, io.EOF), errors.Is(err, syscall.ECONNRESET): // the latter: it ended with unread data
		return 0, io.EOF
	case err != nil:
		return 0, err
	case file != nil && r.file != nil:
		file.Close()
		return 0, errors.New("more than one descriptor came with a message")
	case file != nil:
		r.file = file
	}
	return n, nil
}

// frame returns the frame of a message.
func frame(message any, limit int) ([]byte, error) {
	b, err := json.Marshal(message)
	if err != nil {
		return nil, err
	}
	if len(b) > limit {
		return nil, tooLong(len(b), limit)
	}
	out := make([]byte, frameHeader, frameHeader+len(b))
	binary.BigEndian.PutUint32(out, uint32(len(b)))
	return append(out, b...), nil
}

// readFrame reads one frame into message, and no byte after it.
func readFrame(r io.Reader, message any, limit int) error {
	var header [frameHeader]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(header[:])
	if int64(n) > int64(limit) {
		return tooLong(int(n), limit)
	}
	var b bytes.Buffer // it grows with the bytes that arrive, not with the announced length
	if _, err := io.CopyN(&b, r, int64(n)); err != nil {
		if errors.Is(err, io.EOF) {
			return io.ErrUnexpectedEOF
		}
		return err
	}
	return json.Unmarshal(b.Bytes(), message)
}

func tooLong(n, limit int) error {
	return fmt.Errorf("the message has %d bytes, more than the limit of %d", n, limit)
}

// LogLine is a log record of one process, which the other logs.
type LogLine struct {
	Level   slog.Level `json:"level"`
	Message string     `json:"msg"`
	Attrs   []string   `json:"attrs,omitempty"` // key, value, key, value
}

// To logs the record with logger. It drops a key without a value.
func (l *LogLine) To(logger *slog.Logger) {
	attrs := make([]any, 0, len(l.Attrs))
	for _, a := range l.Attrs[:len(l.Attrs)/2*2] {
		attrs = append(attrs, a)
	}
	logger.Log(context.Background(), l.Level, l.Message, attrs...)
}
