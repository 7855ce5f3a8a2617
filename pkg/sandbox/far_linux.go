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

	"kubevpn/pkg/pid1"
	"kubevpn/pkg/route"
)

// far is the end of a control socket that does what it is told: what is the same for init and in a container.
type far struct {
	wire      *wire
	link      string // the TUN's name
	router    *route.Router
	nameSpace func(*Network) error // has names resolved as the network says

	mu    sync.Mutex
	dials map[uint64]context.CancelFunc
}

func newFar(w *wire, link string) *far {
	return &far{wire: w, link: link, router: route.New(), dials: map[uint64]context.CancelFunc{}}
}

// say sends a report. When the near end is gone there is nobody to tell, and receiving fails next.
func (f *far) say(r report, with syscall.Conn) { _ = f.wire.send(r, with) }

func (f *far) log(level slog.Level, message string, attrs ...string) {
	f.say(report{Log: &logLine{Level: level, Message: message, Attrs: attrs}}, nil)
}

// done answers an order of which nothing comes but its end.
func (f *far) done(id uint64, err error) {
	r := report{ID: id}
	if err != nil {
		r.Error = pid1.NewFailure(err)
	}
	f.say(r, nil)
}

// obey does what an order says if it is one that both understand.
func (f *far) obey(o order) {
	switch {
	case o.Network != nil:
		f.done(o.ID, f.setNetwork(o.Network))
	case o.Cancel:
		f.mu.Lock()
		cancel := f.dials[o.ID]
		f.mu.Unlock()
		if cancel != nil {
			cancel()
		}
	case o.Dial != nil:
		ctx, cancel := context.WithCancel(context.Background())
		f.mu.Lock()
		f.dials[o.ID] = cancel
		f.mu.Unlock()
		go f.dial(ctx, o.ID, *o.Dial)
	}
}

// setNetwork gives the interface addresses and routes, in the place of those that it has, and names their resolver.
func (f *far) setNetwork(n *Network) error {
	link := route.Link{Name: f.link, MTU: n.MTU, Addrs: n.Addresses, TxQueueLen: queueLen}
	for _, everything := range []netip.Prefix{netip.MustParsePrefix("0.0.0.0/0"), netip.MustParsePrefix("::/0")} {
		for _, a := range n.Addresses {
			if a.Addr().Is4() == everything.Addr().Is4() {
				link.Routes = append(link.Routes, everything)
				break
			}
		}
	}
	applied, err := f.router.Set(route.Config{Links: []route.Link{link}})
	if err != nil {
		return err
	}
	for _, w := range applied.Warnings {
		f.log(slog.LevelWarn, "the sandbox's network", "warning", w)
	}
	return f.nameSpace(n)
}

// dial gives the near end a connection that is made here.
func (f *far) dial(ctx context.Context, id uint64, to endpoint) {
	defer func() {
		f.mu.Lock()
		defer f.mu.Unlock()
		f.dials[id]()
		delete(f.dials, id)
	}()
	conn, err := new(net.Dialer).DialContext(ctx, to.Network, to.Address)
	if err != nil {
		var op *net.OpError
		if errors.As(err, &op) {
			err = op.Err // the rest is said at the other end
		}
		f.done(id, err)
		return
	}
	defer conn.Close()
	if file, ok := conn.(syscall.Conn); ok {
		f.say(report{ID: id}, file)
	} else {
		f.done(id, fmt.Errorf("%s is not a network of sockets", to.Network))
	}
}

// hand gives the near end the TUN, and with it the word that all is ready. device may be nil.
func (f *far) hand(device *os.File) {
	if device == nil {
		f.say(report{Ready: true}, nil)
		return
	}
	f.say(report{Ready: true}, device)
	device.Close()
}
