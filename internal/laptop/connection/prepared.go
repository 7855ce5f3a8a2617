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
	dialed  chan struct{}   // closed when the port-forward is open, or has failed

	mu   sync.Mutex
	conn net.Conn // the port-forward, until somebody takes it
	err  error    // why it failed
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
		guessed: make(chan struct{}), dialed: make(chan struct{}),
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
	if conn, _ := p.take(); conn != nil {
		conn.Close()
	}
}

// dial opens the port-forward. first is the context of the first API request.
func (p *Prepared) dial(ctx, first context.Context) {
	defer close(p.dialed)
	p.guess.namespace, p.guess.pod = install.GuessPod(first, p.cluster, p.request.ManagerNamespace, p.request.Namespace)
	close(p.guessed)
	if p.guess.pod == "" {
		return
	}
	conn, err := p.pods.PortForward(ctx, p.guess.namespace, p.guess.pod, api.ManagerPort)
	p.mu.Lock()
	defer p.mu.Unlock()
	p.conn, p.err = conn, err
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
	for _, done := range []<-chan struct{}{p.guessed, p.dialed} {
		select {
		case <-done:
		case <-ctx.Done():
			return nil, context.Cause(ctx)
		}
		if p.guess != to {
			return nil, nil
		}
	}
	return p.take()
}

// take returns the port-forward, or the reason why there is none, once.
func (p *Prepared) take() (net.Conn, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	conn, err := p.conn, p.err
	p.conn, p.err = nil, nil
	return conn, err
}
