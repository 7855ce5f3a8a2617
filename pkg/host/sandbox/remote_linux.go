package sandbox

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"syscall"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

// Remote is the end of a control socket that gives orders to the first process of a sandbox or of a container. Its
// methods are safe for concurrent use.
type Remote struct {
	control *unixsocket.Conn
	link    string // name of received files
	log     *slog.Logger
	serve   func(path string, device *os.File)
	tun     *os.File      // valid after ready; nil without a network
	ready   chan error    // receives once: nil, or the error of the other end
	done    chan struct{} // closed after the last report; ended is valid then
	ended   *ExitStatus
}

// newRemote returns a Remote that owns w. link becomes the name of the files that it receives.
func newRemote(w *unixsocket.Conn, link string, log *slog.Logger) *Remote {
	return &Remote{control: w, link: link, log: log, ready: make(chan error, 1), done: make(chan struct{})}
}

// Attach waits until [Serve] or [ServeProgram] is ready at the other end of conn. It owns conn, and closes it after an
// error or when ctx ends first.
func Attach(ctx context.Context, conn *net.UnixConn, logger *slog.Logger) (*Remote, error) {
	r := newRemote(unixsocket.NewConn(conn, maxMessage), ContainerInterface,
		cmp.Or(logger, slog.New(slog.DiscardHandler)))
	go r.listen()
	if err := r.wait(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("attaching to a container: %w", err), r.Close())
	}
	return r, nil
}

// wait returns when the other end is ready or has failed.
func (r *Remote) wait(ctx context.Context) error {
	select {
	case err := <-r.ready:
		return err
	case <-ctx.Done():
		return context.Cause(ctx)
	case <-r.done:
	}
	select {
	case err := <-r.ready:
		return err
	default:
		return errors.New("the other end closed the control socket without a report")
	}
}

// listen reads reports until the program has ended or the other end closes the socket.
func (r *Remote) listen() {
	defer close(r.done)
	ready := false // or failed
	for r.ended == nil {
		var in report
		file, err := r.control.Receive(&in, r.link)
		if err != nil {
			return
		}
		switch {
		case in.Log != nil:
			in.Log.To(r.log)
		case in.Ended != nil:
			r.ended = in.Ended
		case in.Files != "" && file != nil && r.serve != nil:
			r.serve(in.Files, file)
			file = nil
		case !ready && in.Error != nil:
			ready = true
			r.ready <- in.Error
		case !ready && in.Ready:
			ready = true
			r.tun, file = file, nil
			r.ready <- nil
		}
		if file != nil {
			file.Close()
		}
	}
}

// ask sends an order and waits for its answer. The order and its answer have their own socket, so that other orders do
// not wait. When ctx ends, that socket closes, which cancels a dial. The caller owns the file of the answer.
func (r *Remote) ask(ctx context.Context, o order, payload syscall.Conn) (report, *os.File, error) {
	var answer report
	if err := ctx.Err(); err != nil {
		return answer, nil, err
	}
	ours, theirs, err := newPair()
	if err != nil {
		return answer, nil, err
	}
	defer ours.Close()
	if err = ours.Send(o, payload); err == nil && r.control.Send(order{}, theirs) != nil {
		err = os.ErrProcessDone
	}
	theirs.Close()
	if err != nil {
		return answer, nil, err
	}
	defer context.AfterFunc(ctx, func() { ours.Close() })()
	file, err := ours.Receive(&answer, r.link)
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case errors.Is(err, io.EOF):
		err = os.ErrProcessDone
	case err == nil && answer.Error != nil:
		err = answer.Error
	}
	if err != nil && file != nil {
		file.Close()
		file = nil
	}
	return answer, file, err
}

// order sends an order that is answered without a file.
func (r *Remote) order(ctx context.Context, o order, payload syscall.Conn) (report, error) {
	answer, file, err := r.ask(ctx, o, payload)
	if file != nil {
		file.Close()
	}
	return answer, err
}

// askSocket sends an order that is answered with a socket. The caller owns it.
func (r *Remote) askSocket(ctx context.Context, o order) (*os.File, error) {
	_, socket, err := r.ask(ctx, o, nil)
	if err == nil && socket == nil {
		err = errors.New("the answer contains no socket")
	}
	return socket, err
}

// TUN returns the device, for tun.Adopt, or nil from [ServeProgram]. Its Name is the interface name. Close closes it.
func (r *Remote) TUN() *os.File { return r.tun }

// SetNetwork sets the addresses of the interface, routes everything to it, and makes n.DNS the nameservers. It may
// be called again.
func (r *Remote) SetNetwork(ctx context.Context, n Network) error {
	if err := n.check(); err != nil {
		return err
	}
	if _, err := r.order(ctx, order{Network: &n}, nil); err != nil {
		return fmt.Errorf("setting up the sandbox's network: %w", err)
	}
	return nil
}

// Dial connects to an address from inside, as [Process.Dial] does.
func (r *Remote) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	socket, err := r.askSocket(ctx, order{Dial: &endpoint{network, address}})
	var conn net.Conn
	if err == nil {
		defer socket.Close()
		conn, err = net.FileConn(socket)
	}
	if err != nil {
		return nil, &net.OpError{Op: "dial", Net: network, Err: fmt.Errorf("%s in the sandbox: %w", address, err)}
	}
	return conn, nil
}

// Update creates a volume, or atomically replaces its files. Groups and empty volumes stay as they were created.
func (r *Remote) Update(ctx context.Context, v Volume) error {
	if err := v.check(); err != nil {
		return err
	}
	return r.orderWith(ctx, order{Update: true}, v)
}

// orderWith sends an order with a file that contains v, which may have secrets and megabytes.
func (r *Remote) orderWith(ctx context.Context, o order, v any) error {
	f, err := inMemory(v)
	if err != nil {
		return err
	}
	defer f.Close()
	_, err = r.order(ctx, o, f)
	return err
}

// Resolve returns the current location of a path of a volume, relative to the volume, for a mount of that path. The
// mount does not follow updates. In an empty volume Serve creates a directory there.
func (r *Remote) Resolve(ctx context.Context, volume, sub string) (string, error) {
	a, err := r.order(ctx, order{Resolve: &position{volume, sub}}, nil)
	if err == nil && !filepath.IsLocal(a.Path) { // another program may have replaced Serve
		err = fmt.Errorf("the other end says that %s is at %q, outside of the volume", sub, a.Path)
	}
	return a.Path, err
}

// Run starts the program of [ServeProgram]. The error wraps that of the program's execve.
func (r *Remote) Run(ctx context.Context, p subreaper.Program) error {
	return r.orderWith(ctx, order{Run: true}, p)
}

// Signal sends the program a signal. Before Run the signal is lost. Once the other end has closed the socket, Signal
// returns [os.ErrProcessDone].
func (r *Remote) Signal(s syscall.Signal) error { return r.signal(s, false) }

func (r *Remote) signal(s syscall.Signal, ofTerminal bool) error {
	if err := r.control.Send(order{Signal: int(s), OfTerminal: ofTerminal}, nil); err != nil {
		return os.ErrProcessDone
	}
	return nil
}

// Done returns a channel that is closed when the program or the other end has ended, or Close was called.
func (r *Remote) Done() <-chan struct{} { return r.done }

// Ended returns how the program ended, or nil if the other end has not reported it. It is valid after Done.
func (r *Remote) Ended() *ExitStatus { return r.ended }

// Close ends the other end.
func (r *Remote) Close() error {
	err := r.control.Close()
	if errors.Is(err, net.ErrClosed) {
		err = nil
	}
	<-r.done
	if r.tun != nil {
		if e := r.tun.Close(); !errors.Is(e, os.ErrClosed) { // ErrClosed: the caller closed it
			err = errors.Join(err, e)
		}
	}
	return err
}
