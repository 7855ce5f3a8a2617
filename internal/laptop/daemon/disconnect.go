package daemon

import (
	"cmp"
	"context"
	"errors"
	"maps"
	"slices"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
)

// disconnect ends the connections that req names, also failed ones, after the intercepts on them. It emits each end. If
// no connection is left, the helper has ended when disconnect returns.
func (cs *connections) disconnect(_ context.Context, req api.DisconnectRequest, emit func(api.Event)) error {
	ending, err := cs.named(req)
	if err != nil {
		return err
	}
	ids := api.Texts(ending, func(t *connectionTask) string { return t.id })
	var errs []error
	if err := cs.intercepts.leaveConnections(ids, emit); err != nil {
		errs = append(errs, err) // continue: the agents notice that the laptop has gone
	}
	cs.end(errStopped, ending...)
	cs.changed()
	for _, t := range ending {
		errs = append(errs, cs.reportEnd(t, emit))
	}
	cs.awaitClosed()
	return errors.Join(errs...)
}

// leave ends the connections to a cluster.
func (cs *connections) leave(ctx context.Context, ids client.IDs, emit func(api.Event)) error {
	var req api.DisconnectRequest
	cs.mu.Lock()
	for id, t := range cs.tasks {
		if t.cluster == ids.Cluster {
			req.IDs = append(req.IDs, id)
		}
	}
	cs.mu.Unlock()
	return cs.disconnect(ctx, req, func(e api.Event) {
		e.Connection, e.Intercept = nil, nil // the last event has the new one
		emit(e)
	})
}

// reportEnd waits until a connection has ended, and emits that. The error says what is left.
func (cs *connections) reportEnd(t *connectionTask, emit func(api.Event)) error {
	status := t.status()
	step := "Disconnecting from " + cmp.Or(status.Cluster, t.id)
	if !t.wasReady() {
		step = "Cleaning up"
	}
	emit(api.Event{Step: step, Detail: t.id})
	if len(cs.await(endTimeout, t)) > 0 {
		return api.Errorf(api.ExitUnexpected, "connection %s did not end in %v", t.id, endTimeout).
			WithHint("`kubevpn quit` ends the daemon and its helper, which removes everything")
	}
	if t.left != nil {
		return api.Errorf(api.ExitNetwork, "cannot remove the network of %s: %w", t.id, t.left).
			WithHint("the end of the root helper removes the rest: `kubevpn quit`")
	}
	status.Status = api.StatusDisconnecting
	emit(api.Event{Step: step, Detail: t.id, Done: true, Connection: &status})
	return nil
}

// awaitClosed waits for a helper that is being closed.
func (cs *connections) awaitClosed() {
	cs.mu.Lock()
	closing := cs.closing
	cs.mu.Unlock()
	if closing != nil {
		<-closing
	}
}

// named returns the connections that req names.
func (cs *connections) named(req api.DisconnectRequest) ([]*connectionTask, error) {
	cs.mu.Lock()
	defer cs.mu.Unlock()
	ids := req.IDs
	if req.All {
		ids = slices.Sorted(maps.Keys(cs.tasks))
	}
	var named []*connectionTask
	for _, id := range ids {
		t := cs.tasks[id]
		if t == nil {
			return nil, api.Errorf(api.ExitNotConnected, "no connection has the ID %s", id).
				WithHint("`kubevpn status` lists them")
		}
		named = append(named, t)
	}
	return named, nil
}

// shutDown ends all connections and the helper, and waits for them. No connection begins after it.
func (cs *connections) shutDown(emit func(api.Event)) error {
	cs.mu.Lock()
	cs.shut = true
	cs.stopMetrics()
	cs.discardPreparedLocked()
	cs.mu.Unlock()
	err := cs.disconnect(context.Background(), api.DisconnectRequest{All: true}, emit)
	cs.mu.Lock()
	cs.closeHelperLocked()
	cs.mu.Unlock()
	cs.awaitClosed()
	cs.discarded.Wait()
	return err
}
