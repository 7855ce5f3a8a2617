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

// magic and Version begin both messages of a handshake, in every version.
const magic = "kubevpn"

// flagFirst in a hello means that the session, or the link in it, may be created if it is unknown.
const flagFirst = 1

// flagBulk in a hello means that the link is for bulk, and in the reply that the manager agrees (stripe.go).
const flagBulk = 2

// hello is the first message on every conn, from the laptop. It is written as it is, in network byte order.
type hello struct {
	Session  SessionID
	Token    token
	Link     uint8
	Flags    uint8 // flagFirst, flagBulk; the others are ignored
	_        [2]byte
	Attempt  uint32 // grows with each conn of the link, so that a late one never replaces a newer one
	Received uint64 // bytes that the laptop received on this link so far
}

// reply answers a hello.
type reply struct {
	Status   status
	Flags    uint8 // flagBulk; the others are ignored
	_        [6]byte
	Received uint64 // bytes that the manager received on this link so far
}

// marshalHandshake returns the bytes of a hello or a reply.
func marshalHandshake[T hello | reply](message T) []byte {
	b, _ := binary.Append(append([]byte(magic), Version), binary.BigEndian, message) // its size is fixed
	return b
}

// readHandshake reads a hello or a reply. With ErrVersion, the answer statusVersion to a hello is due.
func readHandshake[T hello | reply](r io.Reader) (message T, err error) {
	var b [len(magic) + 1]byte
	if _, err := io.ReadFull(r, b[:]); err != nil {
		return message, fmt.Errorf("reading the handshake: %w", err)
	}
	if string(b[:len(magic)]) != magic {
		return message, fmt.Errorf("%w: not a kubevpn session", ErrProtocol)
	}
	if b[len(magic)] != Version {
		return message, fmt.Errorf("%w: theirs is %d, ours %d", ErrVersion, b[len(magic)], Version)
	}
	if err := binary.Read(r, binary.BigEndian, &message); err != nil {
		return message, fmt.Errorf("reading the handshake: %w", err)
	}
	return message, nil
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

// statusErrors are the errors that the manager's answers mean to the laptop.
var statusErrors = [...]error{statusUnknown: ErrSessionLost, statusRefused: ErrRefused, statusFull: ErrServerFull,
	statusVersion: ErrVersion, statusStale: errSuperseded}

func (s status) err() error {
	if int(s) < len(statusErrors) {
		return statusErrors[s]
	}
	return fmt.Errorf("%w: handshake status %d", ErrProtocol, uint8(s))
}
