package interceptor

import (
	"context"
	"crypto/tls"
	"errors"
	"net"
	"slices"
	"sync"

	"kubevpn/pkg/protocol/httpmatch"
)

// noteTLS is the note about a port whose TLS the application terminates.
const noteTLS = "its connections are TLS, which the application terminates: requests inside cannot be matched, and " +
	"whole connections go to the application"

// serveTLS forwards a connection that begins with a ClientHello. The first claim that matches everything, or has the
// key, decides how.
func (i *Interceptor) serveTLS(ctx, hard context.Context, s *sniffer) {
	claims := i.config.Claims(s.flow.Protocol, s.flow.Dst.Port())
	hidden := false
	for n := range claims {
		switch c := &claims[n]; {
		case c.Target.Away():
		case c.TLS != nil:
			i.terminateTLS(ctx, hard, s, c.TLS)
			return
		case !c.all():
			hidden = true
		case !c.Mirror:
			s.isCheck = i.mayCheck(s.flow, httpmatch.CheckHTTPS) && s.namesNoServer()
			i.serveRaw(hard, s)
			return
		}
	}
	if hidden {
		i.config.Note(s.flow.Protocol, s.flow.Dst.Port(), noteTLS)
	}
	i.serveRaw(hard, s)
}

// terminateTLS terminates TLS, serves the plaintext, and starts another TLS connection to the destination.
func (i *Interceptor) terminateTLS(ctx, hard context.Context, s *sniffer, config *tls.Config) {
	o := &tlsDialer{i: i}
	config = config.Clone()
	config.NextProtos = nil
	config.GetConfigForClient = func(hello *tls.ClientHelloInfo) (*tls.Config, error) {
		// The application chooses the protocol.
		o.serverName, o.protocols = hello.ServerName, httpProtocols(hello.SupportedProtos)
		conn, err := o.dial(hello.Context(), destination{}, s.flow)
		if err != nil {
			return nil, err
		}
		o.application = conn
		chosen := config.Clone()
		chosen.GetConfigForClient = nil
		if p := conn.(*tls.Conn).ConnectionState().NegotiatedProtocol; p != "" {
			chosen.NextProtos = []string{p}
		}
		o.protocols = chosen.NextProtos
		return chosen, nil
	}
	conn := tls.Server(&prefixedConn{s.conn, s.read}, config)
	defer o.close()
	handshake, cancel := context.WithTimeout(hard, headTimeout)
	defer cancel()
	if err := conn.HandshakeContext(handshake); err != nil {
		i.log.DebugContext(ctx, "cannot terminate TLS", "client", s.flow.Client, "port", s.flow.Dst.Port(), "error",
			err)
		reset(s.conn)
		return
	}
	inner := &clientConn{Conn: conn, flow: s.flow, head: s.head, tls: true, dial: o.dial}
	switch conn.ConnectionState().NegotiatedProtocol {
	case "h2":
		inner.http2 = true
	case "http/1.1":
	case "":
		// The connection may be HTTP or not. A silent client counts as HTTP that sends its request later: where the
		// server speaks first, no claim would bring a key to match requests.
		sniffed := &sniffer{i: i, conn: conn, head: s.head, flow: s.flow}
		kind, err := sniffed.listen(ctx, clientTimeout)
		switch {
		case err != nil:
			reset(conn)
			return
		case kind == kindHTTP1 || kind == kindHTTP2 || kind == kindUnknown:
			inner.prefix, inner.http2 = sniffed.read, kind == kindHTTP2
		default:
			sniffed.dialer = o.dial
			i.serveRaw(hard, sniffed)
			return
		}
	default:
		i.serveRaw(hard, &sniffer{i: i, conn: conn, head: s.head, flow: s.flow, dialer: o.dial})
		return
	}
	i.serveHTTP(ctx, hard, inner)
}

// httpProtocols returns the HTTP protocols in a list, or all protocols if there is no HTTP.
func httpProtocols(protocols []string) []string {
	http := slices.DeleteFunc(slices.Clone(protocols), func(p string) bool { return p != "h2" && p != "http/1.1" })
	if len(http) == 0 {
		return protocols
	}
	return http
}

// tlsDialer dials destinations of a connection whose TLS was terminated.
type tlsDialer struct {
	i          *Interceptor
	serverName string
	protocols  []string

	mu          sync.Mutex
	application net.Conn // already dialed, until dial takes it
}

func (o *tlsDialer) dial(ctx context.Context, t destination, f Flow) (net.Conn, error) {
	if t.application() {
		o.mu.Lock()
		conn := o.application
		o.application = nil
		o.mu.Unlock()
		if conn != nil {
			return conn, nil
		}
	}
	plain, err := o.i.dial(ctx, t, f)
	if err != nil {
		return nil, err
	}
	// The certificate is not verified: the connection stays in the pod, or takes the same path to the target as one
	// without TLS. It is not meant to be more secret there.
	conn := tls.Client(plain, &tls.Config{ServerName: o.serverName, NextProtos: o.protocols, InsecureSkipVerify: true})
	if err := conn.HandshakeContext(ctx); err != nil {
		plain.Close()
		return nil, errors.Join(errors.New("cannot start TLS"), err)
	}
	return conn, nil
}

func (o *tlsDialer) close() {
	if o.application != nil {
		o.application.Close()
	}
}

// prefixedConn returns the bytes first that were already read.
type prefixedConn struct {
	net.Conn
	prefix []byte
}

// NetConn is for reset.
func (c *prefixedConn) NetConn() net.Conn { return c.Conn }

func (c *prefixedConn) Read(p []byte) (int, error) {
	if len(c.prefix) > 0 {
		n := copy(p, c.prefix)
		c.prefix = c.prefix[n:]
		return n, nil
	}
	return c.Conn.Read(p)
}
