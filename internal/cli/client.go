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

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

const (
	// answerTimeout is how long the daemon may take for what it answers from memory.
	answerTimeout = 5 * time.Second
	// endTimeout is how long it may take to end connections, and the helper with them.
	endTimeout = time.Minute
)

var (
	errNoDaemon    = errors.New("no daemon is running")
	errNeedsHelper = errors.New("the daemon has no root helper")
)

// client speaks to this user's daemon.
type client struct {
	paths config.Paths
	http  *http.Client
}

func newClient(paths config.Paths) *client {
	dial := func(ctx context.Context, _, _ string) (net.Conn, error) {
		var d net.Dialer
		return d.DialContext(ctx, "unix", paths.Socket())
	}
	return &client{paths: paths, http: &http.Client{Transport: &http.Transport{DialContext: dial, DisableKeepAlives: true}}}
}

// do sends a request, whose body is JSON or an io.Reader of it, and returns the answer, whose body is the caller's to close. Errors: errNoDaemon where
// nobody listens, errNeedsHelper, the *api.Error that the daemon answered, or ctx's.
func (c *client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	// Requests hold credentials: the socket must be in a directory that nobody else could have made.
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
			return nil, fmt.Errorf("writing the request: %w", err)
		}
		content = bytes.NewReader(b)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://daemon"+path, content)
	if err != nil {
		return nil, fmt.Errorf("making the request: %w", err)
	}
	resp, err := c.http.Do(req)
	if err != nil {
		return nil, c.explain(ctx, err)
	}
	if resp.StatusCode == http.StatusOK {
		return resp, nil
	}
	defer resp.Body.Close()
	return nil, refusal(resp)
}

// refusal is the error that an answer other than 200 stands for.
func refusal(resp *http.Response) error {
	switch resp.StatusCode {
	case api.StatusNeedsHelper:
		return errNeedsHelper
	case http.StatusServiceUnavailable: // it is about to end
		return errNoDaemon
	}
	var e api.Error
	if err := json.NewDecoder(resp.Body).Decode(&e); err != nil || e.Message == "" {
		return api.Errorf(api.ExitDaemon, "the daemon answered %s", resp.Status).
			WithHint("it may be of another version: `kubevpn quit` ends it")
	}
	return &e
}

// explain turns a failed request into errNoDaemon, ctx's error, or one that says what to do.
func (c *client) explain(ctx context.Context, err error) error {
	switch {
	case errors.Is(err, syscall.ECONNREFUSED), errors.Is(err, fs.ErrNotExist):
		return errNoDaemon
	case errors.Is(err, syscall.ECONNRESET), errors.Is(err, syscall.EPIPE):
		return errNoDaemon // it ended before it had read all of this
	case errors.Is(ctx.Err(), context.Canceled):
		return ctx.Err()
	}
	hint := "`kubevpn logs` may tell why"
	if pid, err := os.ReadFile(c.paths.Lock()); err == nil && len(pid) > 0 {
		hint += "; `kill " + strings.TrimSpace(string(pid)) + "` ends it and everything that it made"
	}
	if errors.Is(err, context.DeadlineExceeded) {
		return api.Errorf(api.ExitDaemon, "the daemon does not answer").WithHint("%s", hint)
	}
	return api.Errorf(api.ExitDaemon, "speaking to the daemon: %w", err).WithHint("%s", hint)
}

// query gets what the daemon answers at once.
func query[T any](ctx context.Context, c *client, path string) (T, error) {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var v T
	resp, err := c.do(ctx, http.MethodGet, path, nil)
	if err != nil {
		return v, err
	}
	defer resp.Body.Close()
	if err := json.NewDecoder(resp.Body).Decode(&v); err != nil {
		return v, c.explain(ctx, err)
	}
	return v, nil
}

func (c *client) info(ctx context.Context) (api.DaemonInfo, error) {
	return query[api.DaemonInfo](ctx, c, api.PathDaemon)
}

func (c *client) status(ctx context.Context) (api.Status, error) {
	return query[api.Status](ctx, c, api.PathStatus)
}

const (
	beginTimeout = time.Second      // how long an interrupted request waits to be told what has begun
	cleanTimeout = 20 * time.Second // how long the daemon may take to clean up what was interrupted
)

// stream posts a request and passes the events of its answer on. It returns the last connection named, and the
// error that an event had.
func (c *client) stream(ctx context.Context, path string, body any, begin func(id string), on func(api.Event)) (*api.Connection, error) {
	request, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	answered := make(chan struct{})
	defer context.AfterFunc(ctx, func() {
		// The daemon may have begun already: whoever interrupts it must know what.
		select {
		case <-answered:
		case <-time.After(beginTimeout):
		}
		cancel()
	})()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	resp, err := c.do(request, http.MethodPost, path, body)
	close(answered)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	begin(resp.Header.Get(api.HeaderConnection))
	return c.follow(ctx, resp.Body, on)
}

// hold is stream for a request that the daemon keeps what it began for. When ctx ends it lets go, and passes on what the daemon
// does about that; it then returns ctx's error.
func (c *client) hold(ctx context.Context, path string, body any, on func(api.Event)) (*api.Connection, error) {
	text, err := json.Marshal(body)
	if err != nil {
		return nil, fmt.Errorf("writing the request: %w", err)
	}
	request, cancel := context.WithCancel(context.WithoutCancel(ctx))
	defer cancel()
	content, letGo := io.Pipe()
	defer letGo.Close()
	defer content.Close()
	go func() { _, _ = letGo.Write(text) }() // what fails is the request
	defer context.AfterFunc(ctx, func() {
		letGo.Close()
		select {
		case <-time.After(cleanTimeout):
			cancel()
		case <-request.Done():
		}
	})()
	if ctx.Err() != nil {
		return nil, ctx.Err()
	}
	resp, err := c.do(request, http.MethodPost, path, content)
	if err != nil {
		return nil, err
	}
	defer resp.Body.Close()
	last, err := c.follow(request, resp.Body, on)
	switch {
	case ctx.Err() == nil:
		return last, err
	case request.Err() != nil:
		return last, api.Errorf(api.ExitInterrupted, "interrupted, and cleaning up did not end in %v", cleanTimeout).
			WithHint("`kubevpn status` shows what is there; `kubevpn quit` ends it")
	}
	return last, ctx.Err()
}

// follow passes the events of an answer on. It returns the last connection named, and the error that an event had.
func (c *client) follow(ctx context.Context, answer io.Reader, on func(api.Event)) (*api.Connection, error) {
	var last *api.Connection
	for dec := json.NewDecoder(answer); ; {
		var e api.Event
		switch err := dec.Decode(&e); {
		case errors.Is(err, io.EOF):
			return last, nil
		case err != nil && ctx.Err() != nil:
			return last, c.explain(ctx, ctx.Err())
		case err != nil:
			return last, api.Errorf(api.ExitDaemon, "the daemon ended while it was at it").
				WithHint("`kubevpn logs` may tell why")
		}
		on(e)
		if e.Error != nil {
			return last, e.Error
		}
		if e.Connection != nil {
			last = e.Connection
		}
	}
}

// handOver gives the daemon the socket of a root helper.
func (c *client) handOver(ctx context.Context, socket *os.File) error {
	ctx, cancel := context.WithTimeout(ctx, answerTimeout)
	defer cancel()
	var d net.Dialer
	conn, err := d.DialContext(ctx, "unix", c.paths.HelperSocket())
	if err != nil {
		return c.explain(ctx, err)
	}
	defer conn.Close()
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if err := sendFile(conn.(*net.UnixConn), socket); err != nil {
		return c.explain(ctx, err)
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

// gone waits until no daemon is there any more.
func (c *client) gone(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, 2*answerTimeout)
	defer cancel()
	for {
		switch _, err := c.info(ctx); {
		case errors.Is(err, errNoDaemon):
			return nil
		case ctx.Err() != nil:
			return c.explain(ctx, ctx.Err())
		}
		pause(ctx, pollInterval)
	}
}

// pollInterval is how often something is looked at that nobody tells about.
const pollInterval = 20 * time.Millisecond

// pause waits, unless ctx ends.
func pause(ctx context.Context, d time.Duration) {
	select {
	case <-ctx.Done():
	case <-time.After(d):
	}
}
