package helper

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// maxConcurrent limits the requests in progress. One Apply waits for another; sockets for DNS queries do not wait.
const maxConcurrent = 16

// lastWrites limits the time to send answers once the helper ends.
const lastWrites = 2 * time.Second

// Serve executes the requests that arrive over socket until the other end closes it, or ctx ends. Then it removes
// everything and returns. The error names the parts that it could not remove. Serve owns socket.
func Serve(ctx context.Context, socket *os.File, cfg LocalConfig) error {
	w, err := openWire(socket)
	if err != nil {
		return api.Errorf(api.ExitNetwork, "cannot use the socket of the root helper: %w", err)
	}
	defer w.Close()
	out := &outbox{wire: w, queue: make(chan response, 64)}
	if cfg.Logger == nil {
		var handler slog.Handler = &remoteHandler{out: out}
		if cfg.Journal != nil {
			handler = slog.NewMultiHandler(handler, cfg.Journal)
		}
		cfg.Logger = slog.New(handler)
	}
	return serve(ctx, w, out, NewLocal(cfg))
}

func serve(ctx context.Context, w *unixsocket.Conn, out *outbox, local *Local) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	var tasks sync.WaitGroup
	tasks.Go(func() { out.run(ctx) })
	tasks.Go(func() {
		for {
			select {
			case a := <-local.Changes():
				out.put(response{Changed: &a})
			case <-ctx.Done():
				return
			}
		}
	})
	// Reads end with ctx. Later writes must still succeed, but not wait for a daemon that is stopped.
	stop := context.AfterFunc(ctx, func() {
		_ = w.CloseRead()
		_ = w.SetWriteDeadline(time.Now().Add(lastWrites))
	})
	defer stop()

	var working errgroup.Group
	working.SetLimit(maxConcurrent)
	var broken error
	for {
		var r request
		if _, err := w.Receive(&r, ""); err != nil {
			if !errors.Is(err, io.EOF) && ctx.Err() == nil {
				broken = fmt.Errorf("cannot read a request: %w", err)
			}
			break
		}
		working.Go(func() error {
			answer(ctx, w, local, r)
			return nil
		})
	}
	_ = working.Wait()
	err := local.Close()
	cancel()
	tasks.Wait()
	last := response{Closed: true}
	if err != nil {
		last.Error = api.AsError(err)
	}
	_ = w.Send(last, nil) // this fails if the daemon was killed
	return errors.Join(broken, err)
}

// answer executes one request. It closes a descriptor as soon as it has sent it, so that the device ends with the
// daemon.
func answer(ctx context.Context, w *unixsocket.Conn, local *Local, r request) {
	resp := response{ID: r.ID}
	var f *os.File
	var err error
	switch r.Op {
	case opTUN:
		f, err = local.CreateTUN(ctx, r.Name, r.MTU)
	case opSocket:
		f, err = local.MarkedSocket(ctx, r.Network)
	case opApply:
		if r.State == nil {
			r.State = &api.NetworkState{}
		}
		var applied api.NetworkApplied
		if applied, err = local.Apply(ctx, *r.State); err == nil {
			resp.Applied = &applied
		}
	default:
		err = refused("the operation %q: it is unknown", r.Op)
	}
	if err != nil {
		resp.Error = api.AsError(err)
	}
	// The reader notices a daemon that is gone.
	if f == nil {
		_ = w.Send(resp, nil)
		return
	}
	resp.Name = f.Name()
	_ = w.Send(resp, f)
	f.Close()
}

// outbox queues the helper's unsolicited messages, so that a daemon that does not read (because it is stopped) does not
// block the helper. A full queue drops messages: log lines are not worth a wait, and each change contains the whole
// state.
type outbox struct {
	wire  *unixsocket.Conn
	queue chan response
}

func (o *outbox) put(r response) {
	select {
	case o.queue <- r:
	default:
	}
}

// run sends until ctx ends, and then sends the rest of the queue.
func (o *outbox) run(ctx context.Context) {
	for ctx.Err() == nil || len(o.queue) > 0 {
		select {
		case r := <-o.queue:
			if o.wire.Send(r, nil) != nil {
				return
			}
		case <-ctx.Done():
		}
	}
}

// remoteHandler sends log records to the daemon.
type remoteHandler struct {
	out   *outbox
	attrs []string
}

func (h *remoteHandler) Enabled(_ context.Context, level slog.Level) bool {
	return level >= slog.LevelInfo
}

func (h *remoteHandler) Handle(_ context.Context, r slog.Record) error {
	line := &unixsocket.LogLine{Level: r.Level, Message: r.Message, Attrs: slices.Clip(h.attrs)}
	r.Attrs(func(a slog.Attr) bool {
		line.Attrs = append(line.Attrs, a.Key, a.Value.String())
		return true
	})
	h.out.put(response{Log: line})
	return nil
}

func (h *remoteHandler) WithAttrs(attrs []slog.Attr) slog.Handler {
	c := &remoteHandler{out: h.out, attrs: slices.Clip(h.attrs)}
	for _, a := range attrs {
		c.attrs = append(c.attrs, a.Key, a.Value.String())
	}
	return c
}

// WithGroup ignores the name of the group: the helper logs without groups.
func (h *remoteHandler) WithGroup(string) slog.Handler { return h }
