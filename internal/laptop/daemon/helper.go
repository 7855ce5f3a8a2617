package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// Helper changes the network of this machine, which requires root. internal/laptop/helper has two implementations: a
// client of the helper process, and one that acts in this process. The methods are safe for concurrent use.
type Helper interface {
	// CreateTUN returns the descriptor of a new TUN device. The name of the file is that of the interface. The kernel
	// removes the device with its last descriptor.
	CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error)
	// Apply configures the network of this machine as state describes, and changes nothing else.
	Apply(ctx context.Context, state api.NetworkState) (api.NetworkApplied, error)
	// MarkedSocket returns an unconnected socket whose DNS queries are not redirected. network is udp4, udp6, tcp4 or
	// tcp6.
	MarkedSocket(ctx context.Context, network string) (*os.File, error)
	// Changes receives the new state after a change that no Apply made, such as other nameservers after a change of the
	// network. It contains only the latest state, and is never closed.
	Changes() <-chan api.NetworkApplied
	// Done is closed when the helper has ended, by Close or by itself.
	Done() <-chan struct{}
	// Close removes everything that Apply made and ends the helper.
	Close() error
}

// unprivileged is the part that the Helpers without root have in common. Close ends it.
type unprivileged struct {
	over context.Context
	end  context.CancelFunc
}

func newUnprivileged() unprivileged {
	over, end := context.WithCancel(context.Background())
	return unprivileged{over, end}
}

func (u unprivileged) Done() <-chan struct{} { return u.over.Done() }

func (u unprivileged) Close() error {
	u.end()
	return nil
}

func (unprivileged) MarkedSocket(context.Context, string) (*os.File, error) {
	return nil, fmt.Errorf("cannot create a marked socket: %w: nothing is redirected", errors.ErrUnsupported)
}

func errHelperEnded() *api.Error {
	return api.Errorf(api.ExitLost, "the root helper ended").
		WithHint("it, its sudo or its service was stopped; run `kubevpn connect` again")
}

// The life of the helper of a daemon:
//
//	         adopt                            last connection ended, or none began within linger
//	(none) ─────────▶ lingering ──▶ in use ──────────────────────────────────────────────────▶ closing ──▶ (none)
//	                      └───────────┴── the helper ends: its connections end with errHelperEnded ──▶ closing

// adopt makes h the helper of this daemon. If the daemon already has one, adopt closes h: two commands may have started
// helpers at the same time.
func (cs *connections) adopt(h Helper) error {
	for {
		cs.mu.Lock()
		if cs.closing == nil {
			break
		}
		closing := cs.closing
		cs.mu.Unlock()
		<-closing
	}
	if cs.host != nil || cs.shut {
		cs.mu.Unlock()
		return h.Close()
	}
	host := newHostNetwork(h, cs.resolverConfig(), cs.logger)
	host.isolated = cs.isolated()
	cs.host, cs.lingering = host, true
	linger := time.AfterFunc(cs.linger, func() {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		if cs.host == host {
			cs.lingering = false
			cs.closeUnusedLocked()
		}
	})
	cs.mu.Unlock()
	cs.logger.Info("root helper connected")
	cs.group.Go(func() {
		host.watch()
		linger.Stop()
		cs.helperEnded(host)
	})
	cs.changed()
	return nil
}

// helperEnded ends the connections that use host, unless the daemon itself closed it.
func (cs *connections) helperEnded(host *hostNetwork) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if cs.host != host {
		return
	}
	cs.logger.Error("root helper ended by itself")
	for _, t := range cs.tasks {
		if t.failed == nil && t.network.host == host {
			t.endLocked(errHelperEnded())
		}
	}
	cs.closeHelperLocked()
}

// closeUnusedLocked closes the helper if no connection needs it.
func (cs *connections) closeUnusedLocked() {
	if !cs.lingering && cs.activeLocked() == 0 {
		cs.closeHelperLocked()
	}
}

// closeHelperLocked begins to close the helper, if there is one.
func (cs *connections) closeHelperLocked() {
	host := cs.host
	if host == nil {
		return
	}
	closing := make(chan struct{})
	cs.host, cs.closing = nil, closing
	cs.queries.clear()
	cs.group.Go(func() {
		if err := host.close(); err != nil {
			cs.logger.Error("cannot end the root helper", "err", err)
		} else {
			cs.logger.Info("root helper ended")
		}
		cs.mu.Lock()
		cs.closing = nil
		cs.mu.Unlock()
		close(closing)
		cs.changed()
	})
}

// handoverTimeout limits the time in which a CLI passes the descriptor of a helper.
const handoverTimeout = 10 * time.Second

// serveHelpers receives helpers, one per connection: the CLI sends one byte with the descriptor of its end of the
// helper's socket pair, and receives one line, an api.Error or null.
func (d *daemon) serveHelpers(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if errors.Is(err, net.ErrClosed) {
			return nil
		}
		if err != nil {
			return err
		}
		d.connections.group.Go(func() { d.takeHelper(conn) })
	}
}

func (d *daemon) takeHelper(conn net.Conn) {
	defer conn.Close()
	err := conn.SetDeadline(time.Now().Add(handoverTimeout))
	if err == nil {
		err = d.adoptFrom(conn)
	}
	if err != nil {
		d.logger.Error("cannot receive the root helper", "err", err)
	}
	if err := json.NewEncoder(conn).Encode(api.AsError(err)); err != nil {
		d.logger.Warn("cannot answer the command that started the root helper", "err", err)
	}
}

func (d *daemon) adoptFrom(conn net.Conn) error {
	_, socket, err := unixsocket.Receive(conn.(*net.UnixConn), make([]byte, 1), "helper")
	if err == nil && socket == nil {
		err = errors.New("received no descriptor")
	}
	if err != nil {
		return fmt.Errorf("cannot receive the socket of the root helper: %w", err)
	}
	helper, err := d.cfg.NewHelper(socket, d.logger)
	if err != nil {
		return err
	}
	return d.connections.adopt(helper)
}
