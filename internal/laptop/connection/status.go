package connection

import (
	"log/slog"
	"slices"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
)

// maxWarnings limits the warnings of one connection. Some contain networks that the cluster states, so their number
// has no other limit.
const maxWarnings = 100

// status holds the output of `kubevpn status` for a connection, and reports the steps and warnings of `kubevpn
// connect`. It is safe for concurrent use.
type status struct {
	log         *slog.Logger
	progress    func(api.Event)
	established chan struct{} // closed when the first probe has passed
	report      wakeup.Value[report]
}

// report is the state of a connection as its parts report it. Each part writes fields of its own.
type report struct {
	shown       api.Connection
	warned      map[string]bool
	established bool // the first probe has passed
	attached    bool // the transport has a session with a link that is up
	greeted     bool // a manager has greeted this laptop on that session
	gateway     bool // that manager has a gateway, which serves the addresses of this laptop's lease
}

func newStatus(cfg *Config, shown api.Connection) *status {
	s := &status{log: cfg.Logger, progress: cfg.Progress, established: make(chan struct{})}
	s.report.Update(func(r *report) { *r = report{shown: shown, warned: map[string]bool{}} })
	return s
}

// snapshot returns a copy of what is shown.
func (s *status) snapshot() api.Connection {
	c := s.report.Load().shown
	c.CIDRs, c.Checks, c.Warnings = slices.Clone(c.CIDRs), slices.Clone(c.Checks), slices.Clone(c.Warnings)
	return c
}

// change changes the report, and then assesses whether packets can travel now.
func (s *status) change(f func(*report)) {
	s.report.Update(func(r *report) {
		f(r)
		r.assess()
	})
}

// assess updates the shown status of a connection whose probe has passed. Before that, the steps say what happens.
func (r *report) assess() {
	switch {
	case !r.established, r.shown.Status == api.StatusFailed, r.shown.Status == api.StatusDisconnecting:
	case !r.attached || !r.greeted:
		r.shown.Status = api.StatusReconnecting // the transport has reported the cause
	case r.shown.Netstack == api.NetstackSystem && !r.gateway:
		r.shown.Status = api.StatusReconnecting
		r.shown.Error = api.Errorf(api.ExitNetstack,
			"the gateway in the traffic manager's pod is gone; waiting for another")
	default:
		r.shown.Status, r.shown.Error = api.StatusConnected, nil
	}
}

// establish marks the connection as connected: the first probe has passed.
func (s *status) establish() {
	s.change(func(r *report) {
		r.shown.Since, r.established = time.Now(), true
		close(s.established)
	})
}

// netstack returns the netstack in use; empty before the choice.
func (s *status) netstack() string { return s.report.Load().shown.Netstack }

// reconnecting reports whether packets cannot travel now.
func (s *status) reconnecting() bool { return s.report.Load().shown.Status == api.StatusReconnecting }

// step reports that a step begins. The returned function reports its end.
func (s *status) step(format string, args ...any) (done func(format string, args ...any)) {
	return api.BeginStep(s.progress, s.log, format, args...)
}

// warn shows each warning once, and keeps it in the status.
func (s *status) warn(warnings ...string) {
	for _, w := range warnings {
		added := false
		s.report.Update(func(r *report) {
			if added = !r.warned[w] && len(r.warned) < maxWarnings; added {
				r.warned[w] = true
				r.shown.Warnings = append(r.shown.Warnings, w)
			}
		})
		if added {
			s.log.Warn(w)
			s.progress(api.Event{Time: time.Now(), Warning: w})
		}
	}
}

// withdraw removes a warning from the status. If it comes again, it is shown again.
func (s *status) withdraw(warning string) {
	s.report.Update(func(r *report) {
		delete(r.warned, warning)
		r.shown.Warnings = slices.DeleteFunc(slices.Clone(r.shown.Warnings), func(w string) bool {
			return w == warning
		})
	})
}
