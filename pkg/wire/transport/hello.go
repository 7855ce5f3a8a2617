package transport

import (
	"encoding/binary"
	"encoding/hex"
	"fmt"
	"io"
)

// Version is the version of the wire format in spec.md. Both ends must have the same.
const Version = 1

// SessionID identifies a session, also in logs and status. It is not secret.
type SessionID [16]byte

// String returns 32 hexadecimal digits.
func (id SessionID) String() string { return hex.EncodeToString(id[:]) }

// token is the secret that the first handshake of a session sets and every later one must repeat.
type token [32]byte

const magic = "kubevpn"

const (
	helloLen  = 72
	prefixLen = 8 // magic and version: the same in every version
	replyLen  = 24
)

// hello is the first message on every conn, from the laptop.
type hello struct {
	session  SessionID
	token    token
	link     uint8
	first    bool   // the session may be created if it is unknown
	attempt  uint32 // grows with each conn of the link, so that a late one never replaces a newer one
	received uint64 // bytes that the laptop received on this link so far
}

func (h hello) marshal() []byte {
	b := make([]byte, 0, helloLen)
	b = append(b, magic...)
	b = append(b, Version)
	b = append(b, h.session[:]...)
	b = append(b, h.token[:]...)
	flags := byte(0)
	if h.first {
		flags = 1
	}
	b = append(b, h.link, flags, 0, 0)
	b = binary.BigEndian.AppendUint32(b, h.attempt)
	return binary.BigEndian.AppendUint64(b, h.received)
}

// readHello reads a hello. With ErrVersion the answer statusVersion is due.
func readHello(r io.Reader) (h hello, err error) {
	var b [helloLen]byte
	if err := readPrefix(r, b[:prefixLen]); err != nil {
		return h, err
	}
	if _, err := io.ReadFull(r, b[prefixLen:]); err != nil {
		return h, fmt.Errorf("reading hello: %w", err)
	}
	copy(h.session[:], b[8:24])
	copy(h.token[:], b[24:56])
	h.link, h.first = b[56], b[57]&1 != 0
	h.attempt = binary.BigEndian.Uint32(b[60:])
	h.received = binary.BigEndian.Uint64(b[64:])
	return h, nil
}

func readPrefix(r io.Reader, b []byte) error {
	if _, err := io.ReadFull(r, b); err != nil {
		return fmt.Errorf("reading hello: %w", err)
	}
	if string(b[:len(magic)]) != magic {
		return fmt.Errorf("%w: not a kubevpn session", ErrProtocol)
	}
	if b[len(magic)] != Version {
		return fmt.Errorf("%w: theirs is %d, ours %d", ErrVersion, b[len(magic)], Version)
	}
	return nil
}

type status uint8

const (
	statusOK      status = 0
	statusUnknown status = 1 // no such session, or no such link in it
	statusRefused status = 2 // wrong token
	statusFull    status = 3
	statusVersion status = 4
	statusStale   status = 5 // the manager has seen a newer conn of this link
)

func (s status) err() error {
	switch s {
	case statusOK:
		return nil
	case statusUnknown:
		return ErrSessionLost
	case statusRefused:
		return ErrRefused
	case statusFull:
		return ErrServerFull
	case statusVersion:
		return ErrVersion
	case statusStale:
		return errSuperseded
	}
	return fmt.Errorf("%w: handshake status %d", ErrProtocol, uint8(s))
}

// reply answers a hello.
type reply struct {
	status   status
	received uint64 // bytes that the manager received on this link so far
}

func (r reply) marshal() []byte {
	b := make([]byte, replyLen)
	copy(b, magic)
	b[7], b[8] = Version, byte(r.status)
	binary.BigEndian.PutUint64(b[16:], r.received)
	return b
}

func readReply(rd io.Reader) (r reply, err error) {
	var b [replyLen]byte
	if err := readPrefix(rd, b[:prefixLen]); err != nil {
		return r, err
	}
	if _, err := io.ReadFull(rd, b[prefixLen:]); err != nil {
		return r, fmt.Errorf("reading the answer to hello: %w", err)
	}
	return reply{status: status(b[8]), received: binary.BigEndian.Uint64(b[16:])}, nil
}
