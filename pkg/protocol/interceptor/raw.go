package interceptor

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
)

// copyLen is the size of the buffers for copies that the kernel does not make.
const copyLen = 64 << 10

var copyBuffers = sync.Pool{New: func() any { return new([copyLen]byte) }}

// serveRaw forwards a connection that is not HTTP.
func (i *Interceptor) serveRaw(ctx context.Context, s *sniffer) {
	if s.server == nil {
		if err := s.dial(ctx); err != nil {
			i.log.DebugContext(ctx, "cannot forward a connection", "client", s.flow.Client, "port", s.flow.Dst.Port(),
				"error", err)
			reset(s.conn)
			return
		}
	}
	defer s.server.Close()
	if claim := s.destination.claim; claim != nil {
		claim.Stats.requests.Add(1)
	}
	m := newMirrors(ctx, s.dialer)
	defer m.wait()
	_, claims := s.judge()
	copies := m.connection(s.flow, claims)
	err := splice(ctx, end{s.conn, s.read}, end{s.server, s.spoken}, copies)
	if err != nil && ctx.Err() == nil {
		i.log.DebugContext(ctx, "a connection ended with an error", "client", s.flow.Client, "port", s.flow.Dst.Port(),
			"error", err)
	}
}

// end is one end of a connection that is forwarded, and the bytes already read of it.
type end struct {
	net.Conn
	read []byte
}

// splice copies both directions until both have ended, each with its FIN. An error in one resets both. The bytes
// already read come first. Between two TCP connections the kernel moves the bytes, unless there are copies.
func splice(ctx context.Context, client, server end, copies copies) error {
	abort := sync.OnceFunc(func() { reset(client.Conn); reset(server.Conn) })
	stop := context.AfterFunc(ctx, abort)
	defer stop()
	up := make(chan error, 1)
	go func() {
		var dst io.Writer = server.Conn
		if len(copies) > 0 {
			dst = &tee{server.Conn, copies}
		}
		err := pass(dst, client)
		copies.end(err)
		if err == nil {
			err = closeWrite(server.Conn)
		}
		if err != nil {
			abort()
		}
		up <- err
	}()
	down := pass(client.Conn, server)
	if down == nil {
		down = closeWrite(client.Conn)
	}
	if down != nil {
		abort()
	}
	return errors.Join(down, <-up)
}

// pass copies the bytes already read from an end, and then all others, to dst.
func pass(dst io.Writer, from end) error {
	if len(from.read) > 0 {
		if _, err := dst.Write(from.read); err != nil {
			return err
		}
	}
	return copyAll(dst, from.Conn)
}

// copyAll copies src to dst. It uses dst's ReadFrom, with which the kernel may move the bytes.
func copyAll(dst io.Writer, src io.Reader) error {
	if _, ok := dst.(io.ReaderFrom); !ok {
		if _, ok := src.(*net.TCPConn); ok {
			src = struct{ io.Reader }{src} // hide WriteTo, which would allocate a buffer
		}
		b := copyBuffers.Get().(*[copyLen]byte)
		defer copyBuffers.Put(b)
		_, err := io.CopyBuffer(dst, src, b[:])
		return err
	}
	_, err := io.Copy(dst, src)
	return err
}

// closeWrite sends FIN. A connection without a half-close is closed.
func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

// reset ends a connection with an error for the other end: a TCP RST.
func reset(c net.Conn) {
	switch c := c.(type) {
	case interface{ Reset() error }:
		c.Reset()
	case interface{ SetLinger(int) error }:
		c.SetLinger(0)
	case interface{ NetConn() net.Conn }: // TLS
		reset(c.NetConn())
	}
	c.Close()
}
