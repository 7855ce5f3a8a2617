package podconn

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/url"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wire/nonblock"
)

// Protocol is the protocol of a port-forward through the API server.
type Protocol int32

const (
	AnyProtocol       Protocol = iota // the first that works, SPDY before WebSocket
	WebSocketProtocol                 // SPDY inside a WebSocket; Kubernetes 1.30 and later
	SPDYProtocol                      // SPDY itself; every Kubernetes, but not every proxy
)

// String returns the text that `kubevpn status` shows.
func (p Protocol) String() string {
	switch p {
	case WebSocketProtocol:
		return "port-forward (websocket)"
	case SPDYProtocol:
		return "port-forward (spdy)"
	}
	return ""
}

func (p Protocol) other() Protocol {
	if p == SPDYProtocol {
		return WebSocketProtocol
	}
	return SPDYProtocol
}

// firstTimeout limits the first attempt of a Dialer, with a protocol that has not worked yet.
const firstTimeout = 5 * time.Second

// Dialer connects to pods through the API server of one cluster, with the user's credentials. It is safe for concurrent
// use.
type Dialer struct {
	cluster *client.Cluster
	log     *slog.Logger
	upgrade *upgrader
	worked  atomic.Int32  // the Protocol of the latest port-forward
	timeout time.Duration // firstTimeout; tests shorten it
}

// New returns a Dialer for the cluster. It opens no connection.
func New(c *client.Cluster) *Dialer {
	return &Dialer{cluster: c, log: c.Logger(), upgrade: &upgrader{cluster: c}, timeout: firstTimeout}
}

// PortForward connects to a TCP port of a pod through the API server, over a TCP connection of its own. It returns when
// the container runtime has accepted the stream. If the port refuses, the first Read returns a *RefusedError.
//
// PortForward tries SPDY first and falls back to WebSocket, which some proxies require. The next call begins with the
// protocol that worked. Both reach the same pods, because the WebSocket carries SPDY. Plain SPDY downloads up to a
// third faster: the API server writes WebSocket frames of 4 KiB, each in a TLS record of its own.
//
// ctx limits only the dial. The net.Conn also has CloseWrite. Only one goroutine may call its Read at a time.
func (d *Dialer) PortForward(ctx context.Context, namespace, pod string, port uint16) (net.Conn, error) {
	conn, err := d.tryProtocols(ctx, func(ctx context.Context, how Protocol) (*podConn, error) {
		return d.portForward(ctx, how, namespace, pod, &opener{port: port})
	})
	if err != nil {
		return nil, err
	}
	return conn, nil
}

// Warm opens a connection to the API server that the next call of the Dialer uses, if that comes within a few seconds.
// It opens none if a proxy is in front of the API server.
func (d *Dialer) Warm(ctx context.Context) error { return d.upgrade.warmUp(ctx) }

// tryProtocols calls open with the protocol that worked last, and falls back to the other one.
func (d *Dialer) tryProtocols(ctx context.Context,
	open func(context.Context, Protocol) (*podConn, error)) (*podConn, error) {
	first, tryCtx, cancel := Protocol(d.worked.Load()), ctx, func() {}
	if first == AnyProtocol { // a proxy may never answer a protocol that it does not know
		first = SPDYProtocol
		tryCtx, cancel = context.WithTimeout(ctx, d.timeout)
	}
	conn, err := open(tryCtx, first)
	silent := err != nil && tryCtx.Err() != nil
	cancel()
	if err == nil || ctx.Err() != nil || !silent && !tryOther(err) {
		return conn, err
	}
	conn, otherErr := open(ctx, first.other())
	if otherErr != nil {
		d.log.Debug("port-forward failed with both protocols", "first", first, "error", err, "otherError", otherErr)
		if first == SPDYProtocol && !silent { // this error is about the pod; the other one is about the upgrade
			return nil, err
		}
		return nil, otherErr
	}
	d.log.Debug("port-forward fell back", "from", first, "error", err)
	return conn, nil
}

func (d *Dialer) portForward(ctx context.Context, how Protocol, namespace, pod string, o *opener) (*podConn, error) {
	l, raw, err := d.forwardLink(ctx, how, namespace, pod)
	if err != nil {
		return nil, err
	}
	conn, err := openPort(ctx, l, raw, podAddr{"port-forward", namespace + "/" + pod, o.port}, o)
	if err != nil {
		raw.Close()
		return nil, fmt.Errorf("port-forward to pod %s/%s: %w", namespace, pod, err)
	}
	d.worked.Store(int32(how))
	return conn, nil
}

// forwardLink opens a port-forward without streams. Closing raw closes it.
func (d *Dialer) forwardLink(ctx context.Context, how Protocol, namespace,
	pod string) (l link, raw *nonblock.Batch, err error) {
	target := d.podURL(namespace, pod)
	if how == WebSocketProtocol {
		l, raw, err = d.upgrade.webSocketLink(ctx, target)
	} else {
		l, raw, err = d.upgrade.spdyLink(ctx, target)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("port-forward to pod %s/%s: %w", namespace, pod, err)
	}
	return l, raw, nil
}

func (d *Dialer) podURL(namespace, pod string) *url.URL {
	return d.cluster.Kube().CoreV1().RESTClient().Post().
		Resource("pods").Namespace(namespace).Name(pod).SubResource("portforward").URL()
}

// Transport returns the protocol of the latest port-forward: "port-forward (websocket)", "port-forward (spdy)", or ""
// before the first.
func (d *Dialer) Transport() string { return Protocol(d.worked.Load()).String() }

// DialPod calls PortForward and explains its errors. The error is ctx's or an *api.Error, with client.ErrPodGone in
// its chain if the pod no longer exists.
func (d *Dialer) DialPod(ctx context.Context, namespace, pod string, port uint16) (net.Conn, error) {
	conn, err := d.PortForward(ctx, namespace, pod, port)
	if apierrors.IsNotFound(err) {
		return nil, client.PodGone(namespace, pod)
	}
	if err != nil {
		return nil, d.cluster.ExplainContext(ctx, err)
	}
	return conn, nil
}

// bufferedLink reads SPDY's small headers through a buffer.
func bufferedLink(rw io.ReadWriter) link {
	return rawLink{bufio.NewReaderSize(rw, readBuffer), rw}
}

// Try opens a port-forward to a pod by one protocol, without a stream, and closes it. It shows whether the path to the
// API server allows the protocol.
func (d *Dialer) Try(ctx context.Context, how Protocol, namespace, pod string) error {
	_, raw, err := d.forwardLink(ctx, how, namespace, pod)
	if err != nil {
		return err
	}
	return raw.Close()
}
