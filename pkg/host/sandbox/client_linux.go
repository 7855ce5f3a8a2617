package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
)

// client is the end of a control socket that sends orders and waits for the answers.
type client struct {
	control *controlConn
	log     *slog.Logger

	mu      sync.Mutex
	lastID  uint64
	pending map[uint64]chan<- answer // nil: the server has gone
}

type answer struct {
	socket *os.File
	path   string
	err    error
}

// newClient returns a client that owns w. Files that it receives get the name link.
func newClient(w *controlConn, link string, log *slog.Logger) *client {
	w.files = link
	return &client{control: w, log: log, pending: map[uint64]chan<- answer{}}
}

// listen reads reports until the server closes the socket. It passes reports that are neither answers nor log lines to
// other, which owns the file.
func (c *client) listen(other func(report, *os.File)) {
	defer c.failAll()
	for {
		var r report
		file, err := c.control.receive(&r)
		switch {
		case err != nil:
			return
		case r.Log != nil:
			args := make([]any, len(r.Log.Attrs))
			for i, a := range r.Log.Attrs {
				args[i] = a
			}
			c.log.Log(context.Background(), r.Log.Level, r.Log.Message, args...)
		case r.ID != 0:
			c.answer(r, file)
			continue
		default:
			other(r, file)
			continue
		}
		if file != nil {
			file.Close()
		}
	}
}

// answer passes a report to the caller of ask, or discards it when that has given up.
func (c *client) answer(r report, file *os.File) {
	c.mu.Lock()
	waiting := c.pending[r.ID]
	delete(c.pending, r.ID)
	c.mu.Unlock()
	a := answer{socket: file, path: r.Path}
	if r.Error != nil {
		a.err = r.Error
	}
	if waiting == nil {
		if file != nil {
			file.Close()
		}
		return
	}
	waiting <- a
}

// failAll ends every ask.
func (c *client) failAll() {
	c.mu.Lock()
	defer c.mu.Unlock()
	for _, waiting := range c.pending {
		waiting <- answer{err: os.ErrProcessDone}
	}
	c.pending = nil
}

// ask sends an order and waits for its answer.
func (c *client) ask(ctx context.Context, o order, file syscall.Conn) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, err
	}
	result := make(chan answer, 1)
	c.mu.Lock()
	if c.pending == nil {
		c.mu.Unlock()
		return answer{}, os.ErrProcessDone
	}
	c.lastID++
	o.ID = c.lastID
	c.pending[o.ID] = result
	c.mu.Unlock()
	if err := c.control.send(o, file); err != nil {
		c.abandon(o.ID, result)
		return answer{}, err
	}
	select {
	case a := <-result:
		return a, a.err
	case <-ctx.Done():
		c.abandon(o.ID, result)
		// If the server is gone there is nothing to cancel.
		_ = c.control.send(order{ID: o.ID, Cancel: true}, nil)
		return answer{}, ctx.Err()
	}
}

// abandon stops waiting for a result, which may have come already.
func (c *client) abandon(id uint64, result <-chan answer) {
	c.mu.Lock()
	delete(c.pending, id)
	c.mu.Unlock()
	select {
	case a := <-result:
		if a.socket != nil {
			a.socket.Close()
		}
	default:
	}
}

// dial asks the server to connect.
func (c *client) dial(ctx context.Context, network, address string) (net.Conn, error) {
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: network, Err: fmt.Errorf("%s in the sandbox: %w", address, err)}
	}
	a, err := c.ask(ctx, order{Dial: &endpoint{network, address}}, nil)
	switch {
	case err != nil:
		return fail(err)
	case a.socket == nil:
		return fail(errors.New("no socket came"))
	}
	defer a.socket.Close()
	conn, err := net.FileConn(a.socket)
	if err != nil {
		return fail(err)
	}
	return conn, nil
}

// setNetwork asks the server to set up its network.
func (c *client) setNetwork(ctx context.Context, network Network) error {
	if err := network.check(); err != nil {
		return err
	}
	if _, err := c.ask(ctx, order{Network: &network}, nil); err != nil {
		return fmt.Errorf("setting up the sandbox's network: %w", err)
	}
	return nil
}

// update asks the server to replace the files of a volume.
func (c *client) update(ctx context.Context, v Volume) error {
	if err := v.check(); err != nil {
		return err
	}
	f, err := inMemory("volume", v)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = c.ask(ctx, order{Update: true}, f)
	return err
}
