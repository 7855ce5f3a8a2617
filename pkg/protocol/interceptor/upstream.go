package interceptor

import (
	"bufio"
	"context"
	"errors"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"
)

// watchAfter is how long a connection is quiet before its watcher starts. Between messages that follow each other
// closely there is no watcher, because it costs more than the message.
const watchAfter = 50 * time.Millisecond

var (
	readers = sync.Pool{New: func() any { return bufio.NewReader(nil) }}
	writers = sync.Pool{New: func() any { return bufio.NewWriter(nil) }}
)

// watch looks at a connection while nobody reads it, for the next byte or the end.
//
//	start ─▶ quiet for watchAfter ─▶ a read waits ─▶ a byte, FIN or an error: seen
//	  └──────────── stop ────────────────┘
type watch struct {
	br   *bufio.Reader
	conn net.Conn
	seen func(err error) // called once after start, at most; nil: a byte has come

	timer *time.Timer
	done  chan struct{} // capacity 1: the read has ended
	saw   bool
}

func (w *watch) start() {
	w.saw = false
	if w.timer == nil {
		w.done = make(chan struct{}, 1)
		w.timer = time.AfterFunc(watchAfter, w.run)
	} else {
		w.timer.Reset(watchAfter)
	}
}

func (w *watch) run() {
	_, err := w.br.Peek(1)
	saw := !errors.Is(err, os.ErrDeadlineExceeded)
	w.saw = saw
	w.done <- struct{}{} // from here on w.saw belongs to the next start
	if saw {
		w.seen(err)
	}
}

// stop ends the watch, and reports whether it saw something.
func (w *watch) stop() bool {
	if w.timer.Stop() {
		return false
	}
	w.conn.SetReadDeadline(time.Unix(1, 0))
	<-w.done
	w.conn.SetReadDeadline(time.Time{})
	return w.saw
}

// upstream is a connection on which one client's HTTP/1 requests go to one destination, one after the other.
//
//	        take                     rest
//	idle ─────────▶ exchange ──────────────────▶ idle       ended by the other end: its watch discards it
//	                   └── error, or no more ──▶ discarded
type upstream struct {
	stream
	head  []byte      // of the latest answer
	seen  atomic.Bool // the first byte of the answer has arrived
	used  bool        // for an earlier request
	watch watch
}

func newUpstream(conn net.Conn, ended func(*upstream)) *upstream {
	u := &upstream{stream: stream{conn, readers.Get().(*bufio.Reader), writers.Get().(*bufio.Writer)}}
	u.br.Reset(u)
	u.bw.Reset(conn)
	u.watch = watch{br: u.br, conn: conn, seen: func(error) { ended(u) }}
	return u
}

// Read is for br.
func (u *upstream) Read(p []byte) (int, error) {
	n, err := u.Conn.Read(p)
	if n > 0 {
		u.seen.Store(true)
	}
	return n, err
}

// rest makes the connection idle.
func (u *upstream) rest() {
	u.used = true
	u.seen.Store(false)
	u.watch.start()
}

// wake ends the idle state. It returns false if the other end has closed the connection.
func (u *upstream) wake() bool { return !u.watch.stop() }

// discard closes an idle connection.
func (u *upstream) discard() {
	u.wake()
	u.close()
}

// close closes the connection. Afterwards only abort may be called.
func (u *upstream) close() {
	u.Conn.Close()
	u.release()
}

// release gives the buffers back.
func (s *stream) release() {
	s.br.Reset(nil)
	s.bw.Reset(nil)
	readers.Put(s.br)
	writers.Put(s.bw)
	s.br, s.bw = nil, nil
}

func (u *upstream) abort() { reset(u.Conn) }

// upstream returns a connection to t, an idle one if there is one.
func (c *clientConn) upstream(ctx context.Context, t destination) (*upstream, error) {
	to := t.target()
	c.mu.Lock()
	u := c.upstreams[to]
	delete(c.upstreams, to)
	c.last = to
	c.mu.Unlock()
	if u != nil {
		if u.wake() {
			return u, nil
		}
		u.close()
	}
	conn, err := c.dial(ctx, t, c.flow)
	if err != nil {
		return nil, err
	}
	return newUpstream(conn, func(u *upstream) { c.upstreamEnded(to, u) }), nil
}

// upstreamEnded handles an idle connection that the other end has closed. If the other end is the application, the
// client's connection ends too, as it would without the agent.
func (c *clientConn) upstreamEnded(to Target, u *upstream) {
	c.mu.Lock()
	mine := c.upstreams[to] == u
	if mine {
		delete(c.upstreams, to)
	}
	closeClient := mine && to == nil && c.last == nil && c.idle
	c.mu.Unlock()
	if mine {
		u.close()
	}
	if closeClient {
		c.Close()
	}
}

// keep makes u idle, if the client's connection goes on.
func (c *clientConn) keep(t destination, u *upstream) {
	u.rest()
	c.mu.Lock()
	keep := !c.fin && c.upstreams != nil
	if keep {
		c.upstreams[t.target()] = u
	}
	c.mu.Unlock()
	if !keep {
		u.discard()
	}
}
