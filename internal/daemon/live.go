package daemon

import (
	"context"
	"errors"

	"kubevpn/internal/api"
)

// live is a connection in the set, from the request on until it is gone.
type live struct {
	task
	id      string
	conn    Connection
	request api.ConnectRequest
	share   *share
	left    error          // why something of it could not be removed; read after done
	last    api.Connection // its status when it failed; guarded by set.mu
}

// status is the connection's, as far as it knows it itself.
func (l *live) status() api.Connection {
	c := l.conn.Status()
	c.ID = l.id
	return c
}

// await waits until nothing is left of the connection, and reports whether that happened in time.
func (s *set) await(l *live) bool {
	if l.task.await(endTimeout) {
		return true
	}
	s.logger.Error("the connection did not end in time", "connection", l.id, "timeout", endTimeout)
	return false
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
	if errors.Is(l.err, errDisconnected) || !l.wasReady() {
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
