package guest

import (
	"bytes"
	"context"
	"errors"
	"io"
	"net"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/creack/pty"
	"golang.org/x/sys/unix"

	"kubevpn/internal/testenv"
)

// newClient starts a server on this machine, without a guest, and returns a client for it.
func newClient(t *testing.T) Client {
	t.Helper()
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go newServer().serve(l)
	return Client{Connect: func(ctx context.Context) (net.Conn, error) {
		return (&net.Dialer{}).DialContext(ctx, "tcp", l.Addr().String())
	}}
}

func environment() []string { return []string{"PATH=" + os.Getenv("PATH"), "GREETING=hello"} }

func TestRunReturnsOutputAndExitCode(t *testing.T) {
	client := newClient(t)
	for _, test := range []struct {
		name, input   string
		argv          []string
		output, error string
		code          int
	}{
		{"streams", "", []string{"sh", "-c", "echo out; echo err >&2"}, "out\n", "err\n", 0},
		{"input-to-its-end", "one\ntwo\n", []string{"wc", "-l"}, "2\n", "", 0},
		{"input-not-read", strings.Repeat("x", 1<<20), []string{"true"}, "", "", 0},
		{"environment-and-directory", "", []string{"sh", "-c", "echo $GREETING; pwd"}, "hello\n/\n", "", 0},
		{"exit-code", "", []string{"sh", "-c", "exit 7"}, "", "", 7},
		{"signal", "", []string{"sh", "-c", "kill -9 $$"}, "", "", 137},
		{"much", "", []string{"sh", "-c", "head -c 3000000 /dev/zero | tr '\\0' x"}, strings.Repeat("x", 3000000), "", 0},
		{"background", "", []string{"sh", "-c", "sleep 60 & echo $!"}, "", "", 0}, // its output is the number to kill
	} {
		t.Run(test.name, func(t *testing.T) {
			var output, errors bytes.Buffer
			code, err := client.Run(t.Context(), Program{
				Argv: test.argv, Env: environment(), Input: strings.NewReader(test.input), Output: &output, Errors: &errors,
			})
			if err != nil || code != test.code {
				t.Errorf("exit code %d, %v; want %d", code, err, test.code)
			}
			if test.name == "background" {
				if err := command(client, t.Context(), "kill", strings.TrimSpace(output.String())); err != nil {
					t.Errorf("the background process does not run: %v", err)
				}
				return
			}
			if output.String() != test.output || errors.String() != test.error {
				t.Errorf("output %.100q, errors %.100q", output.String(), errors.String())
			}
		})
	}
}

// command runs a program that must succeed.
func command(client Client, ctx context.Context, argv ...string) error {
	var printed bytes.Buffer
	code, err := client.Run(ctx, Program{Argv: argv, Env: environment(), Output: &printed, Errors: &printed})
	if err == nil && code != 0 {
		err = errors.New(printed.String())
	}
	return err
}

func TestRunFailsWithoutAProgram(t *testing.T) {
	client := newClient(t)
	for _, program := range []string{"no-such-program", "/no/such/program"} {
		if err := command(client, t.Context(), program); !errors.Is(err, os.ErrNotExist) {
			t.Errorf("%s: %v", program, err)
		}
	}
	if err := command(client, t.Context(), "/etc/passwd"); !errors.Is(err, os.ErrPermission) {
		t.Errorf("a file that is not a program: %v", err)
	}
}

// started runs a program that prints its process ID. It returns the ID and a channel for the result.
func started(t *testing.T, ctx context.Context, client Client, p Program, script string) (pid string, ended <-chan error) {
	t.Helper()
	read, write := io.Pipe()
	p.Argv, p.Env, p.Output, p.Errors = []string{"sh", "-c", "echo $$; " + script}, environment(), write, io.Discard
	done := make(chan error, 1)
	go func() {
		_, err := client.Run(ctx, p)
		write.CloseWithError(io.EOF)
		done <- err
	}()
	line := make([]byte, 32)
	n, err := read.Read(line)
	if err != nil {
		t.Fatal(err)
	}
	go io.Copy(io.Discard, read)
	return strings.TrimSpace(string(line[:n])), done
}

func alive(pid string) bool {
	b, err := os.ReadFile("/proc/" + pid + "/stat")
	return err == nil && !strings.Contains(string(b), ") Z ")
}

// wait waits until a condition holds.
func wait(t *testing.T, what string, holds func() bool) {
	t.Helper()
	testenv.Eventually(t, 10*time.Second, func() error {
		if !holds() {
			return errors.New(what)
		}
		return nil
	})
}

// TestProgramEndsWithClient checks that a program ends with its stand-in, even if it does not read its input.
func TestProgramEndsWithClient(t *testing.T) {
	client := newClient(t)
	for _, test := range []struct {
		name  string
		input io.Reader
	}{
		{"no-input", nil},
		{"input-not-read", bytes.NewReader(make([]byte, 1<<26))},
	} {
		t.Run(test.name, func(t *testing.T) {
			ctx, cancel := context.WithCancel(t.Context())
			defer cancel()
			// Its child processes end too.
			pid, ended := started(t, ctx, client, Program{Input: test.input}, "sleep 1000; true")
			cancel()
			if err := <-ended; !errors.Is(err, context.Canceled) {
				t.Errorf("ended with %v", err)
			}
			wait(t, "the program still runs", func() bool { return !alive(pid) })
		})
	}
}

func TestAloneProgramsRunOneAtATime(t *testing.T) {
	client := newClient(t)
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	first, ended := started(t, ctx, client, Program{Alone: "kubelet"}, "sleep 1000; true")
	if err := command(client, t.Context(), "true"); err != nil {
		t.Errorf("a program without a name waits: %v", err)
	}
	second := make(chan error, 1)
	go func() {
		_, err := client.Run(t.Context(), Program{Argv: []string{"true"}, Env: environment(), Alone: "kubelet"})
		second <- err
	}()
	select {
	case <-second:
		t.Error("two programs of one name run at the same time")
	case <-time.After(50 * time.Millisecond): // long enough for a program to start: see the first
	}
	cancel()
	<-ended
	if err := <-second; err != nil {
		t.Error(err)
	}
	if alive(first) {
		t.Error("the second program started while the first was alive")
	}
}

func TestDialReachesListeners(t *testing.T) {
	client := newClient(t)
	l, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close()
	go func() {
		conn, err := l.Accept()
		if err != nil {
			return
		}
		defer conn.Close()
		all, _ := io.ReadAll(conn) // until the other end is half closed
		conn.Write(bytes.ToUpper(all))
	}()
	conn, err := client.Dial(t.Context(), "tcp", l.Addr().String())
	if err != nil {
		t.Fatal(err)
	}
	defer conn.Close()
	if _, err := io.WriteString(conn, "half closed"); err != nil {
		t.Fatal(err)
	}
	if err := conn.(*net.TCPConn).CloseWrite(); err != nil {
		t.Fatal(err)
	}
	if answer, err := io.ReadAll(conn); string(answer) != "HALF CLOSED" || err != nil {
		t.Errorf("answer %q, %v", answer, err)
	}
	l.Close()
	if _, err := client.Dial(t.Context(), "tcp", l.Addr().String()); !errors.Is(err, unix.ECONNREFUSED) {
		t.Errorf("nothing listens, and the error is %v", err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := client.Dial(ctx, "tcp", l.Addr().String()); !errors.Is(err, context.Canceled) {
		t.Errorf("canceled, and the error is %v", err)
	}
}

func TestTerminalIsPassedOn(t *testing.T) {
	client := newClient(t)
	near, far, err := pty.Open()
	if err != nil {
		t.Fatal(err)
	}
	defer near.Close()
	defer far.Close()
	if err := pty.Setsize(near, &pty.Winsize{Rows: 33, Cols: 99}); err != nil {
		t.Fatal(err)
	}
	type result struct {
		code int
		err  error
	}
	done := make(chan result, 1)
	go func() {
		code, err := client.Run(t.Context(), Program{
			Argv: []string{"sh", "-c", "stty size; read line; echo got $line; exec sleep 1000"}, Env: environment(), Input: far, Output: far, Errors: far,
		})
		done <- result{code, err}
	}()
	var seen strings.Builder
	expect := func(text string) {
		t.Helper()
		if err := near.SetReadDeadline(time.Now().Add(10 * time.Second)); err != nil {
			t.Fatal(err)
		}
		for b := make([]byte, 1024); !strings.Contains(seen.String(), text); {
			n, err := near.Read(b)
			seen.Write(b[:n])
			if err != nil {
				t.Fatalf("waiting for %q: %v; seen %q", text, err, seen.String())
			}
		}
	}
	expect("33 99")
	if _, err := io.WriteString(near, "typed\r"); err != nil {
		t.Fatal(err)
	}
	expect("got typed")
	if _, err := io.WriteString(near, "\x03"); err != nil { // Ctrl-C
		t.Fatal(err)
	}
	if r := <-done; r.err != nil || r.code != 130 {
		t.Errorf("interrupted: exit code %d, %v", r.code, r.err)
	}
}

// TestSlowClientGetsAllOutput checks that a slow client receives all that a program printed before it ended.
func TestSlowClientGetsAllOutput(t *testing.T) {
	read, write, err := os.Pipe()
	if err != nil {
		t.Fatal(err)
	}
	p := &program{ended: make(chan struct{})}
	slow := &slowWriter{entered: make(chan struct{}), leave: make(chan struct{})}
	p.take(read, slow)
	if _, err := write.Write(make([]byte, 60<<10)); err != nil { // more than take has read when its write blocks
		t.Fatal(err)
	}
	write.Close()
	<-slow.entered
	close(p.ended)
	if err := read.SetReadDeadline(time.Now().Add(-time.Hour)); err != nil { // the deadline has long passed
		t.Fatal(err)
	}
	close(slow.leave)
	p.copying.Wait()
	if slow.n != 60<<10 {
		t.Errorf("%d bytes have arrived", slow.n)
	}
}

// slowWriter blocks in its first Write.
type slowWriter struct {
	entered, leave chan struct{}
	n              int
}

func (w *slowWriter) Write(p []byte) (int, error) {
	if w.n == 0 {
		close(w.entered)
		<-w.leave
	}
	w.n += len(p)
	return len(p), nil
}
