package helper

import (
	"errors"
	"io"
	"log/slog"
	"os"
	"sync"
	"time"

	"kubevpn/internal/api"
)

// Daemon and helper send JSON messages over a stream, one at a time in each direction. Each message is a frame
// (frame.go). A descriptor arrives with the first byte of its message's frame.
//
//	daemon                                  helper
//	                                  ◀──   {"ready":true,"protocol":1}    once, read by Start
//	{"id":1,"op":"tun","name":...}    ──▶
//	                                  ◀──   {"id":1,"name":...} + descriptor
//	{"id":2,"op":"apply","state":...} ──▶
//	                                  ◀──   {"id":2,"applied":...}
//	                                  ◀──   {"changed":...} {"log":...}    at any time
//	shutdown(SHUT_WR), or death       ──▶   removes everything
//	                                  ◀──   {"closed":true,"error":...}
//	                                  ◀──   close, exit

// protocol is the version of the messages. The helper of the service can be of another kubevpn than the daemon.
// Increase the version when one of the two would misread, or miss, what the other sends.
const protocol = 1

type operation string

const (
	opTUN    operation = "tun"
	opApply  operation = "apply"
	opSocket operation = "socket"
)

// request is a message to the helper.
type request struct {
	ID      uint64            `json:"id"`
	Op      operation         `json:"op"`
	Name    string            `json:"name,omitempty"`    // opTUN
	MTU     int               `json:"mtu,omitempty"`     // opTUN
	State   *api.NetworkState `json:"state,omitempty"`   // opApply
	Network string            `json:"network,omitempty"` // opSocket
}

// response is a message from the helper.
type response struct {
	ID      uint64              `json:"id,omitempty"`   // of the request; 0: unasked
	Name    string              `json:"name,omitempty"` // of the file that comes with it; opTUN: of the interface
	Error   *api.Error          `json:"error,omitempty"`
	Applied *api.NetworkApplied `json:"applied,omitempty"`
	Changed *api.NetworkApplied `json:"changed,omitempty"`
	Log     *logLine            `json:"log,omitempty"`
	Ready   bool                `json:"ready,omitempty"`
	Closed  bool                `json:"closed,omitempty"`

	Protocol int    `json:"protocol,omitempty"` // with Ready
	Version  string `json:"version,omitempty"`  // with Ready: of the helper's program
}

// logLine is a log record of the helper. The helper writes no files; the daemon logs it.
type logLine struct {
	Level   slog.Level `json:"level"`
	Message string     `json:"msg"`
	Attrs   []string   `json:"attrs,omitempty"` // key, value, key, value
}

// channel is one end of a stream between two processes. A file can travel beside its bytes. One goroutine may read
// while another writes.
type channel interface {
	// Read discards files that come with the bytes.
	io.ReadWriteCloser
	// readWith is Read, but returns the file that came with the bytes, or nil. The caller owns it.
	readWith(b []byte) (n int, f *os.File, err error)
	// writeWith is Write. Unless f is nil, f goes with the first byte. The caller keeps f.
	writeWith(b []byte, f *os.File) (n int, err error)
	CloseRead() error
	CloseWrite() error
	SetWriteDeadline(t time.Time) error
}

// wire is one end of the stream. One goroutine may receive while any number send.
type wire struct {
	conn channel

	sending sync.Mutex
	broken  error // the first failed write, which may have sent a part of a frame
}

// openWire returns a wire that owns socket, which must be an end of the stream that Start creates.
func openWire(socket *os.File) (*wire, error) {
	defer socket.Close()
	conn, err := openChannel(socket)
	if err != nil {
		return nil, err
	}
	return &wire{conn: conn}, nil
}

// send writes one message, and a descriptor with it if f is not nil. The caller keeps f.
func (w *wire) send(message any, f *os.File) error {
	b, err := frame(message)
	if err != nil {
		return err
	}
	w.sending.Lock()
	defer w.sending.Unlock()
	if w.broken == nil {
		_, w.broken = w.conn.writeWith(b, f)
	}
	return w.broken
}

// receive reads one message into message, and returns the descriptor that came with it if files is true. At the end it
// returns io.EOF.
func (w *wire) receive(message any, files bool) (*os.File, error) {
	if !files {
		return nil, readFrame(w.conn, message)
	}
	c := collector{channel: w.conn}
	if err := readFrame(&c, message); err != nil {
		if c.file != nil {
			c.file.Close()
		}
		return nil, err
	}
	return c.file, nil
}

// collector reads one message from a channel, and keeps the file that comes with it.
type collector struct {
	channel
	file *os.File
}

// Read returns no bytes with an error: io.ReadFull drops the error of a read that completes what it wants.
func (c *collector) Read(b []byte) (int, error) {
	n, f, err := c.readWith(b)
	if f != nil && c.file != nil {
		f.Close()
		return 0, errors.New("more than one descriptor came with a message")
	}
	if f != nil {
		c.file = f
	}
	if err != nil {
		return 0, err
	}
	return n, nil
}
