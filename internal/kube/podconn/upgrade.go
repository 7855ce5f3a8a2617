package podconn

import (
	"cmp"
	"context"
	"crypto/rand"
	"crypto/tls"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	corev1 "k8s.io/api/core/v1"
	apierrors "k8s.io/apimachinery/pkg/api/errors"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	constants "k8s.io/apimachinery/pkg/util/portforward"
	"k8s.io/client-go/transport"
	"k8s.io/streaming/pkg/httpstream"
	"k8s.io/streaming/pkg/httpstream/spdy"

	"kubevpn/internal/api"
	"kubevpn/internal/kube/client"
	"kubevpn/pkg/wire/nonblock"
)

// upgrader converts HTTP/1.1 requests to the API server into raw connections. client-go and net/http handle
// credentials, credential plugins, proxies and TLS, up to the answer "101 Switching Protocols".
type upgrader struct {
	cluster *client.Cluster

	once sync.Once // fills the fields below
	err  error
	auth *transport.Config
	tls  *tls.Config

	warm atomic.Pointer[warmConn] // for the next request; nil: none
}

// warmTime limits the life of a connection that waits for its request. Servers and load balancers wait longer.
const warmTime = 5 * time.Second

// warmConn is a connection to the API server on which no request was sent yet.
type warmConn struct {
	*tls.Conn
	raw    *nonblock.Batch // beneath TLS
	expiry *time.Timer
}

// warmUp opens a TLS connection for the next request. It opens none if a proxy is in front of the API server.
func (u *upgrader) warmUp(ctx context.Context) error {
	if err := u.prepare(); err != nil {
		return err
	}
	server, err := url.Parse(u.cluster.Server())
	if err != nil || server.Scheme != "https" {
		return err
	}
	if u.auth.Proxy != nil {
		if via, err := u.auth.Proxy(&http.Request{URL: server}); err != nil || via != nil {
			return err
		}
	}
	config, err := u.tlsConfig()
	if err != nil {
		return err
	}
	raw, err := u.dial(ctx, "tcp", net.JoinHostPort(server.Hostname(), cmp.Or(server.Port(), "443")))
	if err != nil {
		return err
	}
	config.ServerName = cmp.Or(config.ServerName, server.Hostname())
	c := &warmConn{Conn: tls.Client(raw, config), raw: raw}
	if err := c.HandshakeContext(ctx); err != nil {
		raw.Close()
		return err
	}
	c.expiry = time.AfterFunc(warmTime, func() { raw.Close() })
	if unused := u.warm.Swap(c); unused != nil {
		unused.raw.Close()
	}
	return nil
}

// takeWarm returns the connection that waits for a request, or nil.
func (u *upgrader) takeWarm() *warmConn {
	c := u.warm.Swap(nil)
	if c == nil || !c.expiry.Stop() {
		return nil
	}
	return c
}

// dial opens a TCP connection to the API server, or to a proxy.
func (u *upgrader) dial(ctx context.Context, network, address string) (*nonblock.Batch, error) {
	conn, err := u.cluster.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if tcp, ok := conn.(*net.TCPConn); ok {
		if conn, err = Tuned(tcp); err != nil {
			tcp.Close()
			return nil, err
		}
	}
	return nonblock.NewBatch(conn), nil
}

// upgradeError reports an answer other than 101.
type upgradeError struct {
	status int // of HTTP
	cause  error
}

func (e *upgradeError) Error() string { return "upgrading the connection: " + e.cause.Error() }
func (e *upgradeError) Unwrap() error { return e.cause }

// Explain returns the error for the user if the answer did not come from the API server, or nil.
func (e *upgradeError) Explain(apiServer string) *api.Error {
	if !errors.Is(e.cause, errNoUpgrade) {
		return nil
	}
	return api.Errorf(api.ExitUnreachable, "a proxy or load balancer in front of %s blocks port-forwards: %w",
		apiServer, errNoUpgrade).
		WithHint("It must forward WebSocket or SPDY upgrades; `kubectl port-forward` fails the same way.")
}

var errNoUpgrade = errors.New("the server, or a proxy in front of it, did not switch protocols")

func (u *upgrader) prepare() error {
	u.once.Do(func() {
		if u.auth, u.err = u.cluster.TransportConfig(); u.err != nil {
			return
		}
		if u.tls, u.err = transport.TLSConfigFor(u.auth); u.err != nil {
			return
		}
		if u.tls == nil {
			u.tls = &tls.Config{MinVersion: tls.VersionTLS12}
		}
		u.tls = u.tls.Clone()
		u.tls.NextProtos = []string{"http/1.1"} // an upgrade needs it
		u.tls.ClientSessionCache = tls.NewLRUClientSessionCache(4)
	})
	return u.err
}

// tlsConfig returns the configuration of one connection. It resumes no TLS session while a credential plugin provides
// the client certificate: in a resumed session the server sees the certificate with which the session began.
func (u *upgrader) tlsConfig() (*tls.Config, error) {
	config := u.tls.Clone()
	if u.auth.HasCertCallback() {
		cert, err := u.auth.TLS.GetCertHolder.GetCert()
		if err != nil {
			return nil, err
		}
		if cert != nil {
			config.ClientSessionCache = nil
		}
	}
	return config, nil
}

// do sends the request. It returns the connection that the server has switched to another protocol, the same connection
// beneath TLS, and the header of the answer. Closing the second one frees everything. ctx limits only the request.
func (u *upgrader) do(ctx context.Context, method string, target *url.URL,
	header http.Header) (io.ReadWriter, *nonblock.Batch, http.Header, error) {
	if err := u.prepare(); err != nil {
		return nil, nil, nil, err
	}
	config, err := u.tlsConfig()
	if err != nil {
		return nil, nil, nil, err
	}
	// A transport for one request: its dialer stores the connection beneath TLS, which net/http does not return.
	var raw atomic.Pointer[nonblock.Batch]
	hop := &http.Transport{
		Proxy:             u.auth.Proxy,
		TLSClientConfig:   config,
		DisableKeepAlives: true,
		DialContext: func(ctx context.Context, network, address string) (net.Conn, error) {
			batch, err := u.dial(ctx, network, address)
			if err != nil {
				return nil, err
			}
			raw.Store(batch)
			return batch, nil
		},
	}
	warm := u.takeWarm()
	if warm != nil {
		raw.Store(warm.raw)
		hop.DialTLSContext = func(context.Context, string, string) (net.Conn, error) { return warm.Conn, nil }
	}
	rt, err := transport.HTTPWrappersForConfig(u.auth, hop)
	if err != nil {
		return nil, nil, nil, err
	}
	req, err := http.NewRequestWithContext(ctx, method, target.String(), nil)
	if err != nil {
		return nil, nil, nil, err
	}
	req.Header = header
	resp, err := rt.RoundTrip(req)
	if err != nil {
		if warm != nil {
			warm.raw.Close() // the request may have failed before it got a connection
		}
		return nil, nil, nil, err
	}
	if resp.StatusCode != http.StatusSwitchingProtocols {
		defer resp.Body.Close()
		if ctx.Err() != nil { // a server can answer while the connection closes
			return nil, nil, nil, ctx.Err()
		}
		return nil, nil, nil, &upgradeError{status: resp.StatusCode, cause: answerError(resp)}
	}
	body, ok := resp.Body.(io.ReadWriter)
	if !ok || raw.Load() == nil {
		resp.Body.Close()
		return nil, nil, nil, fmt.Errorf("cannot upgrade the connection: a transport wrapper of type %T hides it", rt)
	}
	return body, raw.Load(), resp.Header, nil
}

// unsent limits the unsent bytes that the kernel holds for one connection. A longer queue would only add latency.
const unsent = 128 << 10

// Tuned returns tcp with a short send queue, and with BBR if the kernel has it and permits it to this user. Over a line
// that loses one packet in a thousand, a congestion control that reacts to each loss carries a tenth of what BBR does.
func Tuned(tcp *net.TCPConn) (net.Conn, error) {
	conn, err := nonblock.NewConn(tcp)
	if err != nil {
		return nil, err
	}
	if err := conn.LimitUnsent(unsent); err != nil {
		return nil, err
	}
	if err := conn.SetCongestion("bbr"); err != nil && !errors.Is(err, syscall.ENOENT) &&
		!errors.Is(err, syscall.EPERM) {
		return nil, err
	}
	return conn, nil
}

// answerError returns the error that an answer of the API server contains.
func answerError(resp *http.Response) error {
	text, err := io.ReadAll(io.LimitReader(resp.Body, 64<<10))
	if err != nil {
		return fmt.Errorf("reading the answer %s: %w", resp.Status, err)
	}
	var status metav1.Status
	if json.Unmarshal(text, &status) == nil && status.Kind == "Status" {
		return &apierrors.StatusError{ErrStatus: status}
	}
	if resp.StatusCode < 300 {
		return fmt.Errorf("%w (%s)", errNoUpgrade, resp.Status)
	}
	return apierrors.NewGenericServerResponse(resp.StatusCode, resp.Request.Method, corev1.Resource("pods"), "",
		strings.TrimSpace(string(text)), 0, true)
}

// webSocketLink requests SPDY inside a WebSocket (Kubernetes 1.30 and later).
func (u *upgrader) webSocketLink(ctx context.Context, target *url.URL) (link, *nonblock.Batch, error) {
	var nonce [16]byte
	rand.Read(nonce[:])
	key := base64.StdEncoding.EncodeToString(nonce[:])
	rw, raw, answer, err := u.do(ctx, http.MethodGet, target, http.Header{
		"Connection":             {"Upgrade"},
		"Upgrade":                {"websocket"},
		"Sec-Websocket-Version":  {"13"},
		"Sec-Websocket-Key":      {key},
		"Sec-Websocket-Protocol": {constants.WebsocketsSPDYTunnelingPortForwardV1},
	})
	if err != nil {
		return nil, nil, err
	}
	switch {
	case !strings.EqualFold(answer.Get("Upgrade"), "websocket"), answer.Get("Sec-Websocket-Accept") != acceptKey(key):
		err = errNoUpgrade
	case answer.Get("Sec-Websocket-Protocol") != constants.WebsocketsSPDYTunnelingPortForwardV1:
		err = fmt.Errorf("%w: the WebSocket subprotocol is %q", errNoUpgrade, answer.Get("Sec-Websocket-Protocol"))
	}
	if err != nil {
		raw.Close()
		return nil, nil, &upgradeError{status: http.StatusSwitchingProtocols, cause: err}
	}
	return newWebSocket(rw), raw, nil
}

// spdyLink requests plain SPDY, which every Kubernetes supports, but not every proxy.
func (u *upgrader) spdyLink(ctx context.Context, target *url.URL) (link, *nonblock.Batch, error) {
	rw, raw, answer, err := u.do(ctx, http.MethodPost, target, http.Header{
		httpstream.HeaderConnection:      {httpstream.HeaderUpgrade},
		httpstream.HeaderUpgrade:         {spdy.HeaderSpdy31},
		httpstream.HeaderProtocolVersion: {constants.PortForwardV1Name},
	})
	if err != nil {
		return nil, nil, err
	}
	if !strings.EqualFold(answer.Get(httpstream.HeaderUpgrade), spdy.HeaderSpdy31) {
		raw.Close()
		return nil, nil, &upgradeError{status: http.StatusSwitchingProtocols, cause: errNoUpgrade}
	}
	return bufferedLink(rw), raw, nil
}

// tryOther reports whether the other protocol may work after err. It does not if the answer is about the pod or the
// credentials, or if the server cannot be reached.
func tryOther(err error) bool {
	var up *upgradeError
	if errors.As(err, &up) {
		return up.status != http.StatusUnauthorized && up.status != http.StatusTooManyRequests &&
			!(up.status == http.StatusNotFound && apierrors.IsNotFound(err))
	}
	// A middlebox may close a protocol that it does not know.
	return errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, syscall.ECONNRESET) ||
		errors.Is(err, errWebSocket) || errors.Is(err, errSPDY)
}
