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

// near is the end of a control socket that gives orders, and waits for what comes of them.
type near struct {
	wire *wire
	log  *slog.Logger

	mu     sync.Mutex
	lastID uint64
	asked  map[uint64]chan<- answer // nil: nothing more comes
}

type answer struct {
	socket *os.File
	err    error
}

// newNear takes over a wire that brings the file of a link.
func newNear(w *wire, link string, log *slog.Logger) *near {
	w.files = link
	return &near{wire: w, log: log, asked: map[uint64]chan<- answer{}}
}

// listen reads what the far end says, until it has gone. What is neither an answer nor a line of the log is other's, with the
// file.
func (n *near) listen(other func(report, *os.File)) {
	defer n.forget()
	for {
		var r report
		file, err := n.wire.receive(&r)
		switch {
		case err != nil:
			return
		case r.Log != nil:
			args := make([]any, len(r.Log.Attrs))
			for i, a := range r.Log.Attrs {
				args[i] = a
			}
			n.log.Log(context.Background(), r.Log.Level, r.Log.Message, args...)
		case r.ID != 0:
			n.answer(r, file)
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

// answer gives a report to who has asked, or throws it away.
func (n *near) answer(r report, file *os.File) {
	n.mu.Lock()
	waiting := n.asked[r.ID]
	delete(n.asked, r.ID)
	n.mu.Unlock()
	a := answer{socket: file}
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

// forget ends every ask.
func (n *near) forget() {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, waiting := range n.asked {
		waiting <- answer{err: os.ErrProcessDone}
	}
	n.asked = nil
}

// ask gives an order and waits for its answer.
func (n *near) ask(ctx context.Context, o order, file syscall.Conn) (answer, error) {
	if err := ctx.Err(); err != nil {
		return answer{}, err
	}
	result := make(chan answer, 1)
	n.mu.Lock()
	if n.asked == nil {
		n.mu.Unlock()
		return answer{}, os.ErrProcessDone
	}
	n.lastID++
	o.ID = n.lastID
	n.asked[o.ID] = result
	n.mu.Unlock()
	if err := n.wire.send(o, file); err != nil {
		n.drop(o.ID, result)
		return answer{}, err
	}
	select {
	case a := <-result:
		return a, a.err
	case <-ctx.Done():
		n.drop(o.ID, result)
		// If the far end is gone there is nothing to cancel.
		_ = n.wire.send(order{ID: o.ID, Cancel: true}, nil)
		return answer{}, ctx.Err()
	}
}

// drop stops waiting for a result, which may have come.
func (n *near) drop(id uint64, result <-chan answer) {
	n.mu.Lock()
	delete(n.asked, id)
	n.mu.Unlock()
	select {
	case a := <-result:
		if a.socket != nil {
			a.socket.Close()
		}
	default:
	}
}

// dial has the far end connect.
func (n *near) dial(ctx context.Context, network, address string) (net.Conn, error) {
	fail := func(err error) (net.Conn, error) {
		return nil, &net.OpError{Op: "dial", Net: network, Err: fmt.Errorf("%s in the sandbox: %w", address, err)}
	}
	a, err := n.ask(ctx, order{Dial: &endpoint{network, address}}, nil)
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

// setNetwork has the far end set up its network.
func (n *near) setNetwork(ctx context.Context, network Network) error {
	if err := network.check(); err != nil {
		return err
	}
	if _, err := n.ask(ctx, order{Network: &network}, nil); err != nil {
		return fmt.Errorf("setting up the sandbox's network: %w", err)
	}
	return nil
}
