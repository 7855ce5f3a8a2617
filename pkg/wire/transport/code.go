package transport

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"slices"
	"syscall"
)

// Code answers a request for a stream, or ends a stream of datagrams. It is one byte on the wire, so values never
// change their meaning.
type Code uint8

// The codes. The receiver treats an unknown one as CodeFailed.
const (
	CodeOK              Code = 0
	CodeRefused         Code = 1 // the address refused the connection (RST, ICMP port unreachable)
	CodeHostUnreachable Code = 2
	CodeNetUnreachable  Code = 3
	CodeTimeout         Code = 4 // nobody answered
	CodeProhibited      Code = 5 // policy forbids it (ICMP administratively prohibited, EACCES, EPERM)
	CodeFailed          Code = 6 // anything else
)

var codeNames = [...]string{
	CodeOK:              "ok",
	CodeRefused:         "connection refused",
	CodeHostUnreachable: "host unreachable",
	CodeNetUnreachable:  "network unreachable",
	CodeTimeout:         "timed out",
	CodeProhibited:      "prohibited",
	CodeFailed:          "failed",
}

// String returns a few lower-case words.
func (c Code) String() string {
	if int(c) < len(codeNames) {
		return codeNames[c]
	}
	return fmt.Sprintf("code %d", uint8(c))
}

// Err returns nil for CodeOK and otherwise an error that errors.Is matches with the errno of the same meaning:
// ECONNREFUSED, EHOSTUNREACH, ENETUNREACH, ETIMEDOUT or EACCES. CodeFailed and unknown codes match none.
func (c Code) Err() error { return c.because("") }

// because is Err with the text of the far end's error.
func (c Code) because(reason string) error {
	if c == CodeOK {
		return nil
	}
	return &codeError{code: c, reason: reason}
}

// codeErrnos are the errnos of the same meaning.
var codeErrnos = map[Code]syscall.Errno{
	CodeRefused: syscall.ECONNREFUSED, CodeHostUnreachable: syscall.EHOSTUNREACH,
	CodeNetUnreachable: syscall.ENETUNREACH, CodeTimeout: syscall.ETIMEDOUT, CodeProhibited: syscall.EACCES,
}

// codeError is a Code that came from the far end.
type codeError struct {
	code   Code
	reason string // text of the far end's error; may be empty
}

func (e *codeError) Error() string {
	if e.reason != "" {
		return "far end: " + e.reason
	}
	return "far end: " + e.code.String()
}

func (e *codeError) Is(target error) bool {
	errno, ok := codeErrnos[e.code]
	return ok && target == errno
}

// Timeout implements net.Error for a timeout at the far end.
func (e *codeError) Timeout() bool { return e.code == CodeTimeout }

// Temporary implements net.Error.
func (e *codeError) Temporary() bool { return false }

// CodeOf returns the Code for err: a wrapped syscall.Errno, as in the net.OpError of a dial, a timeout, or the error of
// a Code. nil is CodeOK.
func CodeOf(err error) Code {
	var ce *codeError
	var ne net.Error
	switch {
	case err == nil:
		return CodeOK
	case errors.As(err, &ce):
		return ce.code
	// A dial that an RST ends during the handshake reports ECONNRESET: the server refused it too.
	case isAny(err, syscall.ECONNREFUSED, syscall.ECONNRESET, wsaECONNREFUSED, wsaECONNRESET):
		return CodeRefused
	case isAny(err, syscall.EHOSTUNREACH, syscall.EHOSTDOWN, wsaEHOSTUNREACH):
		return CodeHostUnreachable
	case isAny(err, syscall.ENETUNREACH, syscall.ENETDOWN, wsaENETUNREACH):
		return CodeNetUnreachable
	case isAny(err, syscall.EACCES, syscall.EPERM, wsaEACCES):
		return CodeProhibited
	case isAny(err, syscall.ETIMEDOUT, wsaETIMEDOUT), errors.Is(err, os.ErrDeadlineExceeded),
		errors.Is(err, context.DeadlineExceeded), errors.As(err, &ne) && ne.Timeout():
		return CodeTimeout
	}
	return CodeFailed
}

// Describe returns the last and plainest part of a network error.
func Describe(err error) string {
	var dns *net.DNSError
	var errno syscall.Errno
	switch {
	case CodeOf(err) == CodeTimeout:
		return "no answer"
	case errors.As(err, &dns):
		return dns.Err
	case errors.As(err, &errno):
		return errno.Error()
	}
	return err.Error()
}

func isAny(err error, numbers ...syscall.Errno) bool {
	return slices.ContainsFunc(numbers, func(n syscall.Errno) bool { return errors.Is(err, n) })
}

// The numbers of Winsock, which package net returns on Windows instead of the invented syscall.ECONNREFUSED and so on.
// On other operating systems no errno is this large.
const (
	wsaEACCES       = syscall.Errno(10013)
	wsaENETUNREACH  = syscall.Errno(10051)
	wsaECONNRESET   = syscall.Errno(10054)
	wsaETIMEDOUT    = syscall.Errno(10060)
	wsaECONNREFUSED = syscall.Errno(10061)
	wsaEHOSTUNREACH = syscall.Errno(10065)
)
