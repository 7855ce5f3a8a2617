package transport

import (
	"errors"
	"fmt"
	"net"
	"syscall"
)

var (
	// ErrSessionLost ends a session that the other end no longer knows: the manager was restarted, or the laptop was
	// away for longer than the manager keeps a session. A Client then creates a new session.
	ErrSessionLost = errors.New("the other end no longer knows this session")

	// ErrSessionClosed ends a session that one of the ends closed on purpose.
	ErrSessionClosed = errors.New("session closed")

	// ErrRefused means that the manager knows the session, but the secret is wrong.
	ErrRefused = errors.New("the other end refused the session's secret")

	// ErrServerFull means that the manager has reached its limit of sessions, or of links for this session.
	ErrServerFull = errors.New("the other end has no room for another session")

	// ErrOtherSession rejects a conn that belongs to one session and whose hello names another.
	ErrOtherSession = errors.New("the conn is for another session")

	// ErrVersion means that the two ends have different versions of the protocol. A retry is useless.
	ErrVersion = errors.New("the other end speaks another version of the transport protocol")

	// ErrProtocol ends a session whose other end violated the protocol.
	ErrProtocol = errors.New("transport protocol violated")

	// ErrPacketTooLarge rejects a datagram of more than MaxPacket bytes.
	ErrPacketTooLarge = errors.New("datagram too large")

	// errConnSilent ends a conn that is open but carries nothing (a black hole).
	errConnSilent = errors.New("nothing received, not even a heartbeat")

	// errSuperseded ends a conn when a newer conn of the same link replaces it.
	errSuperseded = errors.New("replaced by a newer connection")
)

// The errors of streams that have ended.
var (
	errPeerReset  = fmt.Errorf("stream reset by the other end: %w", syscall.ECONNRESET)
	errLocalReset = fmt.Errorf("stream was reset here: %w", net.ErrClosed)
	errWriteEnded = fmt.Errorf("stream is closed for writing: %w", syscall.EPIPE)
	errClosed     = fmt.Errorf("stream: %w", net.ErrClosed)
)

// endedError is the error of a stream whose session has ended. To its users the connection was reset.
type endedError struct{ cause error }

func (e *endedError) Error() string        { return "stream reset, its session ended: " + e.cause.Error() }
func (e *endedError) Unwrap() error        { return e.cause }
func (e *endedError) Is(target error) bool { return target == syscall.ECONNRESET }
