package cluster

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"net"
	"net/url"
	"time"

	corev1 "k8s.io/api/core/v1"
)

// Protocol is how a port-forward goes through the API server.
type Protocol int32

const (
	AnyProtocol       Protocol = iota // the first that works, SPDY before WebSocket
	WebSocketProtocol                 // SPDY inside a WebSocket; Kubernetes 1.30 and later
	SPDYProtocol                      // SPDY itself; every Kubernetes, but not every proxy
)

// String is what `kubevpn status` shows.
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

// unproven bounds the first port-forward with a protocol that has not worked yet, where another can be tried.
const unproven = 5 * time.Second

var schemaPods = corev1.SchemeGroupVersion.WithResource("pods")

// PortForward connects to a TCP port of a pod through the API server, over a connection of its own. It
// returns when the container runtime has accepted the stream; whether the port accepts shows in the first
// Read, which otherwise gives a *RefusedError.
//
// It tries SPDY first, WebSocket where a proxy in between does not let that through, and begins the next time with
// what worked. Both reach the same pods, as what a WebSocket carries is SPDY; without the WebSocket the API server
// carries a fifth to a half more. It writes WebSocket frames of 4 KiB, each in a TLS record of its own.
// ctx bounds the dial only. The net.Conn also has CloseWrite.
func (c *Cluster) PortForward(ctx context.Context, namespace, pod string, port uint16) (net.Conn, error) {
	return eitherWay(ctx, c, func(ctx context.Context, how Protocol) (net.Conn, error) {
		return c.portForward(ctx, how, namespace, pod, port)
	})
}

// eitherWay opens something with the protocol that works.
func eitherWay[T any](ctx context.Context, c *Cluster, open func(context.Context, Protocol) (T, error)) (T, error) {
	var none T
	first := Protocol(c.worked.Load())
	if first == AnyProtocol {
		first = SPDYProtocol
	}
	if c.options.Protocol != AnyProtocol {
		return open(ctx, c.options.Protocol)
	}
	tryCtx, cancel := ctx, func() {}
	if c.worked.Load() == int32(AnyProtocol) { // a proxy may keep silent about what it does not understand
		tryCtx, cancel = context.WithTimeout(ctx, c.silence)
	}
	conn, err := open(tryCtx, first)
	silent := err != nil && tryCtx.Err() != nil
	cancel()
	if err == nil || ctx.Err() != nil || !silent && !tryOther(err) {
		return conn, err
	}
	conn, otherErr := open(ctx, first.other())
	if otherErr != nil {
		c.log.Debug("port-forward failed both ways", "first", first, "error", err, "otherError", otherErr)
		if first == SPDYProtocol && !silent { // the SPDY server's words are about the pod, not about the upgrade
			return none, err
		}
		return none, otherErr
	}
	c.log.Debug("port-forward fell back", "from", first, "error", err)
	return conn, nil
}

func (c *Cluster) portForward(ctx context.Context, how Protocol, namespace, pod string, port uint16) (net.Conn, error) {
	l, raw, err := c.forwardLink(ctx, how, namespace, pod)
	if err != nil {
		return nil, err
	}
	conn, err := openPort(ctx, l, raw, podAddr{namespace + "/" + pod, port})
	if err != nil {
		raw.Close()
		return nil, fmt.Errorf("port-forward to pod %s/%s: %w", namespace, pod, err)
	}
	c.worked.Store(int32(how))
	return conn, nil
}

// forwardLink is a port-forward on which no port was named yet.
func (c *Cluster) forwardLink(ctx context.Context, how Protocol, namespace, pod string) (l link, raw net.Conn, err error) {
	target := c.podURL(namespace, pod)
	if how == WebSocketProtocol {
		l, raw, err = c.upgrade.webSocketLink(ctx, target)
	} else {
		l, raw, err = c.upgrade.spdyLink(ctx, target)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("port-forward to pod %s/%s: %w", namespace, pod, err)
	}
	return l, raw, nil
}

func (c *Cluster) podURL(namespace, pod string) *url.URL {
	return c.kube.CoreV1().RESTClient().Post().
		Resource("pods").Namespace(namespace).Name(pod).SubResource("portforward").URL()
}

// Transport says how the latest port-forward went: "port-forward (websocket)", "port-forward (spdy)", or ""
// before the first.
func (c *Cluster) Transport() string { return Protocol(c.worked.Load()).String() }

// bufferedLink reads SPDY's small headers through a buffer.
func bufferedLink(rw io.ReadWriter) link {
	return rawLink{struct {
		io.Reader
		io.Writer
	}{bufio.NewReaderSize(rw, readBuffer), rw}}
}
