package helper

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"io"
)

// A frame is one message on a stream: the length of the message in bytes, then the message in JSON. The length has four
// bytes, the most significant first.
const (
	frameHeader = 4
	maxMessage  = 16 << 20 // routes, named networks and domains of 16 links, each at its limit, are less
)

// frame returns the frame of a message.
func frame(message any) ([]byte, error) {
	b, err := json.Marshal(message)
	if err != nil {
		return nil, err
	}
	if len(b) > maxMessage {
		return nil, tooLong(len(b))
	}
	out := make([]byte, frameHeader, frameHeader+len(b))
	binary.BigEndian.PutUint32(out, uint32(len(b)))
	return append(out, b...), nil
}

// readFrame reads one frame into message, and no byte after it. At the end of the stream it returns io.EOF, but
// io.ErrUnexpectedEOF inside a frame.
func readFrame(r io.Reader, message any) error {
	var header [frameHeader]byte
	if _, err := io.ReadFull(r, header[:]); err != nil {
		return err
	}
	n := binary.BigEndian.Uint32(header[:])
	if n > maxMessage {
		return tooLong(int(n))
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

func tooLong(n int) error {
	return fmt.Errorf("the message has %d bytes, more than the limit of %d", n, maxMessage)
}
