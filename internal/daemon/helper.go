package daemon

import (
	"context"
	"os"
	"time"

	"kubevpn/internal/api"
)

// Helper does what requires root. internal/helper has two implementations: a client of the helper process, and one that
// acts in this process. Its methods may be called concurrently.
type Helper interface {
	// CreateTUN returns a new TUN device's descriptor; the device goes when its last descriptor is closed.
	CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error)
	// Apply configures the network of this machine as state describes, and changes nothing else.
	Apply(ctx context.Context, state api.NetworkState) (api.NetworkApplied, error)
	// MarkedSocket returns an unconnected socket that the redirect of DNS queries lets pass. network is udp4,
	// udp6, tcp4 or tcp6.
	MarkedSocket(ctx context.Context, network string) (*os.File, error)
	// Changes delivers what applies now when it changes by itself, such as the nameservers of another network. It
	// buffers the latest value only, and is not closed.
	Changes() <-chan api.NetworkApplied
	// Done is closed when the helper has ended, also by Close.
	Done() <-chan struct{}
	// Close removes everything that Apply made and ends the helper.
	Close() error
}

func errHelperEnded() *api.Error {
	return api.Errorf(api.ExitLost, "the root helper ended").
		WithHint("it or its sudo was killed; run `kubevpn connect` again")
}

// The life of the helper of a daemon:
//
//	         adopt                            last connection ended, or none began within linger
//	(none) ─────────▶ lingering ──▶ in use ──────────────────────────────────────────────────▶ closing ──▶ (none)
//	                      └───────────┴── the helper ends: its connections end with errHelperEnded ──▶ closing

// adopt makes h the helper of this daemon. If there is one already, adopt closes h: two commands may have started one
// each at the same time, and either will do.
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
	host := newHostNetwork(h, cs.logger)
	host.isolated = cs.isolated
	cs.host, cs.lingering = host, true
	linger := time.AfterFunc(cs.linger, func() {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		if cs.host == host {
			cs.lingering = false
			cs.closeUnused()
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
			t.end(errHelperEnded())
		}
	}
	cs.closeHelper()
}

// closeUnused closes the helper if no connection needs it; the mutex is held.
func (cs *connections) closeUnused() {
	if !cs.lingering && cs.active() == 0 {
		cs.closeHelper()
	}
}

// closeHelper begins to close the helper, if there is one; the mutex is held.
func (cs *connections) closeHelper() {
	host := cs.host
	if host == nil {
		return
	}
	closing := make(chan struct{})
	cs.host, cs.closing = nil, closing
	cs.group.Go(func() {
		if err := host.close(); err != nil {
			cs.logger.Error("ending the root helper", "err", err)
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
