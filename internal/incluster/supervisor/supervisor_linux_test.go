package supervisor

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/process/files"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/wire/filesync"
)

// TestMain runs a command of this package if the test started itself as "as-traffic".
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == "as-traffic" {
		root := NewCommands()
		for _, cmd := range root {
			if cmd.Name() == os.Args[2] {
				cmd.SetArgs(os.Args[3:])
				err := cmd.ExecuteContext(context.Background())
				exit := Exit(1)
				if err == nil {
					exit = 0
				} else if !errors.As(err, &exit) {
					fmt.Fprintln(os.Stderr, err)
				}
				os.Exit(int(exit))
			}
		}
	}
	os.Exit(m.Run())
}

// supervised is a running supervisor. As root, it has a PID namespace of its own.
type supervised struct {
	cmd    *exec.Cmd
	socket string
	lines  chan string // of the command
	ended  chan error
}

func supervise(t *testing.T, flags []string, command ...string) *supervised {
	t.Helper()
	s := &supervised{socket: filepath.Join(t.TempDir(), "s"), lines: make(chan string, 100), ended: make(chan error, 1)}
	args := append([]string{"as-traffic", "supervise", "--socket", s.socket}, flags...)
	s.cmd = exec.Command("/proc/self/exe", append(append(args, "--"), command...)...)
	s.cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	if os.Getuid() == 0 {
		s.cmd.SysProcAttr.Cloneflags = unix.CLONE_NEWPID
	}
	s.cmd.Stderr = os.Stderr
	out, err := s.cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := s.cmd.Start(); err != nil {
		t.Fatal(err)
	}
	read := make(chan struct{})
	go func() {
		defer close(read)
		for in := bufio.NewScanner(out); in.Scan(); {
			s.lines <- in.Text()
		}
	}()
	go func() {
		<-read
		s.ended <- s.cmd.Wait()
	}()
	t.Cleanup(func() {
		_ = s.cmd.Process.Kill()
		<-read
	})
	return s
}

// waitLimit is how long a test waits before it fails.
const waitLimit = time.Minute

// line waits for the next line of the command.
func (s *supervised) line(t *testing.T, want string) {
	t.Helper()
	select {
	case got := <-s.lines:
		if got != want {
			t.Fatalf("the command printed %q, want %q", got, want)
		}
	case <-time.After(waitLimit):
		t.Fatalf("the command did not print %q", want)
	}
}

// exit waits for the end of the supervisor and returns its exit code.
func (s *supervised) exit(t *testing.T) int {
	t.Helper()
	select {
	case <-s.ended:
		return s.cmd.ProcessState.ExitCode()
	case <-time.After(waitLimit):
		t.Fatal("the supervisor has not ended")
		return 0
	}
}

// sync keeps dir in sync with the supervisor's directory of that number, through `traffic sync`.
func (s *supervised) sync(t *testing.T, dir, number string) *filesync.Source {
	t.Helper()
	source := filesync.NewSource(filesync.SourceConfig{
		Dir: dir, Logger: slog.New(slog.DiscardHandler), OnSync: func(filesync.Batch) {},
		Dial: func(ctx context.Context) (net.Conn, string, error) {
			pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
			if err != nil {
				return nil, "", err
			}
			ours, theirs := os.NewFile(uintptr(pair[0]), "ours"), os.NewFile(uintptr(pair[1]), "theirs")
			defer ours.Close()
			cmd := exec.CommandContext(t.Context(), "/proc/self/exe", "as-traffic", "sync", "--socket", s.socket, number)
			cmd.Stdin, cmd.Stdout = theirs, theirs
			err = cmd.Start()
			theirs.Close() // its end is seen
			if err != nil {
				return nil, "", err
			}
			go func() { _ = cmd.Wait() }()
			conn, err := net.FileConn(ours)
			if err != nil {
				return nil, "", err
			}
			hello, err := files.ReadHello(ctx, conn)
			if err == nil && hello.Error != "" {
				err = fmt.Errorf("at the other end: %s", hello.Error)
			}
			return conn, hello.Name, err
		},
	})
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		source.Run(ctx)
	}()
	t.Cleanup(func() {
		cancel()
		<-ended
	})
	return source
}

// write creates or replaces a file at once: a sync that runs never sees a part of it. The permissions of the file stay.
func write(t *testing.T, path, text string) {
	t.Helper()
	mode := os.FileMode(0o644)
	if info, err := os.Stat(path); err == nil {
		mode = info.Mode()
	}
	temp := filepath.Join(filepath.Dir(path), ".#"+filepath.Base(path))
	if err := errors.Join(os.WriteFile(temp, []byte(text), mode), os.Rename(temp, path)); err != nil {
		t.Fatal(err)
	}
}

func TestCommandStartsWithFilesAndRestartsForNewOnes(t *testing.T) {
	local, remote := t.TempDir(), t.TempDir()
	write(t, remote+"/greeting", "of the image\n")
	write(t, remote+"/other", "stays\n")
	write(t, local+"/greeting", "one\n")
	s := supervise(t, []string{"--restart", "--dir", t.TempDir(), "--dir", remote},
		"sh", "-c", `trap 'echo asked; exit 3' TERM; cat "$0"/greeting; while :; do sleep 0.05; done`, remote)
	first := s.sync(t, local, "1")
	testenv.Until(t, "the files of one directory", func() bool { return first.Status().Synced })
	select {
	case got := <-s.lines:
		t.Errorf("the command printed %q before the other directory has its files", got)
	default:
	}
	s.sync(t, t.TempDir(), "0")
	s.line(t, "one")
	write(t, local+"/greeting", "two\n")
	s.line(t, "asked")
	s.line(t, "two")
	if got, err := os.ReadFile(remote + "/other"); err != nil || string(got) != "stays\n" {
		t.Errorf("%q, %v", got, err)
	}
	if err := s.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	s.line(t, "asked")
	if got := s.exit(t); got != 3 {
		t.Errorf("exit code %d", got)
	}
}

func TestFilesArriveWithoutRestart(t *testing.T) {
	local, remote := t.TempDir(), filepath.Join(t.TempDir(), "made")
	write(t, local+"/file", "here\n")
	s := supervise(t, []string{"--dir", remote}, "sh", "-c", `cat "$0"/file; while ! cat "$0"/later 2>/dev/null; do sleep 0.05; done; exec sleep 60`, remote)
	s.sync(t, local, "0")
	s.line(t, "here")
	write(t, local+"/later", "too\n")
	s.line(t, "too")
	if err := s.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := s.exit(t); got != 128+15 {
		t.Errorf("exit code %d", got)
	}
}

// TestCommandThatIgnoresSIGTERMIsKilled checks that the supervisor kills the command and its child, and starts it
// again.
func TestCommandThatIgnoresSIGTERMIsKilled(t *testing.T) {
	local, remote := t.TempDir(), t.TempDir()
	s := supervise(t, []string{"--restart", "--dir", remote}, "sh", "-c", `trap '' TERM; sleep 61 & echo started; wait; wait; while :; do sleep 0.05; done`)
	s.sync(t, local, "0")
	s.line(t, "started")
	write(t, local+"/file", "")
	s.line(t, "started")
	_ = s.cmd.Process.Kill()
}

// TestLeftProcessesAreKilled checks that processes that an ended command left are killed before it restarts, and that a
// signal while no command runs does not end the supervisor.
func TestLeftProcessesAreKilled(t *testing.T) {
	s := supervise(t, []string{"--restart", "--dir", t.TempDir()}, "sh", "-c",
		`exec 9>"$0"; flock -n 9 || { echo busy; exit 1; }; sleep 61 & echo ran; exit 1`,
		filepath.Join(t.TempDir(), "lock"))
	s.sync(t, t.TempDir(), "0")
	s.line(t, "ran")
	s.children(t, 0)
	if err := s.cmd.Process.Signal(unix.SIGHUP); err != nil {
		t.Fatal(err)
	}
	s.line(t, "ran")
	_ = s.cmd.Process.Kill()
}

// TestEndedCommandRestarts checks that a command that ends restarts after a pause and for new files, and that the
// supervisor waits for a program that is one of the files.
func TestEndedCommandRestarts(t *testing.T) {
	local, remote := t.TempDir(), t.TempDir()
	s := supervise(t, []string{"--restart", "--dir", remote}, remote+"/program")
	write(t, local+"/program", "#!/bin/sh\necho ran\nexit 1\n")
	if err := os.Chmod(local+"/program", 0o755); err != nil {
		t.Fatal(err)
	}
	s.sync(t, local, "0")
	s.line(t, "ran")
	s.line(t, "ran") // by itself
	write(t, local+"/program", "#!/bin/sh\necho mended\nexec sleep 60\n")
	for {
		select {
		case got := <-s.lines:
			if got == "mended" {
				return
			}
		case <-time.After(waitLimit):
			t.Fatal("the mended program does not run")
		}
	}
}

func TestOnceRunsAgainOnlyForNewFiles(t *testing.T) {
	local, remote := t.TempDir(), t.TempDir()
	write(t, remote+"/greeting", "of the image\n")
	write(t, local+"/greeting", "one\n")
	s := supervise(t, []string{"--restart", "--once", "--dir", remote}, "cat", remote+"/greeting")
	s.sync(t, local, "0")
	s.line(t, "one")
	select {
	case again := <-s.lines:
		t.Errorf("the command ran again by itself, and printed %q", again)
	case <-time.After(2 * backoffFirst):
	}
	write(t, local+"/greeting", "two\n")
	s.line(t, "two")
	s.children(t, 0)
	if err := s.cmd.Process.Signal(unix.SIGTERM); err != nil {
		t.Fatal(err)
	}
	if got := s.exit(t); got != 128+15 {
		t.Errorf("exit code %d", got)
	}
}

func TestOnceEndsAfterSuccessAndRestartsAfterFailure(t *testing.T) {
	local, remote := t.TempDir(), t.TempDir()
	write(t, local+"/file", "")
	s := supervise(t, []string{"--once", "--dir", remote}, "sh", "-c", `echo ran; mkdir "$0"/second 2>/dev/null && exit 1; exit 0`, remote)
	s.sync(t, local, "0")
	s.line(t, "ran")
	s.line(t, "ran")
	if got := s.exit(t); got != 0 {
		t.Errorf("exit code %d", got)
	}
}

func TestOrphansAreReaped(t *testing.T) {
	testenv.NeedRoot(t) // for a PID namespace
	s := supervise(t, nil, "sh", "-c", `sh -c 'sleep 0.1 & exit'; echo left; exec sleep 60`)
	s.line(t, "left")
	s.children(t, 1)
}

// children waits until the supervisor has that number of children.
func (s *supervised) children(t *testing.T, want int) {
	t.Helper()
	testenv.Eventually(t, waitLimit, func() error {
		tasks, err := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", s.cmd.Process.Pid))
		if err != nil {
			return err
		}
		var at []string
		for _, task := range tasks { // each thread has its own children
			list, err := os.ReadFile(task)
			if err != nil {
				return err
			}
			at = append(at, strings.Fields(string(list))...)
		}
		if len(at) != want {
			return fmt.Errorf("its children are %v", at)
		}
		return nil
	})
}

func TestMissingProgramFails(t *testing.T) {
	s := supervise(t, nil, "/none/at/all")
	if got := s.exit(t); got != 1 {
		t.Errorf("exit code %d", got)
	}
}

func TestUnknownDirectoryIsRejected(t *testing.T) {
	s := supervise(t, []string{"--dir", t.TempDir()}, "sh", "-c", "echo up; exec sleep 60")
	s.sync(t, t.TempDir(), "0")
	s.line(t, "up")
	for _, first := range []string{"\x01", "\xff", "1\n", "x\n"} {
		conn, err := net.Dial("unix", s.socket)
		if err != nil {
			t.Fatal(err)
		}
		if _, err := io.WriteString(conn, first); err != nil {
			t.Fatal(err)
		}
		if err := conn.SetReadDeadline(time.Now().Add(numberTimeout / 2)); err != nil {
			t.Fatal(err)
		}
		if n, err := conn.Read(make([]byte, 1)); n != 0 || errors.Is(err, os.ErrDeadlineExceeded) {
			t.Errorf("%q: %d bytes, %v", first, n, err)
		}
		conn.Close()
	}
}

func TestSilentConnectionTimesOut(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		s := New(Config{Command: []string{"true"}, Dirs: []string{"/x"}, Logger: slog.New(slog.DiscardHandler)})
		ours, theirs := net.Pipe()
		defer ours.Close()
		defer theirs.Close()
		began := time.Now()
		if err := s.serve(t.Context(), theirs); !errors.Is(err, os.ErrDeadlineExceeded) || time.Since(began) != numberTimeout {
			t.Errorf("after %v: %v", time.Since(began), err)
		}
	})
}

// TestUnwritableDirectoryIsReported checks that the laptop gets the reason, and that the command does not start.
func TestUnwritableDirectoryIsReported(t *testing.T) {
	file := filepath.Join(t.TempDir(), "file")
	write(t, file, "")
	s := supervise(t, []string{"--dir", file + "/below"}, "sh", "-c", "echo up; exec sleep 60")
	source := s.sync(t, t.TempDir(), "0")
	testenv.Until(t, "the reason arrives", func() bool {
		err := source.Status().Err
		return err != nil && strings.HasPrefix(err.Error(), "at the other end: mkdir "+file) && strings.HasSuffix(err.Error(), ": not a directory")
	})
	select {
	case got := <-s.lines:
		t.Errorf("the command printed %q", got)
	default:
	}
}

func TestCopyInstallsProgram(t *testing.T) {
	to := filepath.Join(t.TempDir(), "traffic")
	for range 2 {
		if out, err := exec.Command("/proc/self/exe", "as-traffic", "copy", to).CombinedOutput(); err != nil {
			t.Fatalf("%v: %s", err, out)
		}
	}
	info, err := os.Stat(to)
	if err != nil {
		t.Fatal(err)
	}
	if info.Mode().Perm() != 0o755 {
		t.Errorf("mode %v", info.Mode())
	}
	if files, err := os.ReadDir(filepath.Dir(to)); err != nil || len(files) != 1 {
		t.Errorf("%v, %v", files, err)
	}
}
