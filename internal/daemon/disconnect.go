package daemon

import (
	"cmp"
	"errors"
	"maps"
	"slices"
	"time"

	"kubevpn/internal/api"
)

// disconnect ends the connections with these IDs, or all, the intercepts on them first, and says so. It knows failed
// ones too. If the last connection is among them, the helper has ended when it returns.
func (s *set) disconnect(req api.DisconnectRequest, emit func(api.Event)) error {
	ls, err := s.named(req)
	if err != nil {
		return err
	}
	var ids []string
	for _, l := range ls {
		ids = append(ids, l.id)
	}
	var errs []error
	if err := s.intercepts.leaveConnections(ids, emit); err != nil {
		errs = append(errs, err) // it goes on: they miss the laptop by themselves
	}
	s.endAll(ls)
	for _, l := range ls {
		status := l.conn.Status()
		step := disconnecting(status, l.id)
		emit(api.Event{Time: time.Now(), Step: step, Detail: l.id})
		if !s.await(l) {
			errs = append(errs, api.Errorf(api.ExitUnexpected, "connection %s did not end in %v", l.id, endTimeout).
				WithHint("`kubevpn quit` ends the daemon and its helper, which removes everything"))
			continue
		}
		if l.left != nil {
			errs = append(errs, api.Errorf(api.ExitNetwork, "removing the network of %s: %w", l.id, l.left).
				WithHint("what is left goes when the root helper ends: `kubevpn quit`"))
			continue
		}
		status.Status = api.StatusDisconnecting
		emit(api.Event{Time: time.Now(), Step: step, Detail: l.id, Done: true, Connection: &status})
	}
	s.awaitClosed()
	return errors.Join(errs...)
}

// awaitClosed waits for a machine that is being closed.
func (s *set) awaitClosed() {
	s.mu.Lock()
	closing := s.closing
	s.mu.Unlock()
	if closing != nil {
		<-closing
	}
}

// named returns the connections that req names.
func (s *set) named(req api.DisconnectRequest) ([]*live, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	var ls []*live
	for _, id := range req.IDs {
		l := s.byID[id]
		if l == nil {
			return nil, api.Errorf(api.ExitNotConnected, "no connection has the ID %s", id).WithHint("`kubevpn status` lists them")
		}
		ls = append(ls, l)
	}
	if req.All {
		ls = slices.SortedFunc(maps.Values(s.byID), func(a, b *live) int { return cmp.Compare(a.id, b.id) })
	}
	return ls, nil
}

// endAll begins the end of connections, and forgets those that have failed.
func (s *set) endAll(ls []*live) {
	s.mu.Lock()
	defer s.changed()
	defer s.mu.Unlock()
	for _, l := range ls {
		switch {
		case l.failed == nil:
			l.end(errDisconnected)
		case s.byID[l.id] == l:
			delete(s.byID, l.id)
		}
	}
}

// shutDown ends everything, the helper too, and waits for it. No connection begins after it.
func (s *set) shutDown(emit func(api.Event)) error {
	s.mu.Lock()
	s.shut = true
	s.mu.Unlock()
	err := s.disconnect(api.DisconnectRequest{All: true}, emit)
	s.mu.Lock()
	s.closeMachine()
	s.mu.Unlock()
	s.awaitClosed()
	return err
}
