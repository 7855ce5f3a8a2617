package podconn

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"os"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	apierrors "k8s.io/apimachinery/pkg/api/errors"

	"kubevpn/internal/api"
	"kubevpn/pkg/wire/nonblock"
)

// PodProxy opens a raw connection to a port of a pod through the API server's pods/proxy subresource, by an HTTP/1.1
// Upgrade to protocol at path, which begins with a slash:
//
//	laptop ── TLS ── API server ── TCP ── pod's address
//	  GET .../pods/NAME:PORT/proxy/ ──▶ GET / ──▶
//	  ◀──────────────────────────── 101 ◀──────     from here on the API server copies bytes
//
// The request carries header; the API server drops query strings. It ends both directions when either ends, so the
// net.Conn has no CloseWrite. ctx bounds only the dial.
//
// Errors contain the API server's message, and Explain recognizes them: a denied permission (apierrors.IsForbidden), a
// control plane that cannot reach the pod, or a proxy that blocks the upgrade.
func (d *Dialer) PodProxy(ctx context.Context, namespace, pod string, port uint16, path, protocol string,
	header http.Header) (net.Conn, error) {
	header = header.Clone()
	if header == nil {
		header = http.Header{}
	}
	header.Set("Connection", "Upgrade")
	header.Set("Upgrade", protocol)
	rw, raw, answer, err := d.upgrade.do(ctx, http.MethodGet, d.podProxyURL(namespace, pod, port, path), header)
	if err == nil && !strings.EqualFold(answer.Get("Upgrade"), protocol) {
		raw.Close()
		err = &upgradeError{status: http.StatusSwitchingProtocols,
			cause: fmt.Errorf("%w to %s: it answered with %q", errNoUpgrade, protocol, answer.Get("Upgrade"))}
	}
	if err != nil {
		return nil, &podProxyError{pod: namespace + "/" + pod, port: port, cause: err}
	}
	return &proxyConn{rw: rw, raw: raw, peer: proxyAddr{namespace + "/" + pod, port}}, nil
}

// podProxyURL keeps path's last slash: without any, the API server answers with a redirection.
func (d *Dialer) podProxyURL(namespace, pod string, port uint16, path string) *url.URL {
	return d.cluster.Kube().CoreV1().RESTClient().Get().Resource("pods").Namespace(namespace).
		Name(pod + ":" + strconv.Itoa(int(port))).SubResource("proxy").URL().JoinPath(path)
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

// silent matches the API server's message about a port that closes the connection instead of upgrading it.
var silent = regexp.MustCompile(`^((unexpected )?EOF|read tcp .*: connection reset by peer)$`)

// Explain returns the error for failures that only pods/proxy has, or nil.
func (e *podProxyError) Explain(apiServer string) *api.Error {
	var status apierrors.APIStatus
	switch {
	case errors.Is(e.cause, errNoUpgrade):
		return api.Errorf(api.ExitUnreachable, "a proxy or load balancer before %s blocks HTTP upgrades: %w", apiServer,
			errNoUpgrade).
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

// proxyConn is a connection that the API server has switched to another protocol. Read and Write may be called
// concurrently, each by one goroutine at a time.
type proxyConn struct {
	rw   io.ReadWriter
	raw  *nonblock.Batch // the same beneath TLS
	peer proxyAddr

	closed  atomic.Bool
	writeMu sync.Mutex
	failed  error // of the first Write that failed: part of it may be out
}

// Read implements net.Conn.
func (c *proxyConn) Read(p []byte) (int, error) {
	n, err := c.rw.Read(p)
	return n, c.error("read", err)
}

// Write sends p, however long, in one write to the kernel.
func (c *proxyConn) Write(p []byte) (int, error) {
	c.writeMu.Lock()
	defer c.writeMu.Unlock()
	if c.failed != nil {
		return 0, c.error("write", c.failed)
	}
	n, err := c.raw.Through(c.rw, p)
	c.failed = err
	return n, c.error("write", err)
}

// error gives err the form that users of a net.Conn know. An end without TLS's farewell is an end: the API server may
// not say one, and whatever is inside knows by itself whether it was complete.
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

// Close ends the connection. It does not wait for what was written to arrive.
func (c *proxyConn) Close() error {
	if c.closed.Swap(true) {
		return nil
	}
	return c.raw.Close()
}

// LocalAddr is the laptop's end of the TCP connection towards the API server.
func (c *proxyConn) LocalAddr() net.Addr { return c.raw.LocalAddr() }

// RemoteAddr is the pod's port.
func (c *proxyConn) RemoteAddr() net.Addr { return c.peer }

// SetDeadline sets both deadlines.
func (c *proxyConn) SetDeadline(t time.Time) error { return c.raw.SetDeadline(t) }

// SetReadDeadline bounds Reads, those that are waiting too. After it has passed, Read works again once it is moved.
func (c *proxyConn) SetReadDeadline(t time.Time) error { return c.raw.SetReadDeadline(t) }

// SetWriteDeadline bounds Writes, those that are waiting too. A Write that it cut leaves the connection unusable:
// part of a TLS record may be out.
func (c *proxyConn) SetWriteDeadline(t time.Time) error { return c.raw.SetWriteDeadline(t) }

// proxyAddr is a pod's port as a net.Addr.
type proxyAddr struct {
	pod  string // namespace/name
	port uint16
}

func (a proxyAddr) Network() string { return "api-proxy" }
func (a proxyAddr) String() string  { return a.pod + ":" + strconv.Itoa(int(a.port)) }
