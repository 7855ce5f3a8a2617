package daemon

import (
	"context"
	"os"
	"time"

	"kubevpn/internal/api"
)

// Helper does what only root may do. internal/helper has two: a client of the helper process, and one that
// does it in this process. Its methods may be called concurrently.
type Helper interface {
	// CreateTUN returns a new TUN device's descriptor; the device goes when its last descriptor is closed.
	CreateTUN(ctx context.Context, name string, mtu int) (*os.File, error)
	// Apply makes the machine's network as state says, and nothing else of it.
	Apply(ctx context.Context, state api.NetworkState) (api.NetworkApplied, error)
	// MarkedSocket returns an unconnected socket that the redirect of DNS queries lets pass. network is udp4,
	// udp6, tcp4 or tcp6.
	MarkedSocket(ctx context.Context, network string) (*os.File, error)
	// Changes gives what applies now, whenever that changes by itself: another network's nameservers. It holds
	// the latest only, and is not closed.
	Changes() <-chan api.NetworkApplied
	// Done is closed when the helper has ended, by Close too.
	Done() <-chan struct{}
	// Close removes everything that Apply made and ends the helper.
	Close() error
}

func errHelperEnded() *api.Error {
	return api.Errorf(api.ExitLost, "the root helper ended").
		WithHint("it was killed, or its sudo was; run `kubevpn connect` again")
}

// The life of the machine in a set:
//
//	         adopt                       last connection ended, or nothing came within linger
//	(none) ─────────▶ held ──▶ in use ──────────────────────────────────────────────────────▶ closing ──▶ (none)
//	                    └─────────┴── the helper ends: its connections end with errHelperEnded ──▶ closing

// adopt makes h the helper of this daemon. Where there is one already, h is closed: two commands may have
// started one at the same time, and either is as good.
func (s *set) adopt(h Helper) error {
	for {
		s.mu.Lock()
		if s.closing == nil {
			break
		}
		closing := s.closing
		s.mu.Unlock()
		<-closing
	}
	if s.machine != nil || s.shut {
		s.mu.Unlock()
		return h.Close()
	}
	m := newMachine(h, s.logger)
	m.placed = s.placed
	s.machine, s.held = m, true
	unheld := time.AfterFunc(s.linger, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.machine == m {
			s.held = false
			s.closeUnused()
		}
	})
	s.mu.Unlock()
	s.logger.Info("root helper is there")
	s.tasks.Go(func() {
		m.watch()
		unheld.Stop()
		s.helperEnded(m)
	})
	s.changed()
	return nil
}

// helperEnded ends what used m, unless it was closed on purpose.
func (s *set) helperEnded(m *machine) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.machine != m {
		return
	}
	s.logger.Error("root helper ended by itself")
	for _, l := range s.byID {
		if l.failed == nil && l.share.machine == m {
			l.end(errHelperEnded())
		}
	}
	s.closeMachine()
}

// closeUnused closes the helper if no connection needs it; s.mu is held.
func (s *set) closeUnused() {
	if !s.held && s.active() == 0 {
		s.closeMachine()
	}
}

// closeMachine begins to close the machine, if there is one; s.mu is held.
func (s *set) closeMachine() {
	m := s.machine
	if m == nil {
		return
	}
	closing := make(chan struct{})
	s.machine, s.closing = nil, closing
	s.tasks.Go(func() {
		if err := m.close(); err != nil {
			s.logger.Error("ending the root helper", "err", err)
		} else {
			s.logger.Info("root helper has ended")
		}
		s.mu.Lock()
		s.closing = nil
		s.mu.Unlock()
		close(closing)
		s.changed()
	})
}
