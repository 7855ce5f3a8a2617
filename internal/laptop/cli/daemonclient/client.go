package daemonclient

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"os"
	"strings"
	"sync/atomic"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

const (
	// answerTimeout limits a request that the daemon answers from memory.
	answerTimeout = 5 * time.Second
	// endTimeout limits a request that ends connections and the root helper.
	endTimeout = time.Minute
)

// ErrNoDaemon is the error of requests if no daemon runs.
var ErrNoDaemon = errors.New("no daemon is running")

var (
	errNeedsHelper = errors.New("the daemon has no root helper")
	errLostDaemon  = errors.New("the daemon closed the connection")
)

// Config says where the daemon listens, and how to start it and the root helper.
type Config struct {
	Locate     func() (config.Paths, error) // its error is that of each request
	Executable string                       // absolute path of this program; "" if unknown
	Environ    []string
	// StartHelper starts the root helper and returns its socket, which the caller owns. It calls announce with lines
	// for the user.
	StartHelper func(ctx context.Context, announce func(line string)) (*os.File, error)
	Announce    func(line string)
	Log         *slog.Logger
}

// Client sends requests to the daemon of this user, which may not run. Its methods are safe for concurrent use. Errors
// are ErrNoDaemon, an *api.Error, or the error of the context.
type Client struct {
	cfg      Config
	paths    config.Paths
	pathsErr error
	http     *http.Client
}

// New returns a client. It sends nothing.
func New(cfg Config) *Client {
	paths, err := cfg.Locate()
	return &Client{cfg: cfg, paths: paths, pathsErr: err, http: httpClient(paths, func() {})}
}

// httpClient returns a client that dials the daemon for each request. It calls closed when it closes the conn.
func httpClient(paths config.Paths, closed func()) *http.Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", paths.Socket())
		if err != nil {
			return nil, err
		}
		return &answeredConn{Conn: conn, closed: closed}, nil
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
}

// answeredConn is a conn whose end the reads report, and not the writes: a daemon that has answered may close it before
// the client has sent the end of the request, and net/http would return the error of that write instead of the answer.
type answeredConn struct {
	net.Conn
	closed func() // called by Close
	broken atomic.Bool
}

func (c *answeredConn) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	if errors.Is(err, syscall.EPIPE) {
		c.broken.Store(true)
		return len(p), nil
	}
	return n, err
}

func (c *answeredConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if err == io.EOF && c.broken.Load() {
		err = syscall.EPIPE
	}
	return n, err
}

func (c *answeredConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// do sends a request. body is nil, an io.Reader of JSON, or a value that do encodes as JSON. The caller closes the body
// of the response. Errors are ErrNoDaemon, errNeedsHelper, the *api.Error of the daemon, or the error of ctx.
func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	// Requests contain credentials, so no other user may own the directory of the socket.
	if err := cmp.Or(c.pathsErr, c.paths.CheckRuntimeDir()); errors.Is(err, fs.ErrNotExist) {
		return nil, ErrNoDaemon
	} else if err != nil {
		return nil, err
	}
	var content io.Reader = http.NoBody
	switch body := body.(type) {
	case nil:
	case io.Reader:
		content = body
	default:
		b, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("cannot encode the request: %w", err)
		}
		content = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://daemon"+path, content)
	if err != nil {
		return nil, fmt.Errorf("cannot create the request: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(ctx, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, statusError(resp)
}

// statusError returns the error of a response whose status is not 200.
func statusError(resp *http.Response) error {
	switch resp.StatusCode {
	case api.StatusNeedsHelper:
		return errNeedsHelper
	case http.StatusServiceUnavailable: // the daemon is about to end
		return ErrNoDaemon
	}
	var e api.Error
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Message == "" {
		return api.Errorf(api.ExitDaemon, "the daemon answered %s", resp.Status).
			WithHint("its version may differ; run `kubevpn quit` to stop it, then try again")
	}
	return &e
}

// explain returns the error for a failed request: ErrNoDaemon, the error of ctx, or an *api.Error with a hint.
func (c *Client) explain(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return ErrNoDaemon
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, net.ErrClosed):
		return ErrNoDaemon // it ended before it read the whole request
	case errors.Is(ctx.Err(), context.Canceled):
		return ctx.Err()
	}
	hint := "see `kubevpn logs` for the cause"
	if pid, err := os.ReadFile(c.paths.Lock()); err == nil && len(pid) > 0 {
		hint += "; `kill " + strings.TrimSpace(string(pid)) +
			"` stops the daemon and removes everything that it created"
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return api.Errorf(api.ExitDaemon, "the daemon does not answer").WithHint("%s", hint)
	}
	return api.Errorf(api.ExitDaemon, "cannot communicate with the daemon: %w", err).WithHint("%s", hint)
}

// query is call for a request that the daemon answers from memory.
func query[T any](ctx context.Context, c *Client, method, path string, body any) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	return call[T](ctx, c, method, path, body)
}

// call sends a request and returns its answer.
func call[T any](ctx context.Context, c *Client, method, path string, body any) (answer T, err error) {
	err = lines(ctx, c, method, path, body, func(line T) error {
		answer = line
		return nil
	})
	return answer, err
}

// Status returns the connections and intercepts.
func (c *Client) Status(ctx context.Context) (api.Status, error) {
	return query[api.Status](ctx, c, http.MethodGet, api.PathStatus, nil)
}

// Page asks the daemon to begin or to end its page.
func (c *Client) Page(ctx context.Context, req api.PageRequest) (api.Page, error) {
	return query[api.Page](ctx, c, http.MethodPost, api.PathPage, req)
}

// Trace announces a trace ID to the agents of all intercepts, and returns what they have noted.
func (c *Client) Trace(ctx context.Context, id string) ([]api.InterceptTrace, error) {
	return call[[]api.InterceptTrace](ctx, c, http.MethodPost, api.PathTrace, api.TraceRequest{Trace: id})
}

// Disconnect ends connections. It calls on with each event.
func (c *Client) Disconnect(ctx context.Context, req api.DisconnectRequest, on func(api.Event)) error {
	return c.end(ctx, api.PathDisconnect, req, on)
}

// Leave ends intercepts and clones. It calls on with each event.
func (c *Client) Leave(ctx context.Context, req api.LeaveRequest, on func(api.Event)) error {
	return c.end(ctx, api.PathLeave, req, on)
}

// Requests calls on with the records of an intercept, until they end, ctx ends or on returns an error.
func (c *Client) Requests(ctx context.Context, req api.RequestsRequest, on func(*api.Record) error) error {
	err := lines(ctx, c, http.MethodPost, api.PathRequests, req, func(r api.Record) error {
		if r.Error != nil {
			return r.Error
		}
		return on(&r)
	})
	if errors.Is(err, ErrNoDaemon) {
		return api.Errorf(api.ExitWorkload, "%s is not intercepted from this machine", req.Workload).
			WithHint("`kubevpn proxy` intercepts a workload")
	}
	return err
}

// Follow calls on with each line of the answer to a GET request, until the daemon ends it or on returns an error. The
// end of ctx is a regular end.
func Follow[T any](ctx context.Context, c *Client, path string, on func(T) error) error {
	err := lines(ctx, c, http.MethodGet, path, nil, on)
	if ctx.Err() != nil {
		return nil
	}
	return err
}

// end posts a request that ends connections, intercepts or the daemon. It calls on with each event of the answer, and
// returns the error of the last one.
func (c *Client) end(ctx context.Context, path string, body any, on func(api.Event)) error {
	ctx, cancel := context.WithTimeout(ctx, endTimeout)
	defer cancel()
	_, err := c.follow(ctx, path, body, on)
	return err
}

// follow posts a request, and calls on with each event of the answer. It returns the connection of the last event that
// has one that does not end, and the error of the event that has one.
func (c *Client) follow(ctx context.Context, path string, body any, on func(api.Event)) (*api.Connection, error) {
	var last *api.Connection
	err := lines(ctx, c, http.MethodPost, path, body, func(e api.Event) error {
		on(e)
		if e.Error != nil {
			return e.Error
		}
		if e.Connection != nil && e.Connection.Status != api.StatusDisconnecting {
			last = e.Connection
		}
		return nil
	})
	return last, err
}

// lines sends a request, and calls on with each JSON line of the answer, until the answer or ctx ends or on returns an
// error.
func lines[T any](ctx context.Context, c *Client, method, path string, body any, on func(T) error) error {
	resp, err := c.do(ctx, method, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	for dec := json.NewDecoder(resp.Body); ; {
		var line T
		switch err := dec.Decode(&line); {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil && ctx.Err() != nil:
			return c.explain(ctx, ctx.Err())
		case err != nil:
			return api.Errorf(api.ExitDaemon, "the daemon ended before it completed the request").
				WithHint("see `kubevpn logs` for the cause")
		}
		if err := on(line); err != nil {
			return err
		}
	}
}
