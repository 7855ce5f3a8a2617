package daemon

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
)

// maxRequest limits the body of a request in bytes. A kubeconfig with embedded certificates is about 10 KB.
const maxRequest = 4 << 20

// handler is the daemon's HTTP interface. The permissions of the socket's directory, and listen, restrict it to this
// user.
func (d *daemon) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+api.PathPrepare, answering(d, d.connections.prepare))
	mux.HandleFunc("POST "+api.PathConnect, streaming(d, d.connections.connect))
	mux.HandleFunc("POST "+api.PathDisconnect, streaming(d, d.connections.disconnect))
	mux.HandleFunc("POST "+api.PathIntercept, streaming(d, d.connections.intercept))
	mux.HandleFunc("POST "+api.PathRequests, streaming(d, d.connections.intercepts.requests))
	mux.HandleFunc("POST "+api.PathLeave, streaming(d, d.connections.intercepts.leave))
	mux.HandleFunc("POST "+api.PathUp, streaming(d, d.projects.up))
	mux.HandleFunc("POST "+api.PathDown, streaming(d, d.projects.down))
	mux.HandleFunc("POST "+api.PathQuit, streaming(d, d.shutDown))
	mux.HandleFunc("POST "+api.PathTrace, answering(d, d.connections.intercepts.trace))
	mux.HandleFunc("POST "+api.PathPage, answering(d, d.servePage))
	mux.HandleFunc("GET "+api.PathStatus, func(w http.ResponseWriter, r *http.Request) {
		d.answer(w, http.StatusOK, d.status())
	})
	mux.HandleFunc("GET "+api.PathFlows, d.handleFlows)
	mux.HandleFunc("GET "+api.PathDNS, d.handleDNS)
	return d.counted(mux)
}

// counted counts the requests in progress, which keep the daemon running.
func (d *daemon) counted(h http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.requests.Add(1)
		defer func() {
			d.requests.Add(-1)
			d.recheck.Raise()
		}()
		h.ServeHTTP(w, r)
	})
}

func (d *daemon) status() api.Status {
	return api.Status{
		Version: version.Full(), Helper: d.connections.starter(), Connections: d.connections.status(),
		Intercepts: d.connections.intercepts.status(), Projects: d.projects.status(),
	}
}

// answering returns a handler that answers a request with the result of f.
func answering[T, A any](d *daemon, f func(ctx context.Context, req T) (A, error)) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req T
		if !d.read(w, r, maxRequest, &req) {
			return
		}
		if answer, err := f(r.Context(), req); err != nil {
			d.answer(w, http.StatusInternalServerError, api.AsError(err))
		} else {
			d.answer(w, http.StatusOK, answer)
		}
	}
}

// refuse sends an error: as an HTTP status if the response has not begun, else as the last event.
func (d *daemon) refuse(w http.ResponseWriter, s *stream, err error) {
	switch {
	case errors.Is(err, errNeedsHelper):
		d.answer(w, api.StatusNeedsHelper, api.Errorf(api.ExitPrivilege, "%w", err))
	case errors.Is(err, errEnding):
		d.answer(w, http.StatusServiceUnavailable, api.AsError(err))
	case !s.opened:
		d.answer(w, http.StatusInternalServerError, api.AsError(err))
	default:
		_ = s.line(api.Event{Error: api.AsError(err)})
	}
}

// streaming returns a handler that answers a request with the lines that serve emits. The client may interrupt the
// request: see untilReleased.
func streaming[T, L any](
	d *daemon, serve func(ctx context.Context, req T, emit func(L)) error,
) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		var req T
		if !d.read(w, r, maxRequest, &req) {
			return
		}
		ctx, done := d.untilReleased(w, r)
		defer done()
		s := &stream{w: w}
		// When the client has gone away, the request's context ends.
		if err := serve(ctx, req, func(line L) { _ = s.line(line) }); err != nil {
			d.refuse(w, s, err)
		}
	}
}

// untilReleased returns the request's context, which also ends when the client ends a body of unknown length after the
// request in it. The client can then still read the events of the cleanup, which it could not after closing the
// connection.
func (d *daemon) untilReleased(w http.ResponseWriter, r *http.Request) (ctx context.Context, done func()) {
	if r.ContentLength >= 0 {
		return r.Context(), func() {}
	}
	if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
		d.logger.Debug("cannot read the request while responding", "err", err)
	}
	ctx, cancel := context.WithCancel(r.Context())
	go func() { // ends with the body, which the server closes after the handler
		_, err := io.Copy(io.Discard, r.Body)
		d.logger.Debug("client released a request", "err", err)
		cancel()
	}()
	return ctx, cancel
}

func (d *daemon) shutDown(_ context.Context, _ struct{}, emit func(api.Event)) error {
	defer d.quit.Raise()
	return errors.Join(d.projects.shutDown(), d.connections.shutDown(emit))
}

// read decodes the request's body, if there is one, or answers with the error. Only a body of known length has nothing
// else: see untilReleased.
func (d *daemon) read(w http.ResponseWriter, r *http.Request, limit int64, into any) bool {
	if r.ContentLength == 0 {
		return true
	}
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, limit))
	err := dec.Decode(into)
	if err == nil && r.ContentLength > 0 && dec.More() {
		err = errors.New("unexpected data after the request")
	}
	if err != nil {
		d.answer(w, http.StatusBadRequest, api.Errorf(api.ExitUnexpected, "cannot read the request: %w", err))
		return false
	}
	return true
}

// answer writes one JSON value. It only logs an error, because the client has gone.
func (d *daemon) answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		d.logger.Debug("cannot respond", "err", err)
	}
}

// stream writes JSON lines and flushes each. The first one begins the response. Its methods are safe for
// concurrent use.
type stream struct {
	mu     sync.Mutex
	w      http.ResponseWriter
	opened bool
}

// line writes one line, and sets the time of an event that has none.
func (s *stream) line(v any) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if e, ok := v.(api.Event); ok {
		e.Time = cmp.Or(e.Time, time.Now())
		v = e
	}
	if !s.opened {
		s.opened = true
		s.w.Header().Set("Content-Type", "application/x-ndjson")
	}
	return errors.Join(json.NewEncoder(s.w).Encode(v), http.NewResponseController(s.w).Flush())
}
