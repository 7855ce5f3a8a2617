package guest

import (
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

// Serve serves the requests of clients until the listener fails. address and bits come from Config.Control.
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
		return nil // a client checked whether the server runs
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

// fail sends the error to the client. It returns an error only if that fails.
func fail(f *frames, err error) error {
	told := failure{Text: err.Error()}
	if number, ok := errors.AsType[syscall.Errno](err); ok {
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
		return nil //nolint:nilerr // the client has closed the connection
	}
	var both sync.WaitGroup
	for _, pair := range [][2]net.Conn{{conn, other}, {other, conn}} {
		both.Go(func() {
			_, _ = io.Copy(pair[0], pair[1]) // a broken connection has ended
			if half, ok := pair[0].(interface{ CloseWrite() error }); ok {
				_ = half.CloseWrite()
			}
		})
	}
	both.Wait()
	return nil
}

// execute runs a program until the client closes the connection.
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
	f.mu.Lock() // output of the program must follow the answer
	p, err := start(r, f)
	if err != nil {
		f.mu.Unlock()
		return fail(f, err)
	}
	defer p.input.Close()
	if f.put(kindDone, nil) != nil {
		p.kill() // the client has closed the connection
	}
	f.mu.Unlock()
	var reader sync.WaitGroup
	reader.Go(func() {
		if p.follow(conn) != nil {
			p.kill()
		}
	})
	err = f.writeJSON(kindExit, exit{p.wait()})
	conn.Close() // this ends the reader
	reader.Wait()
	if err != nil {
		return nil //nolint:nilerr // the client has closed the connection
	}
	return nil
}

// program is a running program.
type program struct {
	command  *exec.Cmd
	input    *os.File // its standard input, or its terminal
	terminal bool

	outputs []*os.File
	copying sync.WaitGroup
	ended   chan struct{}

	mu     sync.Mutex
	reaped bool // another process may have its process id
}

// start starts a program with its streams.
func start(r request, f *frames) (*program, error) {
	p := &program{command: exec.Command(r.Argv[0], r.Argv[1:]...), ended: make(chan struct{})}
	p.command.Env, p.command.Dir = r.Env, "/"
	if r.Terminal != nil {
		terminal, err := pty.StartWithSize(p.command, &pty.Winsize{Rows: r.Terminal.Rows, Cols: r.Terminal.Cols})
		if err != nil {
			return nil, err
		}
		p.input, p.terminal = terminal, true
		p.take(terminal, stream{f, kindOutput})
		return p, nil
	}
	p.command.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	var pipes [3]struct{ read, write *os.File }
	for i := range pipes {
		var err error
		if pipes[i].read, pipes[i].write, err = os.Pipe(); err != nil {
			return nil, errors.Join(err, closeAll(pipes[:i]))
		}
	}
	// Do not use the command's own copying, which drops what a slow client has not received yet.
	p.command.Stdin, p.command.Stdout, p.command.Stderr = pipes[0].read, pipes[1].write, pipes[2].write
	if err := p.command.Start(); err != nil {
		return nil, errors.Join(err, closeAll(pipes[:]))
	}
	for _, theirs := range []*os.File{pipes[0].read, pipes[1].write, pipes[2].write} {
		theirs.Close()
	}
	p.input = pipes[0].write
	p.take(pipes[1].read, stream{f, kindOutput})
	p.take(pipes[2].read, stream{f, kindError})
	return p, nil
}

func closeAll(pipes []struct{ read, write *os.File }) error {
	var errs []error
	for _, p := range pipes {
		errs = append(errs, p.read.Close(), p.write.Close())
	}
	return errors.Join(errs...)
}

// closeTimeout is the time without output after which output is no longer read from a program that has ended. Programs
// that it left running may hold its streams open forever.
const closeTimeout = time.Second

// take copies what the program prints.
func (p *program) take(from *os.File, to io.Writer) {
	p.outputs = append(p.outputs, from)
	p.copying.Go(func() {
		if !p.terminal {
			defer from.Close()
		}
		b := make([]byte, 32<<10)
		for {
			select {
			case <-p.ended:
				_ = from.SetReadDeadline(time.Now().Add(closeTimeout)) // pipes and terminals support deadlines
			default:
			}
			n, err := from.Read(b)
			if n > 0 {
				if _, err := to.Write(b[:n]); err != nil {
					return // the client has closed the connection
				}
			}
			if err != nil {
				return // the end of the output, or an error
			}
		}
	})
}

// wait waits until the program has ended and what it printed is sent, and returns its exit code.
func (p *program) wait() int {
	// Do not reap it yet, so that no other process gets its process id while it may be killed.
	for unix.Waitid(unix.P_PID, p.command.Process.Pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
		continue
	}
	p.mu.Lock()
	_ = p.command.Wait() // the state contains the result
	p.reaped = true
	p.mu.Unlock()
	close(p.ended)
	for _, f := range p.outputs {
		_ = f.SetReadDeadline(time.Now().Add(closeTimeout)) // see take; it may be closed
	}
	p.copying.Wait()
	status := p.command.ProcessState.Sys().(syscall.WaitStatus)
	if status.Signaled() {
		return 128 + int(status.Signal())
	}
	return status.ExitStatus()
}

// signal sends a signal to the program and to its child processes in the same process group.
func (p *program) signal(s unix.Signal) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if !p.reaped {
		_ = unix.Kill(-p.command.Process.Pid, s) // it may have ended
	}
}

func (p *program) kill() { p.signal(unix.SIGKILL) }

// put writes the client's input to the program. It returns an error only if the client closes the connection while the
// program does not read.
func (p *program) put(conn net.Conn, content []byte) error {
	for len(content) > 0 {
		if err := p.input.SetWriteDeadline(time.Now().Add(closeTimeout)); err != nil {
			return nil //nolint:nilerr // closed: the program has ended
		}
		n, err := p.input.Write(content)
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

// hungUp returns an error if the client has closed the connection, even if data from it is still unread.
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

// follow executes the client's frames until the client closes the connection.
func (p *program) follow(conn net.Conn) error {
	for {
		k, content, err := readFrame(conn)
		if err != nil {
			return err
		}
		switch k {
		case kindInput:
			if len(content) > 0 {
				err = p.put(conn, content)
			} else if !p.terminal {
				p.input.Close()
			}
		case kindSignal:
			if len(content) == 1 {
				p.signal(unix.Signal(content[0]))
			}
		case kindSize:
			var s size
			if err := json.Unmarshal(content, &s); err == nil && p.terminal {
				_ = pty.Setsize(p.input, &pty.Winsize{Rows: s.Rows, Cols: s.Cols}) // it may have ended
			}
		}
		if err != nil {
			return err
		}
	}
}
