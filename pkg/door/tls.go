package door

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

	"kubevpn/pkg/rawio"
)

// tlsPatience is how long a TLS handshake may take.
const tlsPatience = 10 * time.Second

// Conn is a connection inside TLS, whose other end has shown what the configuration asks for.
type Conn struct {
	*tls.Conn
	batch *rawio.Batch
}

// Shake ends TLS on conn, which is the Conn's if there is no Reason. The error says more than the Reason, where there is
// more: what the configuration's own checks return is in its chain.
func Shake(conn net.Conn, config *tls.Config) (*Conn, Reason, error) {
	if err := conn.SetDeadline(time.Now().Add(tlsPatience)); err != nil {
		return nil, HungUp, err
	}
	batch := rawio.NewBatch(conn)
	c := &Conn{Conn: tls.Server(batch, config), batch: batch}
	if err := c.Handshake(); err != nil {
		return nil, shakeReason(err), err
	}
	if err := conn.SetDeadline(time.Time{}); err != nil {
		return nil, HungUp, err
	}
	return c, "", nil
}

// shakeReason is what was wrong with a TLS handshake.
func shakeReason(err error) Reason {
	var (
		verify  *tls.CertificateVerificationError
		invalid x509.CertificateInvalidError
	)
	switch {
	case errors.As(err, &invalid) && invalid.Reason == x509.Expired:
		return ExpiredCertificate
	case errors.As(err, &verify):
		return BadCertificate
	case strings.Contains(err.Error(), "client didn't provide a certificate"): // crypto/tls has no other sign
		return NoCertificate
	case errors.Is(err, os.ErrDeadlineExceeded):
		return TLSTooSlow
	case errors.Is(err, io.EOF), errors.Is(err, io.ErrUnexpectedEOF), errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return HungUp
	}
	return NoTLS
}

// Write sends p, however long, in one write to the kernel.
func (c *Conn) Write(p []byte) (int, error) { return c.batch.Through(c.Conn, p) }

// Close closes the connection without TLS's farewell, which takes five seconds where nobody takes it, and tells the
// other end nothing that it would not know from what is inside.
func (c *Conn) Close() error { return c.batch.Close() }
