package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"net/http"
	"os"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
)

// maxRequest bounds a request's body. A kubeconfig with certificates inside is about 10 KB.
const maxRequest = 4 << 20

// handler is the daemon's HTTP interface. Who reaches it was let in by the socket's directory and listen.
func (d *daemon) handler() http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("POST "+api.PathConnect, d.handleConnect)
	mux.HandleFunc("POST "+api.PathDisconnect, d.handleDisconnect)
	mux.HandleFunc("POST "+api.PathIntercept, d.handleIntercept)
	mux.HandleFunc("POST "+api.PathLeave, d.handleLeave)
	mux.HandleFunc("POST "+api.PathQuit, d.handleQuit)
	mux.HandleFunc("GET "+api.PathStatus, func(w http.ResponseWriter, r *http.Request) {
		d.answer(w, http.StatusOK, api.Status{
			Version: version.Full(), Connections: d.set.status(), Intercepts: d.set.intercepts.status(),
		})
	})
	mux.HandleFunc("GET "+api.PathDaemon, func(w http.ResponseWriter, r *http.Request) {
		connections, helper := d.set.counts()
		d.answer(w, http.StatusOK, api.DaemonInfo{
			Version: version.Full(), PID: os.Getpid(), Connections: connections, Helper: helper,
		})
	})
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		d.requests.Add(1)
		defer func() {
			d.requests.Add(-1)
			d.wake()
		}()
		mux.ServeHTTP(w, r)
	})
}

func (d *daemon) handleConnect(w http.ResponseWriter, r *http.Request) {
	var req api.ConnectRequest
	if !d.read(w, r, &req) {
		return
	}
	s := &stream{w: w}
	c, err := d.set.connect(r.Context(), req, func(id string) {
		w.Header().Set(api.HeaderConnection, id)
		s.open()
	}, s.send)
	if err != nil {
		d.refuse(w, s, err)
		return
	}
	s.send(api.Event{Time: time.Now(), Connection: &c})
}

// refuse answers an error: as a status of its own where nothing was answered yet, else as the last event.
func (d *daemon) refuse(w http.ResponseWriter, s *stream, err error) {
	switch {
	case errors.Is(err, errNeedsHelper):
		d.answer(w, api.StatusNeedsHelper, api.Errorf(api.ExitPrivilege, "%w", err))
	case errors.Is(err, errEnding):
		d.answer(w, http.StatusServiceUnavailable, api.AsError(err))
	case !s.opened:
		d.answer(w, http.StatusInternalServerError, api.AsError(err))
	default:
		s.send(api.Event{Time: time.Now(), Error: api.AsError(err)})
	}
}

func (d *daemon) handleIntercept(w http.ResponseWriter, r *http.Request) {
	var req api.InterceptRequest
	if err := json.NewDecoder(io.LimitReader(r.Body, maxRequest)).Decode(&req); err != nil {
		d.answer(w, http.StatusBadRequest, api.Errorf(api.ExitUnexpected, "reading the request: %w", err))
		return
	}
	ctx, done := d.untilLetGo(w, r)
	defer done()
	s := &stream{w: w}
	err := d.set.intercept(ctx, req, func(id string) {
		w.Header().Set(api.HeaderConnection, id)
		s.open()
	}, s.send)
	if err != nil {
		d.refuse(w, s, err)
	}
}

// untilLetGo is the request's context, which also ends when whoever asked lets go: by ending a body of unknown length, behind
// the request in it. It can then read what is done about that, which it could not if it just went away.
func (d *daemon) untilLetGo(w http.ResponseWriter, r *http.Request) (ctx context.Context, done func()) {
	if r.ContentLength >= 0 {
		return r.Context(), func() {}
	}
	if err := http.NewResponseController(w).EnableFullDuplex(); err != nil {
		d.logger.Debug("reading while answering", "err", err)
	}
	ctx, cancel := context.WithCancel(r.Context())
	go func() { // until the body ends; the server closes it behind the handler
		_, err := io.Copy(io.Discard, r.Body)
		d.logger.Debug("let go of a request", "err", err)
		cancel()
	}()
	return ctx, cancel
}

func (d *daemon) handleLeave(w http.ResponseWriter, r *http.Request) {
	var req api.LeaveRequest
	if !d.read(w, r, &req) {
		return
	}
	s := &stream{w: w}
	s.open()
	if err := d.set.intercepts.leave(req, s.send); err != nil {
		s.send(api.Event{Time: time.Now(), Error: api.AsError(err)})
	}
}

func (d *daemon) handleDisconnect(w http.ResponseWriter, r *http.Request) {
	var req api.DisconnectRequest
	if !d.read(w, r, &req) {
		return
	}
	s := &stream{w: w}
	s.open()
	if err := d.set.disconnect(req, s.send); err != nil {
		s.send(api.Event{Time: time.Now(), Error: api.AsError(err)})
	}
}

func (d *daemon) handleQuit(w http.ResponseWriter, r *http.Request) {
	s := &stream{w: w}
	s.open()
	if err := d.set.shutDown(s.send); err != nil {
		s.send(api.Event{Time: time.Now(), Error: api.AsError(err)})
	}
	select {
	case d.quit <- struct{}{}:
	default:
	}
}

// read decodes the request's body, or answers why it cannot.
func (d *daemon) read(w http.ResponseWriter, r *http.Request, into any) bool {
	dec := json.NewDecoder(http.MaxBytesReader(w, r.Body, maxRequest))
	err := dec.Decode(into)
	if err == nil && dec.More() {
		err = errors.New("there is more behind the request")
	}
	if err != nil {
		d.answer(w, http.StatusBadRequest, api.Errorf(api.ExitUnexpected, "reading the request: %w", err))
		return false
	}
	return true
}

// answer writes one JSON value. A peer that has gone away is no fault of ours, so it is only logged.
func (d *daemon) answer(w http.ResponseWriter, status int, body any) {
	w.Header().Set("Content-Type", "application/json")
	w.WriteHeader(status)
	if err := json.NewEncoder(w).Encode(body); err != nil {
		d.logger.Debug("answering", "err", err)
	}
}

// stream writes events as JSON lines, each at once. Its methods may be called concurrently.
type stream struct {
	mu     sync.Mutex
	w      http.ResponseWriter
	opened bool
}

// open sends the header.
func (s *stream) open() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.opened = true
	s.w.Header().Set("Content-Type", "application/x-ndjson")
	s.w.WriteHeader(http.StatusOK)
	s.flush()
}

// send writes one line. When the peer has gone away the request's context ends; that is seen there.
func (s *stream) send(e api.Event) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if json.NewEncoder(s.w).Encode(e) == nil {
		s.flush()
	}
}

func (s *stream) flush() {
	if f, ok := s.w.(http.Flusher); ok {
		f.Flush()
	}
}
