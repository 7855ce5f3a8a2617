// Package supervisor is PID 1 of a clone's container to which files of a laptop go: it runs the container's own command, takes
// the files with the container's user and in its file system, and starts the command anew for them.
//
//	laptop ── pods/exec ──▶ traffic sync ── unix socket ──▶ traffic supervise ─┬─▶ files
//	                        (in the container)              PID 1              └─▶ the command: started again
//
// The socket lies in a volume that no other container has, and exec is what the API server lets in: so nothing listens on the
// pod's network, and nobody needs a key.
//
// The command's life:
//
//	waiting for the first files of all directories ──▶ running
//
//	running ── files came, --restart ──▶ SIGTERM ── 5 s ──▶ SIGKILL ──▶ running
//	   │
//	   └── ended by itself ──▶ waiting: 1 s, 2 s, ... 30 s, or files came ──▶ running
//
// It does not begin before, however long that takes: it would be what is in the image that runs, and not what the user has. When one
// that is to run once, as a CronJob's, has ended well, it is started again only for files, and without --restart the supervisor
// ends as well.
//
// A container that ended with its command would come back with the image's files, and in the kubelet's own time.
package supervisor

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"time"

	"kubevpn/pkg/filesync"
)

const (
	stopGrace  = 5 * time.Second // between SIGTERM and SIGKILL when the command is started again
	pauseFirst = time.Second     // after a command that ended by itself
	pauseMost  = 30 * time.Second
	// steady is how long a command has to run for the pause after its end to be the first one again.
	steady = 10 * time.Second
)

// Config is what New needs.
type Config struct {
	Command []string // as execve takes it; the first is looked for in $PATH
	Socket  string   // where to listen for files
	Dirs    []string // where they go, the first before the command begins; whoever connects names one by its place in this list
	Restart bool     // files end the command, so that it is started again
	Once    bool     // the command is not started again by itself when it has ended well
	Logger  *slog.Logger
}

// Supervisor runs a command. Run is called once.
type Supervisor struct {
	cfg     Config
	targets []*filesync.Target
	changed chan struct{} // files came, or somebody asked; buffered 1

	mu     sync.Mutex
	behind map[int]bool  // directories that have not been compared with the laptop's
	copied chan struct{} // closed: none is
}

// New checks the directories; it starts nothing.
func New(cfg Config) (*Supervisor, error) {
	if len(cfg.Command) == 0 {
		return nil, errors.New("there is no command to run")
	}
	s := &Supervisor{cfg: cfg, changed: make(chan struct{}, 1), behind: make(map[int]bool), copied: make(chan struct{})}
	for n, dir := range cfg.Dirs {
		t, err := filesync.NewTarget(filesync.TargetConfig{
			Dir: dir, Logger: cfg.Logger.With("dir", dir), OnSync: func(b filesync.Batch) error { return s.onSync(n, b) },
		})
		if err != nil {
			return nil, err
		}
		s.targets = append(s.targets, t)
		s.behind[n] = true
	}
	if len(s.behind) == 0 {
		close(s.copied)
	}
	return s, nil
}

func (s *Supervisor) onSync(dir int, b filesync.Batch) error {
	if s.cfg.Restart && b.Changed() {
		s.again()
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.Compared && s.behind[dir] {
		delete(s.behind, dir)
		if len(s.behind) == 0 {
			close(s.copied)
		}
	}
	return nil
}

func (s *Supervisor) again() {
	select {
	case s.changed <- struct{}{}:
	default:
	}
}

// Run runs the command until a signal for it comes that ends it (SIGTERM, as the kubelet sends it): exit is then what the
// command ended with, 128 and the signal's number if a signal did it. ctx ends it likewise.
func (s *Supervisor) Run(ctx context.Context) (exit int, err error) {
	if err := os.Remove(s.cfg.Socket); err != nil && !errors.Is(err, os.ErrNotExist) {
		return 0, fmt.Errorf("removing what an earlier one left: %w", err)
	}
	l, err := net.Listen("unix", s.cfg.Socket)
	if err != nil {
		return 0, fmt.Errorf("listening for files: %w", err)
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
	for {
		conn, err := l.Accept()
		if err != nil {
			if ctx.Err() == nil {
				s.cfg.Logger.Error("no files are taken any more", "err", err)
			}
			return
		}
		serving.Go(func() {
			defer conn.Close()
			if err := s.serve(ctx, conn); err != nil && ctx.Err() == nil {
				s.cfg.Logger.Info("a connection for files ended", "err", err)
			}
		})
	}
}

// serve takes the files of one connection. Its first line names the directory.
func (s *Supervisor) serve(ctx context.Context, conn net.Conn) error {
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	defer stop()
	if err := conn.SetReadDeadline(time.Now().Add(lineTimeout)); err != nil {
		return fmt.Errorf("limiting the time for a line: %w", err)
	}
	line, err := readLine(conn)
	if err != nil {
		return fmt.Errorf("reading which directory is meant: %w", err)
	}
	if err := conn.SetReadDeadline(time.Time{}); err != nil {
		return fmt.Errorf("lifting the time for a line: %w", err)
	}
	n, err := strconv.Atoi(line)
	if err != nil || n < 0 || n >= len(s.targets) {
		return fmt.Errorf("%q is none of the %d directories", line, len(s.targets))
	}
	return s.targets[n].Serve(ctx, conn)
}

const (
	lineMost    = 16               // the longest first line
	lineTimeout = 10 * time.Second // until it is there: whoever connects knows it
)

// readLine reads a short line, and not a byte more: what follows is somebody else's.
func readLine(r io.Reader) (string, error) {
	var line strings.Builder
	for b := make([]byte, 1); ; {
		if _, err := io.ReadFull(r, b); err != nil {
			return "", err
		}
		if b[0] == '\n' {
			return line.String(), nil
		}
		if line.Len() == lineMost {
			return "", errors.New("the line is too long")
		}
		line.WriteByte(b[0])
	}
}
