package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"syscall"

	"kubevpn/pkg/host/route"
	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

// server is the end of a control socket that executes orders: the part that Init, Serve and ServeProgram share.
type server struct {
	control  *unixsocket.Conn
	link     string // the TUN's name
	router   *route.Router
	setNames func(*Network) error // configures the resolver
	store    *store               // nil: there are no volumes, and so no orders for them

	localhost *localhost // nil until the first order for it

	start   func(subreaper.Program) (*subreaper.Process, error)
	program *subreaper.Process      // nil before it runs; only serve uses it
	started chan *subreaper.Process // receives it once
}

func newServer(w *unixsocket.Conn, link string) *server {
	return &server{control: w, link: link, router: route.New(), started: make(chan *subreaper.Process, 1)}
}

// send sends a report. An error means that the client has gone, which the next receive reports.
func (s *server) send(r report, file syscall.Conn) { _ = s.control.Send(r, file) }

func (s *server) log(level slog.Level, message string, attrs ...string) {
	s.send(report{Log: &unixsocket.LogLine{Level: level, Message: message, Attrs: attrs}}, nil)
}

// request is an order and the socket for its answer.
type request struct {
	order
	socket *unixsocket.Conn // nil: the order has no answer
	file   *os.File         // may be nil
}

// receive waits for the next order.
func (s *server) receive() (r request, err error) {
	file, err := s.control.Receive(&r.order, "control")
	if err != nil || file == nil {
		return r, err
	}
	if r.socket, err = unixsocket.Open(file, maxMessage); err != nil {
		return r, err
	}
	if r.file, err = r.socket.Receive(&r.order, "request"); err != nil {
		r.close()
	}
	return r, err
}

// answer sends a report and closes the request. An error means that the client no longer waits.
func (r *request) answer(out report, err error, file syscall.Conn) {
	out.Error = subreaper.NewFailure(err)
	_ = r.socket.Send(out, file)
	r.close()
}

func (r *request) close() {
	r.socket.Close()
	if r.file != nil {
		r.file.Close()
	}
}

// serve executes orders until the client closes the control socket.
func (s *server) serve() error {
	for {
		r, err := s.receive()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return err
		case r.socket != nil:
			s.handle(r)
		case r.Signal > 0 && s.program != nil:
			forward(s.program, syscall.Signal(r.Signal), r.OfTerminal)
		}
	}
}

// handle executes and answers an order.
func (s *server) handle(r request) {
	switch {
	case r.Dial != nil:
		go s.dial(r)
	case r.Run:
		r.answer(report{}, s.run(r.file), nil)
		if s.program != nil {
			s.started <- s.program
		}
	case r.Update:
		r.answer(report{}, s.store.update(r.file), nil)
	case r.Resolve != nil:
		at, err := s.store.resolve(*r.Resolve)
		r.answer(report{Path: at}, err, nil)
	case r.Localhost != nil:
		listener, err := s.setLocalhost(*r.Localhost)
		r.answer(report{}, err, listener)
	case r.Network != nil:
		r.answer(report{}, s.setNetwork(r.Network), nil)
	default:
		r.answer(report{}, errors.New("unknown order"), nil)
	}
}

// run starts the program that f contains. The client sends it once.
func (s *server) run(f *os.File) error {
	var p subreaper.Program
	if err := fromMemory(f, &p); err != nil {
		return fmt.Errorf("reading the program: %w", err)
	}
	var err error
	if s.program, err = s.start(p); err != nil {
		return err
	}
	// If this process kept a pipe open, its reader would see no EOF when the program closes it.
	if err := subreaper.CloseStandardFiles(); err != nil {
		s.log(slog.LevelWarn, "cannot close the standard files of the first process", "err", err.Error())
	}
	return nil
}

// wait waits until the program has ended, and reports it.
func (s *server) wait() (ended ExitStatus) {
	p := <-s.started
	<-p.Done()
	ended.Code, ended.Signal = p.Exit()
	s.send(report{Ended: &ended}, nil)
	return ended
}

// forward sends the program a signal that the parent received. A signal of the terminal has already reached the
// program, unless the program has its own process group.
func forward(p *subreaper.Process, s syscall.Signal, ofTerminal bool) {
	if !ofTerminal || !p.SharesGroup() {
		p.Signal(s)
	}
}

// setNetwork replaces the addresses and routes of the interface, and configures the resolver.
func (s *server) setNetwork(n *Network) error {
	if len(n.Addresses) == 0 {
		return s.setNames(n)
	}
	link := route.Link{Name: s.link, MTU: n.MTU, Addrs: n.Addresses, TxQueueLen: queueLen}
	for _, everything := range []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")} {
		same := func(a netip.Prefix) bool { return a.Addr().Is4() == everything.Addr().Is4() }
		if slices.ContainsFunc(n.Addresses, same) {
			link.Routes = append(link.Routes, everything)
		}
	}
	applied, err := s.router.Set(route.Config{Links: []route.Link{link}})
	if err != nil {
		return err
	}
	for _, w := range applied.Warnings {
		s.log(slog.LevelWarn, "the sandbox's network", "warning", w)
	}
	return s.setNames(n)
}

// dial connects and sends the client the socket. The client closes the socket of r to cancel it.
func (s *server) dial(r request) {
	ctx, cancel := context.WithCancel(context.Background())
	go func() {
		defer cancel()
		_, _ = r.socket.Receive(&order{}, "") // ends with the client's end, or with ours
	}()
	conn, err := new(net.Dialer).DialContext(ctx, r.Dial.Network, r.Dial.Address)
	if err != nil {
		if op, ok := errors.AsType[*net.OpError](err); ok {
			err = op.Err // the client adds the rest
		}
		r.answer(report{}, err, nil)
		return
	}
	defer conn.Close()
	file, ok := conn.(syscall.Conn)
	if !ok {
		err = fmt.Errorf("%s is not a network of sockets", r.Dial.Network)
	}
	r.answer(report{}, err, file)
}

// sendReady tells the client that everything is ready, and sends it the TUN unless device is nil. It closes device.
func (s *server) sendReady(device *os.File) {
	var file syscall.Conn
	if device != nil {
		file = device
		defer device.Close()
	}
	s.send(report{Ready: true}, file)
}
