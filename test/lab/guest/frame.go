package guest

import (
	"encoding/binary"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"sync"
)

// kind is the kind of a frame. A connection is a sequence of frames: a byte for the kind, four bytes for the length,
// and the content. The first frame is a request, and its answer is done or failed. After the answer to a dial, the
// bytes of the dialed connection follow.
type kind byte

const (
	kindRequest kind = iota // JSON of a request
	kindDone                // nothing
	kindFailed              // JSON of a failure
	kindInput               // standard input; empty at its end
	kindOutput              // standard output
	kindError               // standard error
	kindSignal              // one byte: a signal's number
	kindSize                // JSON of a size
	kindExit                // JSON of an exit; the last frame
)

// largest is the maximum length of a frame's content. More is an error of the other end.
const largest = 1 << 20

// request asks for a program, or for a connection.
type request struct {
	Argv     []string `json:"argv,omitempty"`
	Env      []string `json:"env,omitempty"`
	Terminal *size    `json:"terminal,omitempty"` // the program gets a terminal of this size
	Alone    string   `json:"alone,omitempty"`    // starts after the previous program of this name has ended

	Network string `json:"network,omitempty"`
	Address string `json:"address,omitempty"`
	Timeout int64  `json:"timeout,omitempty"` // milliseconds; 0: the default of the system
}

type size struct{ Rows, Cols uint16 }

type failure struct {
	Text  string
	Errno int // 0 if the system has no number for it
}

// exit is the exit code of a program, as a shell reports it: 128 and more for a signal.
type exit struct{ Code int }

func readFrame(r io.Reader) (kind, []byte, error) {
	var header [5]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return 0, nil, err
	}
	n := binary.BigEndian.Uint32(header[1:])
	if n > largest {
		return 0, nil, fmt.Errorf("a frame of %d bytes", n)
	}
	content := make([]byte, n)
	_, err := io.ReadFull(r, content)
	if err == io.EOF {
		err = io.ErrUnexpectedEOF // the end is expected between frames
	}
	return kind(header[0]), content, err
}

// frames writes frames, from any goroutine.
type frames struct {
	mu sync.Mutex
	w  io.Writer
}

func (f *frames) write(k kind, content []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	return f.put(k, content)
}

// put is write for callers that hold the lock.
func (f *frames) put(k kind, content []byte) error {
	header := []byte{byte(k), 0, 0, 0, 0}
	binary.BigEndian.PutUint32(header[1:], uint32(len(content)))
	b := net.Buffers{header, content}
	_, err := b.WriteTo(f.w)
	return err
}

func (f *frames) writeJSON(k kind, v any) error {
	content, err := json.Marshal(v)
	if err != nil {
		return err
	}
	return f.write(k, content)
}

// stream is one kind of frames as a Writer.
type stream struct {
	frames *frames
	kind   kind
}

func (s stream) Write(p []byte) (int, error) {
	for written := 0; written < len(p); {
		n := min(len(p)-written, largest)
		if err := s.frames.write(s.kind, p[written:written+n]); err != nil {
			return written, err
		}
		written += n
	}
	return len(p), nil
}
