package interceptor

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"net/http"
	"sync"
	"time"
)

const (
	// maxBacklog is how far a copy may be behind the original.
	maxBacklog = 1 << 20
	// maxCopies is how many copies of one client's requests may be under way.
	maxCopies = 128
	// mirrorLinger is how long copies may continue after the original has ended.
	mirrorLinger = 5 * time.Second
)

var (
	errBehind = errors.New("the mirror's owner read too slowly; the rest was not copied")
	errBroken = errors.New("the original broke off")
)

// backlog holds the bytes of an original that its copy has not read yet. Writing never blocks.
type backlog struct {
	mu   sync.Mutex
	more sync.Cond
	b    bytes.Buffer
	end  error // io.EOF after the original's end
}

func newBacklog() *backlog {
	b := new(backlog)
	b.more.L = &b.mu
	return b
}

func (b *backlog) put(p []byte) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.end != nil:
	case b.b.Len()+len(p) > maxBacklog:
		b.stop(errBehind)
	default:
		b.b.Write(p)
		b.more.Signal()
	}
}

// finish ends the backlog. If err is nil, Read still returns the rest.
func (b *backlog) finish(err error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	switch {
	case b.end != nil:
	case err == nil:
		b.end = io.EOF
		b.more.Signal()
	default:
		b.stop(err)
	}
}

// stop ends the backlog, and drops the rest. Call with mu held.
func (b *backlog) stop(err error) {
	b.end = err
	b.b = bytes.Buffer{}
	b.more.Signal()
}

func (b *backlog) Read(p []byte) (int, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for b.b.Len() == 0 && b.end == nil {
		b.more.Wait()
	}
	if b.b.Len() > 0 {
		return b.b.Read(p)
	}
	return 0, b.end
}

// Close drops the rest. The reader calls it.
func (b *backlog) Close() error {
	b.finish(net.ErrClosed)
	return nil
}

// copies are the backlogs of one original.
type copies []*backlog

func (c copies) put(p []byte) {
	for _, b := range c {
		b.put(p)
	}
}

func (c copies) end(err error) {
	if err != nil && err != io.EOF {
		err = errBroken
	} else {
		err = nil
	}
	for _, b := range c {
		b.finish(err)
	}
}

// tee writes to the original's destination, and the bytes that it accepted to the copies.
type tee struct {
	io.Writer
	copies copies
}

func (t *tee) Write(p []byte) (int, error) {
	n, err := t.Writer.Write(p)
	t.copies.put(p[:n])
	return n, err
}

// mirrors are the copies of one client's requests or connection.
type mirrors struct {
	dial   dialer
	ctx    context.Context
	cancel context.CancelFunc
	wg     sync.WaitGroup
	places chan struct{}
}

func newMirrors(ctx context.Context, dial dialer) *mirrors {
	m := &mirrors{dial: dial, places: make(chan struct{}, maxCopies)}
	m.ctx, m.cancel = context.WithCancel(ctx)
	return m
}

// wait waits for the copies, and ends them after mirrorLinger.
func (m *mirrors) wait() {
	timer := time.AfterFunc(mirrorLinger, m.cancel)
	m.wg.Wait()
	timer.Stop()
	m.cancel()
}

// connection begins copies of a connection's bytes.
func (m *mirrors) connection(f Flow, claims []*Claim) copies {
	var all copies
	for _, c := range claims {
		b := newBacklog()
		all = append(all, b)
		m.wg.Go(func() { m.settle(c, b, m.copyConnection(f, c, b)) })
	}
	return all
}

// settle ends a copy, and keeps its error.
func (m *mirrors) settle(c *Claim, b *backlog, err error) {
	b.Close()
	if err != nil && !errors.Is(err, errBroken) && m.ctx.Err() == nil {
		c.Stats.failed(err)
	}
}

func (m *mirrors) copyConnection(f Flow, c *Claim, b *backlog) error {
	conn, err := m.dial(m.ctx, destination{c}, f)
	if err != nil {
		return err
	}
	defer conn.Close()
	c.Stats.requests.Add(1)
	stop := context.AfterFunc(m.ctx, func() { reset(conn) })
	defer stop()
	answered := make(chan struct{})
	go func() {
		defer close(answered)
		// An error can be ignored here: Write then returns one, too.
		_, _ = io.Copy(io.Discard, conn)
	}()
	err = copyAll(conn, b)
	if err == nil {
		err = closeWrite(conn)
	}
	if err != nil {
		reset(conn)
	}
	<-answered
	return err
}

// request begins copies of a request. The caller writes the body to the copies that it returns.
func (m *mirrors) request(r *http.Request, claims []*Claim, host string,
	transport func(destination, int) http.RoundTripper) copies {
	var all copies
	for _, c := range claims {
		select {
		case m.places <- struct{}{}:
		default:
			c.Stats.failed(errBehind)
			continue
		}
		b := newBacklog()
		all = append(all, b)
		out := outgoing(m.ctx, r, host)
		out.Body = b
		if out.ContentLength == 0 {
			out.Body = http.NoBody
		}
		rt := transport(destination{c}, r.ProtoMajor)
		m.wg.Go(func() {
			defer func() { <-m.places }()
			m.settle(c, b, m.copyRequest(c, out, rt))
		})
	}
	return all
}

func (m *mirrors) copyRequest(c *Claim, out *http.Request, rt http.RoundTripper) error {
	resp, err := rt.RoundTrip(out)
	if err != nil {
		return err
	}
	c.Stats.requests.Add(1)
	// Read the answer to its end, so that the connection can be reused. Errors do not matter.
	_, _ = io.Copy(io.Discard, resp.Body)
	resp.Body.Close()
	return nil
}
