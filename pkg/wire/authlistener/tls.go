package authlistener

import (
	"crypto/tls"
	"crypto/x509"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"syscall"
	"time"

	"kubevpn/pkg/wire/nonblock"
)

// tlsTimeout bounds a TLS handshake.
const tlsTimeout = 10 * time.Second

// Handshake performs the server's side of a TLS handshake on conn. If it returns no Reason the TLS owns conn. The
// error adds details to the Reason; it wraps what the checks of config return.
func Handshake(conn net.Conn, config *tls.Config) (*nonblock.TLS, Reason, error) {
	if err := conn.SetDeadline(time.Now().Add(tlsTimeout)); err != nil {
		return nil, HungUp, err
	}
	batch := nonblock.NewBatch(conn)
	c := &nonblock.TLS{Conn: tls.Server(batch, config), Batch: batch}
	if err := c.Handshake(); err != nil {
		return nil, handshakeReason(err), err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, HungUp, err
	}
	return c, "", nil
}

// handshakeReason returns the Reason for a failed TLS handshake.
func handshakeReason(err error) Reason {
	var (
		verify  *tls.CertificateVerificationError
		invalid x509.CertificateInvalidError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return ExpiredCertificate
	case errors.As(err, &verify):
		return BadCertificate
	case strings.Contains(err.Error(), "client didn't provide a certificate"): // crypto/tls has no error value for it
		return NoCertificate
	case errors.Is(err, os.ErrDeadlineExceeded):
		return TLSTooSlow
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET),
		errors.Is(err, syscall.EPIPE):
		return HungUp
	}
	return NoTLS
}
