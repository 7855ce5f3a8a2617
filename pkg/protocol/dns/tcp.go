package dns

import (
	"encoding/binary"
	"fmt"
	"io"

	"github.com/miekg/dns"
)

// writeTCP writes one message with its length before it (RFC 1035 section 4.2.2), in one piece.
func writeTCP(w io.Writer, m []byte) error {
	if len(m) > dns.MaxMsgSize {
		return fmt.Errorf("a message of %d bytes is too large", len(m))
	}
	framed := make([]byte, 2+len(m))
	binary.BigEndian.PutUint16(framed, uint16(len(m)))
	copy(framed[2:], m)
	_, err := w.Write(framed)
	return err
}

// readTCP reads one message. io.EOF means the end between messages.
func readTCP(r io.Reader) ([]byte, error) {
	var size [2]byte
	if _, err := io.ReadFull(r, size[:]); err != nil {
		return nil, err
	}
	m := make([]byte, binary.BigEndian.Uint16(size[:]))
	if _, err := io.ReadFull(r, m); err != nil {
		return nil, fmt.Errorf("reading a message: %w", err)
	}
	return m, nil
}
