package client

import (
	"context"
	"errors"
	"net"
	"sync"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/pkg/host/route"
)

// answerTime is the time in which the API server must answer after the network has changed.
const answerTime = time.Second

// Follow closes the connections of Kube's requests that this machine's network no longer carries, until ctx ends. It
// looks each time the channel of moved is closed: at the local addresses, and whether the API server answers a request
// within answerTime. Otherwise HTTP/2 would use a dead connection for up to 45 seconds. Follow returns ctx's error.
func (c *Cluster) Follow(ctx context.Context, moved func() <-chan struct{}) error {
	for next := moved(); ; {
		select {
		case <-next:
		case <-ctx.Done():
			return ctx.Err()
		}
		next = moved()
		now, gone := time.Now(), route.GoneAddress()
		c.conns.closeIf(func(conn *apiConn) bool { return gone(conn.LocalAddr()) })
		bounded, cancel := context.WithTimeout(ctx, answerTime)
		err := c.kube.CoreV1().RESTClient().Get().AbsPath("/version").Do(bounded).Error()
		cancel()
		if status := apierrors.APIStatus(nil); err != nil && !errors.As(err, &status) {
			c.log.Info("closing the connections of API requests", "err", err)
			c.conns.closeIf(func(conn *apiConn) bool { return conn.opened.Before(now) })
		}
	}
}

// apiConns are the connections of API requests. They are safe for concurrent use.
type apiConns struct {
	dialer *dialer
	open   sync.Map // the keys are *apiConn
}

// apiConn is one of apiConns.
type apiConn struct {
	net.Conn
	all    *apiConns
	opened time.Time
}

func (a *apiConns) DialContext(ctx context.Context, network, address string) (net.Conn, error) {
	conn, err := a.dialer.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	c := &apiConn{conn, a, time.Now()}
	a.open.Store(c, nil)
	return c, nil
}

func (c *apiConn) Close() error {
	c.all.open.Delete(c)
	return c.Conn.Close()
}

// closeIf closes the connections for which dead returns true.
func (a *apiConns) closeIf(dead func(*apiConn) bool) {
	for key := range a.open.Range {
		if c := key.(*apiConn); dead(c) {
			c.Close()
		}
	}
}
