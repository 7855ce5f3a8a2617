package daemon

import (
	"context"
	"errors"
	"time"

	"kubevpn/internal/api"
)

// live is a connection in the set, from the request on until it is gone.
type live struct {
	id      string
	conn    Connection
	request api.ConnectRequest
	share   *share
	feed    *feed
	cancel  context.CancelCauseFunc
	done    chan struct{} // closed when Run has returned and nothing is left of it
	err     error         // why it ended; read after done
	left    error         // why something of it could not be removed; read after done

	// Guarded by set.mu.
	waiters int            // requests that wait for it to be connected
	ending  bool           // cancel was called
	failed  *api.Error     // it ended by itself after it had been connected
	last    api.Connection // its status when it failed
}

func (l *live) wasConnected() bool { return isClosed(l.conn.Connected()) }

func isClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// follow passes the connection's events on until it is connected (nil), has ended (why), or ctx ends.
func (l *live) follow(ctx context.Context, emit func(api.Event)) error {
	for i := 0; ; {
		// In this order: what was said before the end is read before the end is seen.
		ended, connected := isClosed(l.done), l.wasConnected()
		events, more := l.feed.since(i)
		for _, e := range events {
			emit(e)
		}
		i += len(events)
		switch {
		case ended && errors.Is(l.err, errDisconnected):
			return api.Errorf(api.ExitLost, "another command ended the connection")
		case ended:
			return l.err
		case connected:
			return nil
		}
		select {
		case <-more:
		case <-l.done:
		case <-l.conn.Connected():
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// end cancels the connection; set.mu is held.
func (l *live) end(cause error) {
	l.ending = true
	l.cancel(cause)
}

// await waits until nothing is left of the connection, and reports whether that happened in time.
func (s *set) await(l *live) bool {
	timeout := time.NewTimer(endTimeout)
	defer timeout.Stop()
	select {
	case <-l.done:
		return true
	case <-timeout.C:
		s.logger.Error("the connection did not end in time", "connection", l.id, "timeout", endTimeout)
		return false
	}
}

// run is the life of a connection.
func (s *set) run(ctx context.Context, l *live) {
	s.logger.Info("connection begins", "connection", l.id, "context", l.request.Context, "namespace", l.request.Namespace)
	s.tasks.Go(func() { // nobody waits for what is said later
		select {
		case <-l.conn.Connected():
			l.feed.close()
		case <-ctx.Done():
		}
	})
	err := l.conn.Run(ctx)
	l.err = s.verdict(ctx, l, err)
	if l.left = l.share.close(); l.left != nil {
		s.logger.Error("removing what a connection left", "connection", l.id, "err", l.left)
	}
	s.ended(l)
}

// verdict is why a connection ended: errDisconnected if it was asked to, else an *api.Error.
func (s *set) verdict(ctx context.Context, l *live, err error) error {
	switch {
	case isClosed(l.share.machine.helper.Done()):
		return errHelperEnded() // whatever Run saw is a consequence
	case errors.Is(context.Cause(ctx), errDisconnected):
		if err != nil && !errors.Is(err, context.Canceled) {
			s.logger.Warn("connection ended with an error", "connection", l.id, "err", err)
		}
		return errDisconnected
	case ctx.Err() != nil:
		return context.Cause(ctx)
	case err == nil:
		return api.Errorf(api.ExitLost, "the session ended").WithHint("run `kubevpn connect` again; `kubevpn logs` has the details")
	}
	return api.AsError(err)
}

// ended takes the connection out of the set, or keeps it as failed, and closes the helper after the last one.
func (s *set) ended(l *live) {
	s.mu.Lock()
	if errors.Is(l.err, errDisconnected) || !l.wasConnected() {
		delete(s.byID, l.id)
	} else {
		l.failed, l.last = api.AsError(l.err), l.conn.Status()
	}
	s.logger.Info("connection ended", "connection", l.id, "reason", l.err)
	l.feed.close()
	l.cancel(nil)
	close(l.done)
	s.closeUnused()
	s.mu.Unlock()
	s.changed()
}
