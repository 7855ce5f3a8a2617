package daemon

import (
	"context"
	"errors"
	"fmt"
	"os"
	"time"

	"kubevpn/internal/api"
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

// keepHelper keeps the helper, if there is one, until done is called and no connection needs it.
func (cs *connections) keepHelper() (done func()) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	cs.keeping++
	return func() {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		cs.keeping--
		cs.closeUnusedLocked()
	}
}

// closeUnusedLocked closes the helper if no connection needs it.
func (cs *connections) closeUnusedLocked() {
	if !cs.lingering && cs.keeping == 0 && cs.activeLocked() == 0 {
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
