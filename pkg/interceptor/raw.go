package interceptor

import (
	"context"
	"errors"
	"io"
	"net"
	"sync"
)

// copyLen is how much is copied at once, where the kernel does not.
const copyLen = 64 << 10

var copyBuffers = sync.Pool{New: func() any { return new([copyLen]byte) }}

// serveRaw passes on a connection that is not HTTP.
func (i *Interceptor) serveRaw(ctx context.Context, s *sniffer) {
	if s.server == nil {
		if err := s.dial(ctx); err != nil {
			i.log.DebugContext(ctx, "passing a connection on", "client", s.flow.Client, "port", s.flow.Dst.Port(), "error", err)
			reset(s.conn)
			return
		}
	}
	defer s.server.Close()
	if claim := s.target.claim; claim != nil {
		claim.Stats.requests.Add(1)
	}
	m := newMirrors(ctx, s.dialer)
	defer m.wait()
	_, claims := judgeRaw(i.config.Claims(s.flow.Protocol, s.flow.Dst.Port()))
	copies := m.connection(s.flow, claims)
	err := splice(ctx, s.conn, s.read, s.server, s.spoken, copies)
	if err != nil && ctx.Err() == nil {
		i.log.DebugContext(ctx, "a connection broke off", "client", s.flow.Client, "port", s.flow.Dst.Port(), "error", err)
	}
}

// splice copies both directions until both have ended, each with its FIN. An error of either resets both. Bytes that were
// read of each already come first. Between two TCP connections the kernel moves the bytes, unless somebody wants a copy.
func splice(ctx context.Context, client net.Conn, read []byte, server net.Conn, spoken []byte, copies copies) error {
	abort := sync.OnceFunc(func() { reset(client); reset(server) })
	stop := context.AfterFunc(ctx, abort)
	defer stop()
	up := make(chan error, 1)
	go func() {
		var dst io.Writer = server
		if len(copies) > 0 {
			dst = &tee{server, copies}
		}
		err := pass(dst, client, read)
		copies.end(err)
		if err == nil {
			err = closeWrite(server)
		}
		if err != nil {
			abort()
		}
		up <- err
	}()
	down := pass(client, server, spoken)
	if down == nil {
		down = closeWrite(client)
	}
	if down != nil {
		abort()
	}
	return errors.Join(down, <-up)
}

func pass(dst io.Writer, src io.Reader, first []byte) error {
	if len(first) > 0 {
		if _, err := dst.Write(first); err != nil {
			return err
		}
	}
	if _, ok := dst.(io.ReaderFrom); !ok {
		if _, ok := src.(*net.TCPConn); ok {
			src = struct{ io.Reader }{src} // its WriteTo would make a buffer of its own
		}
		b := copyBuffers.Get().(*[copyLen]byte)
		defer copyBuffers.Put(b)
		_, err := io.CopyBuffer(dst, src, b[:])
		return err
	}
	_, err := io.Copy(dst, src)
	return err
}

// closeWrite sends FIN. Where there is none, what follows is an end all the same.
func closeWrite(c net.Conn) error {
	if h, ok := c.(interface{ CloseWrite() error }); ok {
		return h.CloseWrite()
	}
	return c.Close()
}

// reset ends a connection so that the other end knows that it did not end well.
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
