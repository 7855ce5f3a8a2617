package podconn

import (
	"bufio"
	"crypto/sha1"
	"encoding/base64"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
)

// webSocket is the client side of RFC 6455 over an upgraded connection. It is a byte stream: the payload of binary
// messages, without their borders.
//
// A connection of the gorilla library cannot be read after a read deadline has passed, and splits messages at its write
// buffer. A Read of a webSocket that times out can be repeated, and a SPDY frame is one WebSocket frame, sent in one
// Write.
//
// Only one goroutine may read at a time, and one write.
type webSocket struct {
	w  io.Writer
	br *bufio.Reader

	left    uint64 // payload bytes of the current data frame that were not read
	started bool   // a fragmented message has begun and not ended

	// pong is called from Read with the payload of a ping, which it must copy. Nil: pings get no answer.
	pong func(payload []byte)
}

const (
	opContinuation = 0x0
	opBinary       = 0x2
	opClose        = 0x8
	opPing         = 0x9
	opPong         = 0xa

	finalBit = 0x80
	maskBit  = 0x80

	// maxControl is the longest payload of a ping, pong or close frame (RFC 6455, 5.5).
	maxControl = 125
	// headroom is the longest header of a masked frame: 2 bytes, 8 of length, 4 of mask.
	headroom = 14
	// readBuffer is the size of the buffer for frame headers. It is small, because payload in it is copied twice.
	readBuffer = 4 << 10
	// closeNormal is the status code of a close frame after which nothing is missing.
	closeNormal = 1000
)

var errWebSocket = errors.New("WebSocket protocol error")

func newWebSocket(conn io.ReadWriter) *webSocket {
	return &webSocket{w: conn, br: bufio.NewReaderSize(conn, readBuffer)}
}

// Read reads payload of binary messages into p. It returns io.EOF after the peer's close frame. After a timeout, Read
// may be called again.
func (s *webSocket) Read(p []byte) (int, error) {
	for s.left == 0 {
		if err := s.nextFrame(); err != nil {
			return 0, err
		}
	}
	if uint64(len(p)) > s.left {
		p = p[:s.left]
	}
	n, err := s.br.Read(p)
	s.left -= uint64(n)
	return n, unexpected(err)
}

// nextFrame reads the header of one frame, and the payload of a control frame. It takes them out of the buffer only
// when they are complete, so that a timeout loses nothing.
func (s *webSocket) nextFrame() error {
	head, err := s.peek(2)
	if err != nil {
		return err
	}
	final, reserved, op := head[0]&finalBit != 0, head[0]&0x70, head[0]&0x0f
	length, size := uint64(head[1]&0x7f), 2
	switch length {
	case 126:
		size = 4
	case 127:
		size = 10
	}
	if reserved != 0 || head[1]&maskBit != 0 {
		return fmt.Errorf("%w: reserved bits, or a masked frame from the API server", errWebSocket)
	}
	if op >= opClose {
		return s.control(op, final, int(length))
	}
	if (op == opContinuation) != s.started || op != opContinuation && op != opBinary {
		return fmt.Errorf("%w: opcode %d out of place", errWebSocket, op)
	}
	if size > 2 {
		if head, err = s.peek(size); err != nil {
			return err
		}
		if size == 4 {
			length = uint64(binary.BigEndian.Uint16(head[2:]))
		} else if length = binary.BigEndian.Uint64(head[2:]); length >= 1<<63 {
			return fmt.Errorf("%w: length %d", errWebSocket, length)
		}
	}
	s.left, s.started = length, !final
	return s.discard(size)
}

func (s *webSocket) control(op byte, final bool, length int) error {
	if !final || length > maxControl {
		return fmt.Errorf("%w: control frame of %d bytes, final %t", errWebSocket, length, final)
	}
	frame, err := s.peek(2 + length)
	if err != nil {
		return err
	}
	payload := frame[2:]
	switch op {
	case opPing:
		if s.pong != nil {
			s.pong(payload)
		}
	case opPong:
	case opClose:
		if length >= 2 {
			if code := binary.BigEndian.Uint16(payload); code != closeNormal {
				return fmt.Errorf("the API server closed the WebSocket with code %d: %q", code, payload[2:])
			}
		}
		return io.EOF // the frame stays in the buffer, so every later Read returns the same
	default:
		return fmt.Errorf("%w: opcode %d", errWebSocket, op)
	}
	return s.discard(2 + length)
}

// peek returns the next n bytes. The end of the connection is unexpected, because a close frame comes first.
func (s *webSocket) peek(n int) ([]byte, error) {
	b, err := s.br.Peek(n)
	return b, unexpected(err)
}

// unexpected returns err, or io.ErrUnexpectedEOF in place of io.EOF.
func unexpected(err error) error {
	if errors.Is(err, io.EOF) {
		return io.ErrUnexpectedEOF
	}
	return err
}

func (s *webSocket) discard(n int) error {
	_, err := s.br.Discard(n)
	return err
}

// writeFrame sends buf[headroom:] as one binary message in one Write. It overwrites buf.
func (s *webSocket) writeFrame(buf []byte) error { return s.write(opBinary, buf) }

func (s *webSocket) write(op byte, buf []byte) error {
	payload := buf[headroom:]
	at := headroom - 4
	binary.LittleEndian.PutUint32(buf[at:], rand.Uint32())
	key := [4]byte(buf[at:])
	switch n := len(payload); {
	case n <= 125:
		at--
		buf[at] = maskBit | byte(n)
	case n <= 0xffff:
		at -= 3
		buf[at] = maskBit | 126
		binary.BigEndian.PutUint16(buf[at+1:], uint16(n))
	default:
		at -= 9
		buf[at] = maskBit | 127
		binary.BigEndian.PutUint64(buf[at+1:], uint64(n))
	}
	at--
	buf[at] = finalBit | op
	mask(payload, key)
	_, err := s.w.Write(buf[at:])
	return err
}

// mask computes the exclusive or of b and the repeated key.
func mask(b []byte, key [4]byte) {
	k := uint64(binary.LittleEndian.Uint32(key[:]))
	k |= k << 32
	for len(b) >= 32 { // four words per iteration: about 20 GB/s
		binary.LittleEndian.PutUint64(b, binary.LittleEndian.Uint64(b)^k)
		binary.LittleEndian.PutUint64(b[8:], binary.LittleEndian.Uint64(b[8:])^k)
		binary.LittleEndian.PutUint64(b[16:], binary.LittleEndian.Uint64(b[16:])^k)
		binary.LittleEndian.PutUint64(b[24:], binary.LittleEndian.Uint64(b[24:])^k)
		b = b[32:]
	}
	for i := range b {
		b[i] ^= key[i&3]
	}
}

// acceptKey returns the Sec-WebSocket-Accept that answers a Sec-WebSocket-Key (RFC 6455, section 4.2.2).
func acceptKey(key string) string {
	sum := sha1.Sum([]byte(key + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"))
	return base64.StdEncoding.EncodeToString(sum[:])
}
