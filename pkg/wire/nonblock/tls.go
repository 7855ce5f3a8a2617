package nonblock

import "crypto/tls"

// TLS is TLS over a Batch.
type TLS struct {
	*tls.Conn
	Batch *Batch
}

// Write sends p, of any length, in one write to the connection below.
func (t *TLS) Write(p []byte) (int, error) { return t.Batch.Through(t.Conn, p) }

// Close closes the connection below without TLS's close_notify, which can block for five seconds if the peer does not
// read. The protocol inside TLS marks its own end.
func (t *TLS) Close() error { return t.Batch.Close() }
