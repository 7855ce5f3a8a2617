package cli

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"strings"
	"syscall"
	"time"

	"k8s.io/apimachinery/pkg/util/wait"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
	"kubevpn/pkg/host/unixsocket"
)

const (
	// answerTimeout limits a request that the daemon answers from memory.
	answerTimeout = 5 * time.Second
	// endTimeout limits a request that ends connections and the root helper.
	endTimeout = time.Minute
)

var (
	errNoDaemon    = errors.New("no daemon is running")
	errNeedsHelper = errors.New("the daemon has no root helper")
	errLostDaemon  = errors.New("the daemon closed the connection")
)

// client sends requests to the daemon of this user. Its methods are safe for concurrent use.
type daemonClient struct {
	paths config.Paths
	http  *http.Client
}

func newClient(paths config.Paths) *daemonClient {
	return &daemonClient{paths: paths, http: httpClient(paths, func() {})}
}

// httpClient returns a client that dials the daemon for each request. It calls closed when it closes the conn.
func httpClient(paths config.Paths, closed func()) *http.Client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		conn, err := d.DialContext(ctx, "unix", paths.Socket())
		if err != nil {
			return nil, err
		}
		return closingConn{conn, closed}, nil
	}
	return &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}
}

// closingConn is a conn that calls closed when it is closed.
type closingConn struct {
	net.Conn
	closed func()
}

func (c closingConn) Close() error {
	c.closed()
	return c.Conn.Close()
}

// do sends a request. body is nil, an io.Reader of JSON, or a value that do encodes as JSON. The caller closes the body
// of the response. Errors are errNoDaemon, errNeedsHelper, the *api.Error of the daemon, or the error of ctx.
func (c *daemonClient) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	// Requests contain credentials, so no other user may own the directory of the socket.
	if err := c.paths.CheckRuntimeDir(); errors.Is(err, fs.ErrNotExist) {
		return nil, errNoDaemon
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
		return errNoDaemon
	}
	var e api.Error
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Message == "" {
		return api.Errorf(api.ExitDaemon, "the daemon answered %s", resp.Status).
			WithHint("its version may differ; run `kubevpn quit` to stop it, then try again")
	}
	return &e
}

// explain returns the error for a failed request: errNoDaemon, the error of ctx, or an *api.Error with a hint.
func (c *daemonClient) explain(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return errNoDaemon
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE), errors.Is(err, net.ErrClosed):
		return errNoDaemon // it ended before it read the whole request
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

// query sends a GET request that the daemon answers from memory.
func query[T any](ctx context.Context, c *daemonClient, path string) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	return call[T](ctx, c, http.MethodGet, path, nil)
}

// call sends a request and returns its answer.
func call[T any](ctx context.Context, c *daemonClient, method, path string, body any) (answer T, err error) {
	resp, err := c.do(ctx, method, path, body)
	if err != nil {
		return answer, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&answer); err != nil {
		return answer, c.explain(ctx, err)
	}
	return answer, nil
}

func (c *daemonClient) info(ctx context.Context) (api.DaemonInfo, error) {
	return query[api.DaemonInfo](ctx, c, api.PathDaemon)
}

func (c *daemonClient) status(ctx context.Context) (api.Status, error) {
	return query[api.Status](ctx, c, api.PathStatus)
}

// trace announces a trace ID to the agents of all intercepts, and returns what they have noted.
func (c *daemonClient) trace(ctx context.Context, id string) ([]api.InterceptTrace, error) {
	return call[[]api.InterceptTrace](ctx, c, http.MethodPost, api.PathTrace, api.TraceRequest{Trace: id})
}

// cleanTimeout limits the cleanup after an interrupted request.
const cleanTimeout = 20 * time.Second

// post posts a request. It calls on with each event of the answer, and returns the error of the last one.
func (c *daemonClient) post(ctx context.Context, path string, body any, on func(api.Event)) error {
	resp, err := c.do(ctx, http.MethodPost, path, body)
	if err != nil {
		return err
	}
	defer resp.Body.Close()
	_, err = c.follow(ctx, resp.Body, on)
	return err
}

// hold is post for a request that needs a connection, until the daemon answers or, if the request is attached, as long
// as its body. It returns the connection of the last event that has one. When ctx ends, hold ends the body, calls on
// with the events of the cleanup, and returns the error of ctx.
func (c *daemonClient) hold(ctx context.Context, path string, body any, on func(api.Event)) (*api.Connection, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("cannot encode the request: %w", err)
	}
	request, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	content, release := io.Pipe()
	defer release.Close()
	defer content.Close()
	go func() { _, _ = release.Write(text) }() // an error also fails the request
	// If the daemon dies, net/http waits for the end of the body before it returns an error: that of the body.
	c = &daemonClient{paths: c.paths, http: httpClient(c.paths, func() { release.CloseWithError(errLostDaemon) })}
	defer context.AfterFunc(ctx, func() {
		release.Close()
		select {
		case <-time.After(cleanTimeout):
			cancel()
		case <-request.Done():
		}
	})()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	var last *api.Connection
	resp, err := c.do(request, http.MethodPost, path, content)
	if err == nil {
		defer resp.Body.Close()
		last, err = c.follow(request, resp.Body, func(e api.Event) {
			if e.Error == nil || ctx.Err() == nil { // the caller reports the interrupt
				on(e)
			}
		})
	}
	switch {
	case ctx.Err() == nil:
		return last, err
	case request.Err() != nil:
		return last, api.Errorf(api.ExitInterrupted, "interrupted, but cleanup did not finish within %v", cleanTimeout).
			WithHint("`kubevpn status` shows what remains; `kubevpn quit` removes it")
	}
	return last, ctx.Err()
}

// follow calls on with each event of a response. It returns the connection of the last event that has one that does not
// end, and the error of the event that has one.
func (c *daemonClient) follow(ctx context.Context, answer io.Reader, on func(api.Event)) (*api.Connection, error) {
	var last *api.Connection
	err := readLines(ctx, c, answer, func(e api.Event) error {
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

// readLines calls on with each JSON line of an answer, until the answer or ctx ends or on returns an error.
func readLines[T any](ctx context.Context, c *daemonClient, answer io.Reader, on func(T) error) error {
	for dec := json.NewDecoder(answer); ; {
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

// handOver sends the socket of a root helper to the daemon.
func (c *daemonClient) handOver(ctx context.Context, socket *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.paths.HelperSocket())
	if err != nil {
		return c.explain(ctx, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if _, err := unixsocket.Send(conn.(*net.UnixConn), []byte{0}, socket); err != nil {
		return c.explain(ctx, fmt.Errorf("cannot send the socket of the root helper: %w", err))
	}
	var answer *api.Error
	if err := json.NewDecoder(conn).Decode(&answer); err != nil {
		return c.explain(ctx, err)
	}
	if answer != nil {
		return answer
	}
	return nil
}

// gone waits until the daemon has ended.
func (c *daemonClient) gone(ctx context.Context) error {
	err := poll(ctx, 2*answerTimeout, func(ctx context.Context) (bool, error) {
		_, err := c.info(ctx)
		return errors.Is(err, errNoDaemon), nil
	})
	if err != nil {
		return c.explain(ctx, err)
	}
	return nil
}

// pollInterval is the pause between two checks of a condition that nothing signals.
const pollInterval = 20 * time.Millisecond

// poll calls check until it returns true or an error, or the time is over.
func poll(ctx context.Context, timeout time.Duration, check wait.ConditionWithContextFunc) error {
	return wait.PollUntilContextTimeout(ctx, pollInterval, timeout, true, check)
}

// followDaemon calls on with each line that the daemon answers to a GET request, until the daemon or ctx ends it.
// Ctrl-C is a regular end. Without a daemon, it calls on once with the zero T and errNoDaemon.
func followDaemon[T any](ctx context.Context, a *app, path string, on func(line T, err error) error) error {
	c, err := a.client()
	if err != nil {
		return err
	}
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	switch {
	case errors.Is(err, errNoDaemon):
		fmt.Fprintln(a.Errout, "not connected")
		var none T
		return on(none, err)
	case ctx.Err() != nil:
		return nil
	case err != nil:
		return err
	}
	defer resp.Body.Close()
	err = readLines(ctx, c, resp.Body, func(line T) error { return on(line, nil) })
	if ctx.Err() != nil {
		return nil
	}
	return err
}
