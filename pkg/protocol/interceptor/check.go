package interceptor

import (
	"bytes"
	"crypto/tls"
	"io"
	"net"
	"net/netip"
	"slices"
	"time"

	"kubevpn/pkg/protocol/httpmatch"
)

// isWithin reports whether a flow comes from the pod itself.
func isWithin(f Flow) bool { return f.Client.Addr().IsLoopback() || f.Client.Addr() == f.Dst.Addr() }

// checks returns the checks that may come by f: those of the port or, from the pod itself, where a proxy passes them
// on, all.
func (i *Interceptor) checks(f Flow) []httpmatch.Check {
	switch {
	case len(i.config.Checks) == 0:
		return nil
	case isWithin(f):
		return i.config.Checks
	case !slices.ContainsFunc(i.config.CheckedFrom, func(p netip.Prefix) bool { return p.Contains(f.Client.Addr()) }):
		return nil
	}
	return slices.DeleteFunc(slices.Clone(i.config.Checks), func(c httpmatch.Check) bool {
		return c.Port != f.Dst.Port()
	})
}

// mayCheck reports whether f may be a check of this scheme itself.
func (i *Interceptor) mayCheck(f Flow, scheme string) bool {
	return !isWithin(f) && slices.ContainsFunc(i.checks(f), func(c httpmatch.Check) bool {
		return c.Scheme == scheme
	})
}

// namesNoServer reports whether a ClientHello, which has begun, names no server: the kubelet connects to an address.
func (s *sniffer) namesNoServer() bool {
	named, read := true, new(bytes.Buffer)
	s.conn.SetReadDeadline(time.Now().Add(clientTimeout))
	defer s.conn.SetReadDeadline(time.Time{})
	conn := helloConn{s.conn, io.TeeReader(&prefixedConn{s.conn, s.read}, read)}
	// It fails, because there is no certificate, or because the ClientHello does not come.
	_ = tls.Server(conn, &tls.Config{GetConfigForClient: func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		named = hello.ServerName != ""
		return nil, nil
	}}).Handshake()
	s.read = read.Bytes()
	return !named
}

// helloConn sends nothing.
type helloConn struct {
	net.Conn
	from io.Reader
}

func (c helloConn) Read(p []byte) (int, error)  { return c.from.Read(p) }
func (c helloConn) Write(p []byte) (int, error) { return len(p), nil }
