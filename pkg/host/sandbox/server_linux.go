package sandbox

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/netip"
	"os"
	"sync"
	"syscall"

	"kubevpn/pkg/host/route"
	"kubevpn/pkg/host/subreaper"
)

// server is the end of a control socket that executes orders: the part that init and Serve share.
type server struct {
	control  *controlConn
	link     string // the TUN's name
	router   *route.Router
	setNames func(*Network) error // configures the resolver
	store    *store               // nil: there are no volumes, and so no orders for them

	mu    sync.Mutex
	dials map[uint64]context.CancelFunc
}

func newServer(w *controlConn, link string) *server {
	return &server{control: w, link: link, router: route.New(), dials: map[uint64]context.CancelFunc{}}
}

// send sends a report. An error means that the client has gone, which the next receive reports.
func (s *server) send(r report, file syscall.Conn) { _ = s.control.send(r, file) }

func (s *server) log(level slog.Level, message string, attrs ...string) {
	s.send(report{Log: &logLine{Level: level, Message: message, Attrs: attrs}}, nil)
}

// reply answers an order that has no result but its error.
func (s *server) reply(id uint64, err error) {
	s.send(report{ID: id, Error: subreaper.NewFailure(err)}, nil)
}

// handle executes an order for the network, a volume or a dial, and ignores others. It closes file, unless that is nil.
func (s *server) handle(o order, file *os.File) {
	if file != nil {
		defer file.Close()
	}
	switch {
	case o.Update:
		s.reply(o.ID, s.store.update(file))
	case o.Resolve != nil:
		at, err := s.store.resolve(*o.Resolve)
		s.send(report{ID: o.ID, Path: at, Error: subreaper.NewFailure(err)}, nil)
	case o.Network != nil:
		s.reply(o.ID, s.setNetwork(o.Network))
	case o.Cancel:
		s.mu.Lock()
		cancel := s.dials[o.ID]
		s.mu.Unlock()
		if cancel != nil {
			cancel()
		}
	case o.Dial != nil:
		ctx, cancel := context.WithCancel(context.Background())
		s.mu.Lock()
		s.dials[o.ID] = cancel
		s.mu.Unlock()
		go s.dial(ctx, o.ID, *o.Dial)
	}
}

// setNetwork replaces the addresses and routes of the interface, and configures the resolver.
func (s *server) setNetwork(n *Network) error {
	link := route.Link{Name: s.link, MTU: n.MTU, Addrs: n.Addresses, TxQueueLen: queueLen}
	for _, everything := range []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")} {
		for _, a := range n.Addresses {
			if a.Addr().Is4() == everything.Addr().Is4() {
				link.Routes = append(link.Routes, everything)
				break
			}
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

// dial connects and sends the client the socket.
func (s *server) dial(ctx context.Context, id uint64, to endpoint) {
	defer func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.dials[id]()
		delete(s.dials, id)
	}()
	conn, err := new(net.Dialer).DialContext(ctx, to.Network, to.Address)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err // the client adds the rest
		}
		s.reply(id, err)
		return
	}
	defer conn.Close()
	if file, ok := conn.(syscall.Conn); ok {
		s.send(report{ID: id}, file)
	} else {
		s.reply(id, fmt.Errorf("%s is not a network of sockets", to.Network))
	}
}

// sendReady tells the client that everything is ready, and sends it the TUN unless device is nil. It closes device.
func (s *server) sendReady(device *os.File) {
	if device == nil {
		s.send(report{Ready: true}, nil)
		return
	}
	s.send(report{Ready: true}, device)
	device.Close()
}
