package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"sync"
	"syscall"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"
)

// Serve runs what clients ask for, until the listener fails. address and bits are Config.Control's.
func Serve(address netip.AddrPort, bits int) error {
	l, err := listenApart(address, bits)
	if err != nil {
		return err
	}
	return newServer().serve(l)
}

type server struct {
	mu    sync.Mutex
	alone map[string]*sync.Mutex // by request.Alone; locked while the program runs
}

func newServer() *server { return &server{alone: map[string]*sync.Mutex{}} }

func (s *server) serve(l net.Listener) error {
	for {
		conn, err := l.Accept()
		if err != nil {
			return fmt.Errorf("accepting: %w", err)
		}
		go func() {
			defer conn.Close()
			if err := s.handle(conn); err != nil {
				log.Print(err)
			}
		}()
	}
}

func (s *server) handle(conn net.Conn) error {
	k, content, err := readFrame(conn)
	if err == io.EOF {
		return nil // somebody looked whether there is a server
	}
	if err != nil {
		return fmt.Errorf("reading a request: %w", err)
	}
	var r request
	if err := json.Unmarshal(content, &r); k != kindRequest || err != nil {
		return fmt.Errorf("not a request: kind %d, %q: %w", k, content, err)
	}
	if len(r.Argv) == 0 {
		return dial(conn, r)
	}
	return s.execute(conn, r)
}

// fail tells the client; what is returned is that this did not work.
func fail(f *frames, err error) error {
	told := failure{Text: err.Error()}
	var number syscall.Errno
	if errors.As(err, &number) {
		told.Errno = int(number)
	} else if errors.Is(err, exec.ErrNotFound) {
		told.Errno = int(unix.ENOENT)
	}
	return f.writeJSON(kindFailed, told)
}

// dial connects the client with an address.
func dial(conn net.Conn, r request) error {
	f := &frames{w: conn}
	d := net.Dialer{Timeout: time.Duration(r.Timeout) * time.Millisecond}
	other, err := d.Dial(r.Network, r.Address)
	if err != nil {
		return fail(f, err)
	}
	defer other.Close()
	if err := f.write(kindDone, nil); err != nil {
		return nil //nolint:nilerr // the client has gone
	}
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{conn, other}, {other, conn}} {
		both.Go(func() {
			_, _ = io.Copy(pair[0], pair[1]) // a connection that breaks is one that ends
			if half, ok := pair[0].(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite()
			}
		})
	}
	both.Wait()
	return nil
}

// execute runs a program for as long as the client is there.
func (s *server) execute(conn net.Conn, r request) error {
	f := &frames{w: conn}
	if r.Alone != "" {
		s.mu.Lock()
		lock := s.alone[r.Alone]
		if lock == nil {
			lock = &sync.Mutex{}
			s.alone[r.Alone] = lock
		}
		s.mu.Unlock()
		lock.Lock()
		defer lock.Unlock()
	}
	command := exec.Command(r.Argv[0], r.Argv[1:]...)
	command.Env = r.Env
	command.Dir = "/"
	// What a program that has ended has left running may hold its streams open for ever.
	command.WaitDelay = time.Second
	input, err := start(command, r, f)
	if err != nil {
		return fail(f, err)
	}
	defer input.file.Close()
	if err := f.write(kindDone, nil); err != nil {
		endGroup(command.Process.Pid)
		_ = command.Wait() // it was killed
		return nil         //nolint:nilerr // the client has gone
	}
	ctx, ended := context.WithCancel(context.Background())
	var reader sync.WaitGroup
	reader.Go(func() {
		if follow(conn, input, command.Process.Pid) != nil && ctx.Err() == nil {
			endGroup(command.Process.Pid)
		}
	})
	err = input.wait(command)
	ended()
	code := exitCode(command.ProcessState)
	if code < 0 {
		return fail(f, err)
	}
	told := f.writeJSON(kindExit, exit{code})
	conn.Close()
	reader.Wait()
	if told != nil {
		return nil //nolint:nilerr // the client has gone
	}
	return nil
}

func exitCode(state *os.ProcessState) int {
	if state == nil {
		return -1
	}
	if status := state.Sys().(syscall.WaitStatus); status.Signaled() {
		return 128 + int(status.Signal())
	}
	return state.ExitCode()
}

// endGroup kills a program and what belongs to it: its session's foreground.
func endGroup(pid int) { _ = unix.Kill(-pid, unix.SIGKILL) } // it may have ended

// input is where what the client sends goes: a program's standard input, or its terminal.
type input struct {
	file   *os.File
	copied chan struct{} // closed when all is copied that the program printed on its terminal; nil if it has none
}

// wait waits for the program's end, and for what it printed on its terminal.
func (i input) wait(command *exec.Cmd) error {
	err := command.Wait()
	if i.copied != nil {
		select {
		case <-i.copied:
		case <-time.After(command.WaitDelay):
		}
	}
	return err
}

// put gives the program what the client sent. A program need not read: then it is for nobody, and only if the client
// goes meanwhile that is an error.
func (i input) put(conn net.Conn, content []byte) error {
	for len(content) > 0 {
		if i.copied == nil {
			if err := i.file.SetWriteDeadline(time.Now().Add(time.Second)); err != nil {
				return nil //nolint:nilerr // closed: the program has ended
			}
		}
		n, err := i.file.Write(content)
		content = content[n:]
		switch {
		case errors.Is(err, os.ErrDeadlineExceeded):
			if err := hungUp(conn); err != nil {
				return err
			}
		case err != nil:
			return nil //nolint:nilerr // it reads no more
		}
	}
	return nil
}

// hungUp is an error if the client has closed the connection, whatever is still to be read from it.
func hungUp(conn net.Conn) error {
	raw, err := conn.(syscall.Conn).SyscallConn()
	if err != nil {
		return err
	}
	var found int
	var failed error
	err = raw.Control(func(fd uintptr) {
		found, failed = unix.Poll([]unix.PollFd{{Fd: int32(fd), Events: unix.POLLRDHUP}}, 0)
	})
	if err == nil && failed == nil && found > 0 {
		err = io.EOF
	}
	return errors.Join(err, failed)
}

// start starts the program with its streams.
func start(command *exec.Cmd, r request, f *frames) (input, error) {
	if r.Terminal != nil {
		terminal, err := pty.StartWithSize(command, &pty.Winsize{Rows: r.Terminal.Rows, Cols: r.Terminal.Cols})
		if err != nil {
			return input{}, err
		}
		i := input{terminal, make(chan struct{})}
		go func() {
			defer close(i.copied)
			_, _ = io.Copy(stream{f, kindOutput}, terminal) // reading fails when the other side is closed: the end
		}()
		return i, nil
	}
	command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	command.Stdout, command.Stderr = stream{f, kindOutput}, stream{f, kindError}
	theirs, ours, err := os.Pipe()
	if err != nil {
		return input{}, err
	}
	defer theirs.Close()
	command.Stdin = theirs
	if err := command.Start(); err != nil {
		ours.Close()
		return input{}, err
	}
	return input{file: ours}, nil
}

// follow does what the client says, until it has gone.
func follow(conn net.Conn, i input, pid int) error {
	for {
		k, content, err := readFrame(conn)
		if err != nil {
			return err
		}
		switch k {
		case kindInput:
			if len(content) > 0 {
				err = i.put(conn, content)
			} else if i.copied == nil {
				i.file.Close()
			}
		case kindSignal:
			if len(content) == 1 {
				_ = unix.Kill(-pid, unix.Signal(content[0])) // it may have ended
			}
		case kindSize:
			var s size
			if err := json.Unmarshal(content, &s); err == nil && i.copied != nil {
				_ = pty.Setsize(i.file, &pty.Winsize{Rows: s.Rows, Cols: s.Cols}) // it may have ended
			}
		}
		if err != nil {
			return err
		}
	}
}
