package transport

import (
	"errors"
	"fmt"
	"net"
	"syscall"
)

var (
	// ErrSessionLost ends a session whose other end no longer knows it: the manager was restarted, or the laptop
	// was away for longer than the manager keeps a session. A client then makes a new session.
	ErrSessionLost = errors.New("the other end no longer knows this session")

	// ErrSessionClosed ends a session that one of the ends closed on purpose.
	ErrSessionClosed = errors.New("session closed")

	// ErrRefused means that the manager knows the session but not the secret that belongs to it.
	ErrRefused = errors.New("the other end refused the session's secret")

	// ErrServerFull means that the manager has as many sessions, or links of this session, as it allows.
	ErrServerFull = errors.New("the other end has no room for another session")

	// ErrOtherSession refuses a conn that is for one session and whose hello names another.
	ErrOtherSession = errors.New("the conn is for another session")

	// ErrVersion means that the two ends speak different versions of this protocol. Retrying is useless.
	ErrVersion = errors.New("the other end speaks another version of the transport protocol")

	// ErrProtocol ends a session whose other end sent what the protocol does not allow.
	ErrProtocol = errors.New("transport protocol violated")

	// ErrPacketTooLarge refuses a datagram of more than MaxPacket bytes.
	ErrPacketTooLarge = errors.New("datagram too large")

	// errConnSilent ends a conn that is up but carries nothing (a black hole).
	errConnSilent = errors.New("nothing received, not even a heartbeat")

	// errSuperseded ends a conn that a newer one of the same link replaces.
	errSuperseded = errors.New("replaced by a newer connection")
)

// Both end a stream for reading and writing; they differ in who did it.
var (
	errPeerReset  = fmt.Errorf("stream reset by the other end: %w", syscall.ECONNRESET)
	errLocalReset = fmt.Errorf("stream was reset here: %w", net.ErrClosed)
	errWriteEnded = fmt.Errorf("stream is closed for writing: %w", syscall.EPIPE)
	errClosed     = fmt.Errorf("stream: %w", net.ErrClosed)
)

// endedError is what a stream's users see when its session ends beneath it: to them the connection was reset.
type endedError struct{ cause error }

func (e *endedError) Error() string        { return "stream reset, its session ended: " + e.cause.Error() }
func (e *endedError) Unwrap() error        { return e.cause }
func (e *endedError) Is(target error) bool { return target == syscall.ECONNRESET }
