//go:build linux

// Package supervisor is PID 1 of a container of a clone that receives files from a laptop. It runs the container's own
// command, writes the files as the container's user and in its file system, and restarts the command for them.
//
//	laptop ── pods/exec ──▶ traffic sync ── unix socket ──▶ traffic supervise ─┬─▶ files
//	                        (in the container)              PID 1              └─▶ the command: restarted
//
// The socket is in a volume that no other container mounts, and the API server authorizes exec. So nothing listens on
// the pod's network, and no key is needed.
//
// The states of the command:
//
//	waiting for the first files of all directories ──▶ running
//
//	running ── new files, --restart ──▶ SIGTERM ── 5 s ──▶ SIGKILL ──▶ running
//	   │
//	   └── ended by itself ──▶ waiting: 1 s, 2 s, ... 30 s, or new files ──▶ running
//
// The command does not start before the first files have arrived, because it would run the image's version.
// A command that runs once (--once), such as that of a CronJob, is not restarted after success: only new files do so,
// and without --restart the supervisor ends too.
//
// The supervisor survives its command because a restarted container has the files of the image again.
package supervisor

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"kubevpn/internal/process/files"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/authlistener"
	"kubevpn/pkg/wire/remotefs"
)

const (
	stopGrace    = 5 * time.Second // between SIGTERM and SIGKILL when the command is restarted
	backoffFirst = time.Second     // after a command that ended by itself
	backoffMost  = 30 * time.Second
	steady       = 10 * time.Second // a command that ran this long resets the backoff
)

// Config configures a Supervisor.
type Config struct {
	Command []string // program and arguments, at least one word; the program is looked up in $PATH
	Socket  string   // where to listen for files
	Dirs    []string // where files go; a connection names one by its index
	Restart bool     // new files restart the command
	Once    bool     // the command is not restarted after success, except for files
	Logger  *slog.Logger
}

// Supervisor runs a command. Run is called once.
type Supervisor struct {
	cfg     Config
	dirs    []*directory
	changed wakeup.Signal // new files arrived

	mu     sync.Mutex
	behind map[*directory]bool // those that do not have all files yet
	copied chan struct{}       // closed when behind is empty
}

// directory is served to one connection at a time: what an older one has not carried out yet is outdated.
type directory struct {
	path string
	turn sync.Mutex

	mu  sync.Mutex
	end context.CancelFunc // of the latest connection; nil: there was none
}

// New returns a supervisor that does not run yet.
func New(cfg Config) *Supervisor {
	s := &Supervisor{
		cfg: cfg, changed: wakeup.NewSignal(), behind: make(map[*directory]bool), copied: make(chan struct{}),
	}
	for _, path := range cfg.Dirs {
		d := &directory{path: path}
		s.dirs = append(s.dirs, d)
		s.behind[d] = true
	}
	if len(s.behind) == 0 {
		close(s.copied)
	}
	return s
}

// synced records that files arrived in a directory, and that they are all.
func (s *Supervisor) synced(d *directory, changes, all bool) {
	if s.cfg.Restart && changes {
		s.changed.Raise()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if all && s.behind[d] {
		delete(s.behind, d)
		if len(s.behind) == 0 {
			close(s.copied)
		}
	}
}

// Run runs the command until SIGTERM, SIGINT, SIGQUIT or the end of ctx ends it. It returns the exit code of the
// command, which is 128 plus the number of the signal if a signal ended it.
func (s *Supervisor) Run(ctx context.Context) (exit int, err error) {
	if err := os.Remove(s.cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("cannot remove the socket of an earlier supervisor: %w", err)
	}
	l, err := net.Listen("unix", s.cfg.Socket)
	if err != nil {
		return 0, fmt.Errorf("cannot listen for files: %w", err)
	}
	var serving sync.WaitGroup
	ctx, cancel := context.WithCancel(ctx)
	defer serving.Wait()
	defer l.Close()
	defer cancel()
	serving.Go(func() { s.accept(ctx, l, &serving) })
	return s.runCommand(ctx)
}

func (s *Supervisor) accept(ctx context.Context, l net.Listener, serving *sync.WaitGroup) {
	_ = authlistener.Serve(ctx, l, s.cfg.Logger, func(conn net.Conn) { // only Run closes l
		serving.Go(func() {
			defer conn.Close()
			if err := s.serve(ctx, conn); err != nil && ctx.Err() == nil {
				s.cfg.Logger.Info("a connection for files ended", "err", err)
			}
		})
	})
}

// numberTimeout is how long a connection may take to send the number of its directory.
const numberTimeout = 10 * time.Second

// serve receives the files of one connection, whose first byte is the number of the directory.
func (s *Supervisor) serve(ctx context.Context, conn net.Conn) error {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := conn.SetReadDeadline(time.Now().Add(numberTimeout)); err != nil {
		return fmt.Errorf("cannot set a read deadline: %w", err)
	}
	var number [1]byte
	if _, err := io.ReadFull(conn, number[:]); err != nil {
		return fmt.Errorf("cannot read the number of the directory: %w", err)
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("cannot clear the read deadline: %w", err)
	}
	n := int(number[0])
	if n >= len(s.dirs) {
		return fmt.Errorf("%d is not one of the %d directories", n, len(s.dirs))
	}
	return s.serveDir(ctx, conn, s.dirs[n])
}

// serveDir lets the other end of conn change a directory, until it ends or another connection takes its place.
func (s *Supervisor) serveDir(ctx context.Context, conn net.Conn, d *directory) error {
	ctx, end := context.WithCancel(ctx)
	defer end()
	d.mu.Lock()
	if d.end != nil {
		d.end()
	}
	d.end = end
	d.mu.Unlock()
	d.turn.Lock()
	defer d.turn.Unlock()

	err := os.MkdirAll(filepath.Dir(d.path), 0o755)
	var server *remotefs.Server
	hello := files.Hello{Protocol: files.Protocol}
	if err == nil {
		server, hello.Name, err = remotefs.Open(d.path, false)
	}
	if err != nil {
		hello.Error = err.Error()
	}
	if e := json.NewEncoder(conn).Encode(hello); e != nil || err != nil {
		return errors.Join(err, e)
	}
	server.Synced = func(changes, all bool) { s.synced(d, changes, all) }
	return server.Serve(ctx, conn)
}
