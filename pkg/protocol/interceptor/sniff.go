package interceptor

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"os"
	"slices"
	"strings"
	"time"

	"golang.org/x/net/http/httpguts"

	"kubevpn/pkg/protocol/httpmatch"
	"kubevpn/pkg/wire/authlistener"
)

const (
	// clientTimeout is how long a client may be silent, at first or in the middle of a possible request.
	clientTimeout = 200 * time.Millisecond
	// serverFirstTimeout is the same for a port where the server speaks first. A client that does not wait for the
	// server has sent its first bytes by then.
	serverFirstTimeout = time.Millisecond
	// dueTimeout is the same while a probe is due: more than a round trip between laptop and cluster.
	dueTimeout = time.Second
	// sniffLen is the number of bytes that are read to determine the protocol. guess decides on a longer request line.
	sniffLen = 4 << 10
	// maxMethod is more than the length of every method in use.
	maxMethod = 32

	preface2 = "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
)

// kind is the protocol of a connection.
type kind int

const (
	kindUnknown kind = iota // the first bytes fit several kinds
	kindRaw
	kindHTTP1
	kindHTTP2
	kindTLS
	kindProbe
)

// classify determines the kind of a connection from the client's first bytes.
func classify(b []byte, c *Probe) kind {
	if k := c.classify(b); k != kindRaw {
		return k
	}
	switch {
	case len(b) == 0:
		return kindUnknown
	case b[0] == 0x16: // TLS: a record of the handshake, version 3.x, length, ClientHello
		return classifyTLS(b)
	case bytes.HasPrefix(b, []byte(preface2)):
		return kindHTTP2
	case strings.HasPrefix(preface2, string(b)):
		return kindUnknown
	}
	return classifyHTTP1(b)
}

// classify returns kindRaw if b does not begin as a probe does.
func (c *Probe) classify(b []byte) kind {
	n := min(len(b), len(c.Prefix))
	switch {
	case c.Expected == nil || c.Length == 0 || string(b[:n]) != c.Prefix[:n] || len(b) > c.Length:
		return kindRaw
	case len(b) < c.Length:
		return kindUnknown
	case !c.Expected(b):
		return kindRaw
	}
	return kindProbe
}

func classifyTLS(b []byte) kind {
	switch {
	case len(b) > 1 && b[1] != 3:
		return kindRaw
	case len(b) < 6:
		return kindUnknown
	case b[5] != 1:
		return kindRaw
	}
	return kindTLS
}

// classifyHTTP1 recognizes a request by its line: a token, a space, anything, a space, HTTP/1.x.
func classifyHTTP1(b []byte) kind {
	// RFC 9112, 2.2: a server should ignore an empty line before the request line. net/http does not, but says 400.
	line, _, whole := bytes.Cut(b, []byte("\n"))
	method, rest, spaced := bytes.Cut(line, []byte(" "))
	if len(method) > maxMethod || !httpguts.ValidHeaderFieldName(string(method)) {
		return kindRaw
	}
	if !whole {
		return kindUnknown
	}
	line = bytes.TrimSuffix(rest, []byte("\r"))
	space := bytes.LastIndexByte(line, ' ')
	if !spaced || space < 1 {
		return kindRaw
	}
	if version := line[space+1:]; len(version) == len("HTTP/1.1") && bytes.HasPrefix(version, []byte("HTTP/1.")) {
		return kindHTTP1
	}
	return kindRaw
}

// guess decides what classify leaves open, after the client has stopped sending or has sent sniffLen bytes.
func guess(b []byte) kind {
	method, rest, spaced := bytes.Cut(b, []byte(" "))
	if !spaced || !slices.Contains(methods(), string(method)) || bytes.IndexByte(rest, '\n') >= 0 {
		return kindRaw
	}
	for _, begin := range []string{"/", "http://", "https://"} {
		if bytes.HasPrefix(rest, []byte(begin)) {
			return kindHTTP1
		}
	}
	return kindRaw
}

func methods() []string {
	return []string{http.MethodGet, http.MethodHead, http.MethodPost, http.MethodPut, http.MethodPatch,
		http.MethodDelete,
		http.MethodOptions, http.MethodTrace}
}

// sniffer determines the kind of one connection.
//
//	     bytes                                                bytes of the client first
//	┌──────────────▶ classified ◀────────────────────────────────────────┐
//	│                                                                    │
//	wait for the client ── silence: dial where it goes if it is not HTTP ┤
//	(200 ms; 1 ms where the server speaks first; 1 s while a probe is due)│
//	                                                                     └─▶ not HTTP: the server spoke first, or FIN
type sniffer struct {
	i      *Interceptor
	conn   net.Conn
	head   *authlistener.Held
	flow   Flow
	dialer dialer // for the destination if it is not HTTP

	read        []byte // from the client, so far
	ended       bool   // without a byte
	isCheck     bool   // of the kubelet
	server      net.Conn
	destination destination
	spoken      []byte // from the server, if it spoke first
}

// sniff reads until it knows the kind of the connection. The end of ctx ends an idle connection, that of hard every
// one.
func (s *sniffer) sniff(ctx, hard context.Context) (kind, error) {
	stop := context.AfterFunc(ctx, func() { s.conn.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()
	serverFirst := s.i.serverSpeaksFirst(s.flow.Dst.Port())
	wait := clientTimeout
	switch due := s.i.config.Probe.Due; {
	case due != nil && due():
		wait = dueTimeout
	case serverFirst.Load() && !s.i.mayCheck(s.flow, httpmatch.CheckConnect):
		wait = serverFirstTimeout
	}
	k, err := s.listen(ctx, wait)
	if err != nil || k != kindUnknown {
		if err == nil {
			serverFirst.Store(false)
		}
		return k, err
	}
	k, err = s.race(ctx, hard)
	switch {
	case len(s.spoken) > 0:
		serverFirst.Store(true)
	case len(s.read) > 0:
		serverFirst.Store(false)
	}
	if s.server != nil && (err != nil || k != kindRaw) {
		s.server.Close() // no bytes were exchanged with it
		s.server = nil
		s.head.SetCost(connCost)
	}
	return k, err
}

// listen reads from the client, whose first bytes must come within wait. FIN and silence are no errors. The kind is
// unknown only if no byte came.
func (s *sniffer) listen(ctx context.Context, wait time.Duration) (kind, error) {
	defer s.conn.SetReadDeadline(time.Time{})
	for {
		k := classify(s.read, &s.i.config.Probe)
		switch {
		case k != kindUnknown:
			return k, nil
		case len(s.read) >= sniffLen:
			return guess(s.read), nil
		}
		s.conn.SetReadDeadline(time.Now().Add(wait))
		if err := ctx.Err(); err != nil { // ctx may have ended before the deadline was set
			return kindRaw, err
		}
		s.read = slices.Grow(s.read, sniffLen-len(s.read))
		n, err := s.conn.Read(s.read[len(s.read):sniffLen])
		s.read = s.read[:len(s.read)+n]
		switch {
		case err == nil:
			wait = clientTimeout
		case ctx.Err() != nil:
			return kindRaw, ctx.Err()
		case errors.Is(err, os.ErrDeadlineExceeded), err == io.EOF:
			if s.ended = err == io.EOF && len(s.read) == 0; len(s.read) == 0 {
				return kindUnknown, nil
			}
			return guess(s.read), nil
		default:
			return kindRaw, err
		}
	}
}

// race waits for the first bytes of either end. Until then the connection to the server is provisional: if the client
// speaks HTTP, the caller closes it.
func (s *sniffer) race(ctx, hard context.Context) (kind, error) {
	s.isCheck = s.ended && s.i.mayCheck(s.flow, httpmatch.CheckConnect)
	if err := s.dial(hard); err != nil {
		return kindRaw, err
	}
	stop := context.AfterFunc(ctx, func() { s.server.SetReadDeadline(time.Unix(1, 0)) })
	defer stop()

	clientEnded := make(chan error, 1)
	go func() {
		s.read = slices.Grow(s.read, sniffLen)
		n, err := s.conn.Read(s.read[:sniffLen])
		s.read = s.read[:n]
		s.server.SetReadDeadline(time.Unix(1, 0)) // stop waiting for the server
		clientEnded <- err
	}()
	first := make([]byte, sniffLen)
	n, serverErr := s.server.Read(first)
	s.spoken = first[:n]
	s.conn.SetReadDeadline(time.Unix(1, 0))
	clientErr := <-clientEnded
	s.conn.SetReadDeadline(time.Time{})
	s.server.SetReadDeadline(time.Time{})

	if err := ctx.Err(); err != nil {
		return kindRaw, err
	}
	for _, err := range []error{clientErr, serverErr} {
		if err != nil && err != io.EOF && !errors.Is(err, os.ErrDeadlineExceeded) {
			return kindRaw, err
		}
	}
	if len(s.spoken) > 0 || len(s.read) == 0 {
		return kindRaw, nil
	}
	return s.listen(ctx, clientTimeout)
}

// judge returns where a connection goes that is not HTTP, and which claims get a copy.
func (s *sniffer) judge() (destination, []*Claim) {
	if s.isCheck {
		return destination{}, nil
	}
	return judgeRaw(s.i.config.Claims(s.flow.Protocol, s.flow.Dst.Port()))
}

// dial connects to the destination of a connection that is not HTTP.
func (s *sniffer) dial(ctx context.Context) error {
	s.destination, _ = s.judge()
	for {
		conn, err := s.dialer(ctx, s.destination, s.flow)
		switch {
		case err == nil:
			s.server = conn
			s.head.Leave() // from here on, the destination sees the connection
			return nil
		case wentAway(s.destination, err):
			s.destination = destination{}
		default:
			return err
		}
	}
}
