package interceptor

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"net"
	"net/http"
	"strconv"
	"strings"
)

// stream is a connection of HTTP/1 with its buffers.
type stream struct {
	net.Conn
	br *bufio.Reader
	bw *bufio.Writer
}

var (
	errChunk   = errors.New("a chunk is malformed")
	errDropped = errors.New("the other end has stopped reading")
)

// transfer moves the body of one message, as it was sent.
type transfer struct {
	from, to *stream
	length   int64 // or chunked, or untilEnd
	strict   bool  // chunks that other readers could read in another way are an error

	copies  copies // get the data, without chunks
	record  *body  // nil: none
	trailer http.Header
	moved   func(int) // called with the number of bytes that were read; may be nil

	failed  error // of the first write to to; what follows is dropped
	dropped int64 // bytes
	mayDrop int64 // bytes; then run fails
}

// errClient marks an error of the client's connection.
type errClient struct{ error }

func (e errClient) Unwrap() error { return e.error }

// run moves the body. The caller flushes. Errors of to have errDropped in their chain.
func (t *transfer) run() error {
	if t.length != chunked {
		return t.data(t.length)
	}
	for {
		line, err := t.line()
		if err != nil {
			return err
		}
		size, err := t.chunkSize(line)
		switch {
		case err != nil:
			return err
		case size == 0:
			return t.trailers()
		}
		if err := t.data(size); err != nil {
			return err
		}
		if line, err = t.line(); err != nil {
			return err
		}
		if len(line) != len(endOf(line)) || t.strict && len(line) != 2 {
			return errChunk
		}
	}
}

// chunkSize parses the line before a chunk. RFC 9112, 7.1.
func (t *transfer) chunkSize(line []byte) (int64, error) {
	end := endOf(line)
	text := line[:len(line)-len(end)]
	if t.strict && (len(end) != 2 || bytes.IndexByte(text, '\r') >= 0) {
		return 0, errChunk
	}
	digits, _, _ := bytes.Cut(text, []byte(";"))
	n, err := strconv.ParseUint(string(bytes.TrimRight(digits, " \t")), 16, 62)
	if err != nil {
		return 0, errChunk
	}
	return int64(n), nil
}

// line reads and sends a line, and returns it with its end. It is valid until the next read.
func (t *transfer) line() ([]byte, error) {
	if t.from.br.Buffered() == 0 {
		if err := t.flush(); err != nil {
			return nil, err
		}
	}
	line, err := t.from.br.ReadSlice('\n')
	if err != nil {
		if err == bufio.ErrBufferFull {
			err = errChunk
		}
		return nil, unexpected(err)
	}
	return line, t.write(line)
}

func (t *transfer) trailers() error {
	for size := 0; ; {
		line, err := t.line()
		if err != nil {
			return err
		}
		if size += len(line); size > maxHead {
			return errHeadTooLong
		}
		text := strings.TrimRight(string(line), "\r\n")
		if text == "" {
			return nil
		}
		name, value, _ := strings.Cut(text, ":")
		if t.trailer == nil {
			t.trailer = make(http.Header)
		}
		t.trailer.Add(name, strings.Trim(value, " \t"))
	}
}

// data moves n bytes, or all until the end of the connection if n is negative. It sends each piece before it waits for
// another.
func (t *transfer) data(n int64) error {
	b := copyBuffers.Get().(*[copyLen]byte)
	defer func() { copyBuffers.Put(b) }()
	short := false // the last read returned little, so the next one may wait for long
	for n != 0 {
		if t.from.br.Buffered() == 0 {
			if err := t.flush(); err != nil {
				return err
			}
			if short {
				copyBuffers.Put(b)
				_, err := t.from.br.Peek(1)
				b = copyBuffers.Get().(*[copyLen]byte)
				if err != nil {
					return ended(err, n)
				}
			} else if got, err := t.splice(n); got != 0 || err != nil {
				if err != nil || n < 0 && got < spliceLen {
					return err
				}
				n = t.left(n, got)
				continue
			}
		}
		piece := b[:]
		if n > 0 {
			piece = b[:min(n, copyLen)]
		}
		got, err := t.from.br.Read(piece)
		short = got < smallLen
		if got > 0 {
			n = t.left(n, int64(got))
			t.copies.put(piece[:got])
			t.record.add(piece[:got])
			if err := t.write(piece[:got]); err != nil {
				return err
			}
		}
		if err != nil {
			return ended(err, n)
		}
	}
	return nil
}

// ended returns the error of a body of which n bytes are missing, if a read returned err.
func ended(err error, n int64) error {
	if n == 0 || err == io.EOF && n < 0 {
		return nil
	}
	return unexpected(err)
}

// left returns the length of the rest of a body.
func (t *transfer) left(n, moved int64) int64 {
	if n < 0 {
		return n
	}
	return n - moved
}

// spliceLen is how much the kernel moves at once, so that an upload shows its progress.
const spliceLen = 1 << 20

// splice lets the kernel move the next part of a long body, if possible. Less than spliceLen of a body without a length
// means that it has ended.
func (t *transfer) splice(n int64) (moved int64, err error) {
	from, ok := t.from.Conn.(*net.TCPConn)
	to, ok2 := t.to.Conn.(*net.TCPConn)
	if !ok || !ok2 || n > 0 && n < copyLen || len(t.copies) > 0 || !t.record.full() || t.failed != nil {
		return 0, nil
	}
	part := int64(spliceLen)
	if n > 0 {
		part = min(part, n)
	}
	moved, err = to.ReadFrom(&io.LimitedReader{R: from, N: part})
	t.record.count(moved)
	if t.moved != nil {
		t.moved(int(moved))
	}
	if err == nil && n > 0 && moved < part {
		err = io.ErrUnexpectedEOF
	}
	return moved, err
}

func (t *transfer) write(p []byte) error {
	if t.moved != nil {
		t.moved(len(p))
	}
	if t.failed == nil {
		if _, t.failed = t.to.bw.Write(p); t.failed == nil {
			return nil
		}
	}
	return t.drop(len(p))
}

func (t *transfer) flush() error {
	if t.failed == nil {
		if t.failed = t.to.bw.Flush(); t.failed == nil {
			return nil
		}
	}
	return t.drop(0)
}

func (t *transfer) drop(n int) error {
	if t.dropped += int64(n); t.dropped > t.mayDrop || t.mayDrop == 0 {
		return errors.Join(errDropped, t.failed)
	}
	return nil
}

// unexpected returns err, or io.ErrUnexpectedEOF in place of io.EOF.
func unexpected(err error) error {
	if err == io.EOF {
		return io.ErrUnexpectedEOF
	}
	return err
}
