package project

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"kubevpn/internal/api"
	"kubevpn/internal/config"
)

// The process that keeps a Set serves it on a socket in the runtime directory, which only its user can enter:
//
//	GET  /        ─▶ state
//	POST /apply   Project ─▶ messages, the last of which has Done
//	POST /down    ─▶ messages, the last of which has Done

// message is a line of the answer.
type message struct {
	Name  string     `json:"name,omitempty"`
	Text  string     `json:"text,omitempty"`
	Done  bool       `json:"done,omitempty"`
	Error *api.Error `json:"error,omitempty"`
}

// state is the answer to GET.
type state struct {
	Applied Project     `json:"applied"`
	Ended   []string    `json:"ended"`
	Shown   api.Project `json:"shown"`
}

const socketPrefix = "up-"

// SocketOf returns the socket for the project of a file.
func SocketOf(paths config.Paths, file string) string {
	return filepath.Join(paths.RuntimeDir, nameOf(file)+".sock")
}

// LogOf returns the file with the output of a project in the background.
func LogOf(paths config.Paths, file string) string {
	return filepath.Join(paths.StateDir, nameOf(file)+".log")
}

func nameOf(file string) string {
	sum := sha256.Sum256([]byte(file))
	return socketPrefix + hex.EncodeToString(sum[:6])
}

// Serve serves the Set until ctx ends or a client has ended it. log is the file with its output.
func (s *Set) Serve(ctx context.Context, l net.Listener, log string) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	mux := http.NewServeMux()
	mux.HandleFunc("GET /", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, state{Applied: s.project.Load(), Ended: s.ended(), Shown: s.status(log)})
	})
	mux.HandleFunc("POST /apply", func(w http.ResponseWriter, r *http.Request) {
		var p Project
		if err := json.NewDecoder(io.LimitReader(r.Body, maxFile)).Decode(&p); err != nil {
			http.Error(w, err.Error(), http.StatusBadRequest)
			return
		}
		answer(w, func(tell func(name, text string)) error { return s.Apply(r.Context(), p, tell) })
	})
	mux.HandleFunc("POST /down", func(w http.ResponseWriter, r *http.Request) {
		answer(w, func(tell func(name, text string)) error {
			defer end()
			return s.Down(context.WithoutCancel(r.Context()), tell)
		})
	})
	server := &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second}
	stopped := make(chan error, 1)
	context.AfterFunc(ctx, func() {
		last, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		stopped <- server.Shutdown(last)
	})
	if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
		return err
	}
	return <-stopped
}

// answer streams what do tells.
func answer(w http.ResponseWriter, do func(tell func(name, text string)) error) {
	control := http.NewResponseController(w)
	send := func(m message) { // a client that has gone, or does not read, holds up nothing
		_ = control.SetWriteDeadline(time.Now().Add(time.Second))
		writeJSON(w, m)
		_ = control.Flush()
	}
	err := do(func(name, text string) { send(message{Name: name, Text: text}) })
	send(message{Done: true, Error: api.AsError(err)})
}

func writeJSON(w io.Writer, v any) { _ = json.NewEncoder(w).Encode(v) } // as in answer

// Listen listens on the socket of a project. It fails with errRunning if another process does.
func Listen(ctx context.Context, paths config.Paths, file string) (net.Listener, error) {
	if err := paths.MakeRuntimeDir(); err != nil {
		return nil, err
	}
	socket := SocketOf(paths, file)
	c := Client{socket}
	if _, err := c.get(ctx); err == nil {
		return nil, api.Errorf(api.ExitConflict, "another process has just brought %s up", file).
			WithHint("`kubevpn up` changes what runs")
	}
	if err := os.Remove(socket); err != nil && !errors.Is(err, fs.ErrNotExist) { // of a process that was killed
		return nil, err
	}
	return net.Listen("unix", socket)
}

// Client talks to the process that keeps a Set.
type Client struct{ Socket string }

// ErrDown is the error of a Client if no process keeps the Set.
var ErrDown = errors.New("the project is not up")

// Projects returns the projects of this user that are up.
func Projects(ctx context.Context, paths config.Paths) (all []api.Project) {
	sockets, _ := filepath.Glob(filepath.Join(paths.RuntimeDir, socketPrefix+"*.sock")) // the pattern is valid
	for _, socket := range sockets {
		if s, err := (Client{socket}).get(ctx); err == nil { // else its process was killed
			all = append(all, s.Shown)
		}
	}
	return all
}

// Differences returns what Apply would do.
func (c Client) Differences(ctx context.Context, p *Project) ([]Difference, error) {
	s, err := c.get(ctx)
	if errors.Is(err, ErrDown) {
		err = nil
	}
	return Differences(&s.Applied, p, s.Ended), err
}

// Project returns the project as it is. It fails with ErrDown if no process keeps it.
func (c Client) Project(ctx context.Context) (api.Project, error) {
	s, err := c.get(ctx)
	return s.Shown, err
}

func (c Client) get(ctx context.Context) (s state, err error) {
	ctx, cancel := context.WithTimeout(ctx, 5*time.Second)
	defer cancel()
	err = c.do(ctx, http.MethodGet, "/", nil, func(d *json.Decoder) error { return d.Decode(&s) })
	return s, err
}

// Apply is Set.Apply in the other process.
func (c Client) Apply(ctx context.Context, p *Project, tell func(name, text string)) error {
	return c.stream(ctx, "/apply", p, tell)
}

// Down is Set.Down in the other process, which then ends.
func (c Client) Down(ctx context.Context, tell func(name, text string)) error {
	return c.stream(ctx, "/down", nil, tell)
}

func (c Client) stream(ctx context.Context, path string, body any, tell func(name, text string)) error {
	return c.do(ctx, http.MethodPost, path, body, func(d *json.Decoder) error {
		for {
			var m message
			switch err := d.Decode(&m); {
			case err != nil:
				return fmt.Errorf("the process that keeps the project has ended: %w", err)
			case m.Error != nil:
				return m.Error
			case m.Done:
				return nil
			}
			tell(m.Name, m.Text)
		}
	})
}

func (c Client) do(ctx context.Context, method, path string, body any, read func(*json.Decoder) error) error {
	text, err := json.Marshal(body)
	if err != nil {
		return err
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://up"+path, bytes.NewReader(text))
	if err != nil {
		return err
	}
	transport := &http.Transport{DialContext: func(ctx context.Context, _, _ string) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "unix", c.Socket)
	}}
	defer transport.CloseIdleConnections()
	answer, err := transport.RoundTrip(req)
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ECONNREFUSED) {
		return ErrDown
	}
	if err != nil {
		return err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		text, _ := io.ReadAll(io.LimitReader(answer.Body, 1<<10))
		return fmt.Errorf("the process that keeps the project: %s", bytes.TrimSpace(text))
	}
	return read(json.NewDecoder(answer.Body))
}
