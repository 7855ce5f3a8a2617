package daemon

import (
	"bytes"
	"context"
	"reflect"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/connection"
)

// preparedTime limits how long a preparation waits for its connection. The traffic manager ends a conn without a hello
// after 10 seconds.
const preparedTime = 8 * time.Second

// preparation is what a CLI has asked the daemon to open while it checks the API server itself. It holds a credential,
// so the daemon drops it when it expires.
type preparation struct {
	request api.ConnectRequest
	opens   *connection.Prepared
	expiry  *time.Timer
}

// prepare opens what the connection for req will need of the API server, unless the connection exists. The next connect
// of the same kubeconfig uses it.
func (cs *connections) prepare(_ context.Context, req api.ConnectRequest) (any, error) {
	ids, err := cs.factory.Identify(req.Kubeconfig)
	if err != nil {
		return nil, err
	}
	cs.mu.Lock()
	defer cs.mu.Unlock()
	if t := cs.tasks[ids.Connection]; cs.shut || t != nil && t.failed == nil || cs.otherUserLocked(ids) != nil {
		return nil, nil
	}
	opens, err := cs.factory.Prepare(req, cs.logger)
	if err != nil {
		return nil, err
	}
	cs.discardPreparedLocked()
	opens.Begin()
	p := &preparation{request: req, opens: opens}
	p.expiry = time.AfterFunc(preparedTime, func() {
		cs.mu.Lock()
		defer cs.mu.Unlock()
		if cs.prepared == p {
			cs.discardPreparedLocked()
		}
	})
	cs.prepared = p
	return nil, nil
}

// takePreparedLocked returns what was prepared for req, or nil.
func (cs *connections) takePreparedLocked(req api.ConnectRequest) *connection.Prepared {
	p := cs.prepared
	if p == nil || !bytes.Equal(p.request.Kubeconfig, req.Kubeconfig) ||
		p.request.ManagerNamespace != req.ManagerNamespace ||
		!reflect.DeepEqual(p.request.Credential, req.Credential) {
		return nil
	}
	p.expiry.Stop()
	cs.prepared = nil
	return p.opens
}

// discardPreparedLocked closes what no connection has taken.
func (cs *connections) discardPreparedLocked() {
	if p := cs.prepared; p != nil {
		p.expiry.Stop()
		cs.discarded.Go(p.opens.Close)
	}
	cs.prepared = nil
}
