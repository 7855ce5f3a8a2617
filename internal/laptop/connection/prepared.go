package connection

import (
	"context"
	"log/slog"
	"net"
	"sync"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/install"
	"kubevpn/internal/kube/podconn"
)

// Prepared opens what a connection needs of the API server, before the connection has verified anything. Over a slow
// line, the round trips for it then take no time of their own:
//
//	Begin ─┬─▶ the HTTP/2 connection of all API requests ─▶ a pod that looks like the traffic manager's ─┐
//	       └─▶ a TLS connection for the upgrade ─────────────────────────────────────────────────────────┴─▶ port-forward
//
// The connection uses the port-forward only if it finds the same pod, and sends nothing through it before it has
// verified the traffic manager. The methods are safe for concurrent use.
type Prepared struct {
	request api.ConnectRequest
	log     *slog.Logger
	cluster *client.Cluster
	pods    *podconn.Dialer
	cancel  context.CancelFunc
	begin   func()          // calls run once
	running sync.WaitGroup  // run
	opened  <-chan struct{} // closed when API requests share a connection
	guessed chan struct{}   // closed when guess is set
	guess   podName         // zero: no pod was found
	forward chan forwarded  // the port-forward, until somebody takes it; closed when there is no other
}

// forwarded is a port-forward, or why it failed.
type forwarded struct {
	conn net.Conn
	err  error
}

// podName names a pod.
type podName struct{ namespace, pod string }

// Prepare returns a Prepared for the request. It opens no network connection: Begin does. Errors are *api.Error.
func Prepare(request api.ConnectRequest, logger *slog.Logger) (*Prepared, error) {
	c, err := client.Load(request.Kubeconfig, client.Options{Logger: logger, Credential: request.Credential})
	if err != nil {
		return nil, err
	}
	return newPrepared(request, c, logger), nil
}

func newPrepared(request api.ConnectRequest, c *client.Cluster, logger *slog.Logger) *Prepared {
	ctx, cancel := context.WithCancel(context.Background())
	first, opened := client.Opening(ctx)
	p := &Prepared{
		request: request, log: logger, cluster: c, pods: podconn.New(c), cancel: cancel, opened: opened,
		guessed: make(chan struct{}), forward: make(chan forwarded, 1),
	}
	p.begin = sync.OnceFunc(func() {
		p.running.Go(func() {
			if err := p.pods.Warm(ctx); err != nil {
				p.log.Debug("no connection ahead of the upgrade", "err", err)
			}
		})
		p.running.Go(func() { p.dial(ctx, first) })
	})
	return p
}

// Begin begins to open. Only the first call has an effect.
func (p *Prepared) Begin() { p.begin() }

// Close closes what nobody has taken, and idle connections to the API server.
func (p *Prepared) Close() {
	p.cancel()
	p.running.Wait()
	defer p.cluster.Release()
	select {
	case f := <-p.forward:
		if f.conn != nil {
			f.conn.Close()
		}
	default: // Begin was not called
	}
}

// dial opens the port-forward. first is the context of the first API request.
func (p *Prepared) dial(ctx, first context.Context) {
	defer close(p.forward)
	p.guess.namespace, p.guess.pod = install.GuessPod(first, p.cluster, p.request.ManagerNamespace, p.request.Namespace)
	close(p.guessed)
	if p.guess.pod == "" {
		return
	}
	conn, err := p.pods.PortForward(ctx, p.guess.namespace, p.guess.pod, api.ManagerPort)
	p.forward <- forwarded{conn, err}
}

// open waits until API requests share a connection, or the first one has failed. Without the wait, each of many at once
// would open a connection of its own.
func (p *Prepared) open(ctx context.Context) error {
	select {
	case <-p.opened:
	case <-p.guessed:
	case <-ctx.Done():
		return ctx.Err()
	}
	return nil
}

// portForward returns the port-forward to the pod, or why it failed. The caller owns it. It returns nil and no error if
// there is none to this pod, or somebody has taken it.
func (p *Prepared) portForward(ctx context.Context, to podName) (net.Conn, error) {
	select {
	case <-p.guessed:
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
	if p.guess != to {
		return nil, nil
	}
	select {
	case f := <-p.forward: // zero if it is closed
		return f.conn, f.err
	case <-ctx.Done():
		return nil, context.Cause(ctx)
	}
}
