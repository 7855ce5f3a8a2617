package podconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"maps"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/nonblock"
)

// PodProxyOptions are the options of PodProxy.
type PodProxyOptions struct {
	Namespace, Pod string
	Port           uint16
	Path           string      // begins with a slash; the API server drops query strings
	Protocol       string      // of the upgrade
	Header         http.Header // of the request
}

// PodProxy opens a raw connection to a port of a pod through the API server's pods/proxy subresource, by an HTTP/1.1
// Upgrade:
//
//	laptop ── TLS ── API server ── TCP ── pod's address
//	  GET .../pods/NAME:PORT/proxy/ ──▶ GET / ──▶
//	  ◀──────────────────────────── 101 ◀──────     then the API server copies bytes
//
// The API server ends both directions when either ends, so the net.Conn has no CloseWrite. Only one goroutine may call
// its Read at a time, and one its Write. ctx limits only the dial.
//
// Errors contain the API server's message, and client.Explain recognizes them: a denied permission
// (apierrors.IsForbidden), a control plane that cannot reach the pod, or a proxy that blocks the upgrade.
func (d *Dialer) PodProxy(ctx context.Context, o PodProxyOptions) (net.Conn, error) {
	request := http.Header{"Connection": {"Upgrade"}, "Upgrade": {o.Protocol}}
	maps.Copy(request, o.Header)
	rw, raw, answer, err := d.upgrade.do(ctx, http.MethodGet, d.podProxyURL(o), request)
	if err == nil && !strings.EqualFold(answer.Get("Upgrade"), o.Protocol) {
		raw.Close()
		err = &upgradeError{status: http.StatusSwitchingProtocols,
			cause: fmt.Errorf("%w to %s: it answered with %q", errNoUpgrade, o.Protocol, answer.Get("Upgrade"))}
	}
	if err != nil {
		return nil, &podProxyError{pod: o.Namespace + "/" + o.Pod, port: o.Port, cause: err}
	}
	return &proxyConn{rw: rw, raw: raw, peer: podAddr{"api-proxy", o.Namespace + "/" + o.Pod, o.Port}}, nil
}

// podProxyURL keeps the path's last slash, without which the API server answers with a redirection.
func (d *Dialer) podProxyURL(o PodProxyOptions) *url.URL {
	return d.cluster.Kube().CoreV1().RESTClient().Get().Resource("pods").Namespace(o.Namespace).
		Name(o.Pod + ":" + strconv.Itoa(int(o.Port))).SubResource("proxy").URL().JoinPath(o.Path)
}

// podProxyError is the error of a connection through pods/proxy.
type podProxyError struct {
	pod   string // namespace/name
	port  uint16
	cause error
}

func (e *podProxyError) Error() string {
	return fmt.Sprintf("pods/proxy to port %d of pod %s: %v", e.port, e.pod, e.cause)
}

func (e *podProxyError) Unwrap() error { return e.cause }

// silent matches the API server's message about a port that closes the connection without an answer.
var silent = regexp.MustCompile(`^((unexpected )?EOF|read tcp .*: connection reset by peer)$`)

// Explain returns the error for the user if only pods/proxy fails that way, or nil.
func (e *podProxyError) Explain(apiServer string) *api.Error {
	var status apierrors.APIStatus
	switch {
	case errors.Is(e.cause, errNoUpgrade):
		return api.Errorf(api.ExitUnreachable, "a proxy or load balancer in front of %s blocks HTTP upgrades: %w",
			apiServer, errNoUpgrade).
			WithHint("It must forward the headers Connection and Upgrade.")
	case errors.As(e.cause, &status) && silent.MatchString(status.Status().Message):
		return api.Errorf(api.ExitUnreachable, "port %d of pod %s closed the connection without an answer", e.port,
			e.pod).
			WithHint("See the log of the program that listens there.")
	case errors.As(e.cause, &status) && status.Status().Code >= 500:
		return api.Errorf(api.ExitUnreachable, "%s cannot reach port %d of pod %s: %s", apiServer, e.port, e.pod,
			api.OneLine(status.Status().Message)).
			WithHint("In some clusters the control plane cannot reach pod addresses; " +
				"a NetworkPolicy may also block it.")
	}
	return nil
}

// proxyConn is a connection that the API server has switched to another protocol. Only one goroutine may call Read at a
// time, and one Write. The other methods are safe for concurrent use.
type proxyConn struct {
	rw     io.ReadWriter
	raw    *nonblock.Batch // the connection beneath TLS
	peer   podAddr
	closed atomic.Bool
	failed error // of the first Write that failed: a part of it may have been sent
}

// Read implements net.Conn.
func (c *proxyConn) Read(p []byte) (int, error) {
	n, err := c.rw.Read(p)
	return n, c.error("read", err)
}

// Write implements net.Conn. It sends p, of any length, in one system call.
func (c *proxyConn) Write(p []byte) (int, error) {
	if c.failed != nil {
		return 0, c.error("write", c.failed)
	}
	n, err := c.raw.Through(c.rw, p)
	c.failed = err
	return n, c.error("write", err)
}

// error converts err to the errors of package net. The end of the TCP connection counts as the end of the stream even
// without TLS's close_notify, which the API server may not send. The protocol inside detects what is missing.
func (c *proxyConn) error(op string, err error) error {
	switch {
	case err == nil || err == io.EOF:
		return err
	case c.closed.Load():
		err = net.ErrClosed
	case op == "read" && errors.Is(err, io.ErrUnexpectedEOF):
		return io.EOF
	case errors.Is(err, os.ErrDeadlineExceeded):
		err = os.ErrDeadlineExceeded
	default:
		return err
	}
	return &net.OpError{Op: op, Net: c.peer.Network(), Addr: c.peer, Err: err}
}

// Close implements net.Conn. It does not wait until the peer has received what was written.
func (c *proxyConn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	return c.raw.Close()
}

// LocalAddr returns the address of the TCP connection to the API server.
func (c *proxyConn) LocalAddr() net.Addr { return c.raw.LocalAddr() }

// RemoteAddr returns the pod's port.
func (c *proxyConn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline implements net.Conn.
func (c *proxyConn) SetDeadline(t time.Time) error { return c.raw.SetDeadline(t) }

// SetReadDeadline implements net.Conn. After a timeout, Read works again with a later deadline.
func (c *proxyConn) SetReadDeadline(t time.Time) error { return c.raw.SetReadDeadline(t) }

// SetWriteDeadline implements net.Conn. A Write that times out leaves the connection unusable, because a part of a TLS
// record may have been sent.
func (c *proxyConn) SetWriteDeadline(t time.Time) error { return c.raw.SetWriteDeadline(t) }
