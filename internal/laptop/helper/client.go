package helper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"strings"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// closeTimeout limits how long Close waits until the helper has removed everything. A D-Bus call that hangs takes five
// seconds, and several may hang.
const closeTimeout = 30 * time.Second

// createTimeout limits how long CreateTUN waits for the helper, which may first finish one Apply.
const createTimeout = 10 * time.Second

// Client has the methods of Local, which a helper process executes. Its methods are safe for concurrent use.
type Client struct {
	wire    *unixsocket.Conn
	logger  *slog.Logger
	changes chan api.NetworkApplied
	done    chan struct{}

	mu      sync.Mutex
	last    uint64
	waiting map[uint64]chan<- reply
	ended   error // the error that the helper sent when it closed; valid after done
}

type reply struct {
	response
	file *os.File
}

// ErrEnded means that the helper has ended. It has removed everything except for the devices: close their descriptors.
var ErrEnded = errors.New("the root helper has ended")

// NewClient returns a Client of the helper whose socket Start returned. The Client owns the socket. Its goroutine ends
// with the helper, or with Close. logger gets the helper's log lines.
func NewClient(socket *os.File, logger *slog.Logger) (*Client, error) {
	w, err := openWire(socket)
	if err != nil {
		return nil, api.Errorf(api.ExitNetwork, "cannot use the socket of the root helper: %w", err)
	}
	if logger == nil {
		logger = slog.New(slog.DiscardHandler)
	}
	c := &Client{
		wire:    w,
		logger:  logger.With("from", "helper"),
		changes: make(chan api.NetworkApplied, 1),
		done:    make(chan struct{}),
		waiting: map[uint64]chan<- reply{},
	}
	go c.read()
	return c, nil
}

// Starter returns what started the helper: "service" or "sudo". A socketpair, which sudo passes on, has no path.
func (c *Client) Starter() string {
	if strings.HasPrefix(c.wire.RemoteAddr().String(), "/") {
		return "service"
	}
	return "sudo"
}

// CreateTUN is Local.CreateTUN in the helper. It waits for the helper's answer even if ctx ends: otherwise a late
// device could appear after the caller reported that nothing is left.
func (c *Client) CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error) {
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	wait, cancel := context.WithTimeout(context.WithoutCancel(ctx), createTimeout)
	defer cancel()
	f, err := withFile(c.ask(wait, request{Op: opTUN, Name: name, MTU: mtu}))
	if err == nil && ctx.Err() != nil {
		f.Close()
		return nil, ctx.Err()
	}
	return f, err
}

// MarkedSocket is Local.MarkedSocket in the helper.
func (c *Client) MarkedSocket(ctx context.Context, network string) (*os.File, error) {
	return withFile(c.ask(ctx, request{Op: opSocket, Network: network}))
}

// Apply is Local.Apply in the helper. If ctx ends before the helper has answered, the helper still completes it.
func (c *Client) Apply(ctx context.Context, state api.NetworkState) (api.NetworkApplied, error) {
	r, err := c.ask(ctx, request{Op: opApply, State: &state})
	if err != nil {
		return api.NetworkApplied{}, err
	}
	if r.Applied == nil {
		return api.NetworkApplied{}, api.Errorf(api.ExitNetwork, "the root helper sent an empty answer")
	}
	return *r.Applied, nil
}

// Changes is Local.Changes of the helper.
func (c *Client) Changes() <-chan api.NetworkApplied { return c.changes }

// Done returns a channel that is closed when the helper has ended, by Close or by itself.
func (c *Client) Done() <-chan struct{} { return c.done }

// Close has the helper remove everything that Apply made, and waits until it has ended. The error names the parts that
// the helper could not remove. If the helper ended before, Close returns nil.
func (c *Client) Close() error {
	// If the helper has ended, this fails, and read notices it.
	_ = c.wire.CloseWrite()
	select {
	case <-c.done:
	case <-time.After(closeTimeout):
		_ = c.wire.Close()
		<-c.done
		return api.Errorf(api.ExitNetwork, "the root helper did not end within %s", closeTimeout)
	}
	return c.ended
}

// withFile returns the file of a reply, under the name in it.
func withFile(r reply, err error) (*os.File, error) {
	if err != nil {
		return nil, err
	}
	if r.file == nil {
		return nil, api.Errorf(api.ExitNetwork, "the root helper sent no descriptor")
	}
	defer r.file.Close()
	f, err := unixsocket.Dup(r.file, r.Name)
	if err != nil {
		return nil, api.Errorf(api.ExitNetwork, "cannot use the descriptor of %q: %w", r.Name, err)
	}
	return f, nil
}

func (c *Client) ask(ctx context.Context, r request) (reply, error) {
	answer := make(chan reply, 1)
	c.mu.Lock()
	c.last++
	r.ID = c.last
	c.waiting[r.ID] = answer
	c.mu.Unlock()
	if err := c.wire.Send(r, nil); err != nil {
		c.forget(r.ID, answer)
		return reply{}, api.Errorf(api.ExitNetwork, "%w", fmt.Errorf("%w: %w", ErrEnded, err))
	}
	select {
	case got := <-answer:
		if got.Error != nil {
			return reply{}, got.Error
		}
		return got, nil
	case <-ctx.Done():
		c.forget(r.ID, answer)
		return reply{}, ctx.Err()
	case <-c.done:
		c.forget(r.ID, answer)
		return reply{}, api.Errorf(api.ExitNetwork, "%w", ErrEnded)
	}
}

// forget discards an answer that may have arrived meanwhile.
func (c *Client) forget(id uint64, answer <-chan reply) {
	c.mu.Lock()
	delete(c.waiting, id)
	c.mu.Unlock()
	select {
	case got := <-answer:
		if got.file != nil {
			got.file.Close()
		}
	default:
	}
}

// read distributes the helper's messages until the helper ends.
func (c *Client) read() {
	defer close(c.done)
	defer c.wire.Close()
	for {
		var r response
		f, err := c.wire.Receive(&r, "from helper")
		if err != nil {
			if !errors.Is(err, io.EOF) && !errors.Is(err, os.ErrClosed) {
				c.logger.Error("cannot read from the root helper", "err", err)
			}
			return
		}
		switch {
		case r.Log != nil:
			r.Log.To(c.logger)
		case r.Changed != nil:
			publish(c.changes, *r.Changed) // only read sends
		case r.Closed:
			if r.Error != nil {
				c.ended = r.Error
			}
		default:
			c.deliver(reply{r, f})
		}
	}
}

func (c *Client) deliver(r reply) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if answer := c.waiting[r.ID]; answer != nil {
		delete(c.waiting, r.ID)
		answer <- r // it has room for one
	} else if r.file != nil {
		r.file.Close()
	}
}
