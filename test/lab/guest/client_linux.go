package guest

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// Client sends requests to the server of a guest.
type Client struct {
	Connect func(context.Context) (net.Conn, error) // a new connection to the server
}

// Dial opens a connection from the guest, as a program there would. The result does not report the addresses of that
// connection, and does not keep the boundaries of datagrams.
func (c Client) Dial(ctx context.Context, network, address string) (net.Conn, error) {
	r := request{Network: network, Address: address}
	if deadline, ok := ctx.Deadline(); ok {
		r.Timeout = max(1, time.Until(deadline).Milliseconds())
	}
	return c.ask(ctx, r)
}

// ask opens a connection, sends the request and waits for the answer.
func (c Client) ask(ctx context.Context, r request) (net.Conn, error) {
	conn, err := c.Connect(ctx)
	if err != nil {
		return nil, err
	}
	stop := context.AfterFunc(ctx, func() { conn.Close() })
	err = exchange(conn, r)
	if !stop() && err == nil {
		err = ctx.Err()
	}
	if err != nil {
		conn.Close()
		return nil, errors.Join(ctx.Err(), err)
	}
	return conn, nil
}

func exchange(conn net.Conn, r request) error {
	f := frames{w: conn}
	if err := f.writeJSON(kindRequest, r); err != nil {
		return fmt.Errorf("asking the guest: %w", err)
	}
	k, content, err := readFrame(conn)
	if err != nil {
		return fmt.Errorf("waiting for the guest's answer: %w", err)
	}
	switch k {
	case kindDone:
		return nil
	case kindFailed:
		return failed(content)
	}
	return fmt.Errorf("the guest answers with a frame of kind %d", k)
}

// failed returns the error that the guest reported.
func failed(content []byte) error {
	var f failure
	if err := json.Unmarshal(content, &f); err != nil {
		return fmt.Errorf("the guest has failed with %q", content)
	}
	return remoteError(f)
}

// remoteError is an error of the guest.
type remoteError failure

func (e remoteError) Error() string { return e.Text }

func (e remoteError) Unwrap() error {
	if e.Errno == 0 {
		return nil
	}
	return syscall.Errno(e.Errno)
}

// Program is a program to run in the guest.
type Program struct {
	Argv           []string
	Env            []string
	Alone          string // if not empty: starts after the previous program of this name has ended
	Input          io.Reader
	Output, Errors io.Writer
}

// Run runs a program in the guest and returns its exit code, or 128 plus the number of the signal that ended it. When
// ctx or this process ends, the guest kills the program. Run forwards signals that would end this process to the
// program. If input and output are terminals, the program gets a terminal.
func (c Client) Run(ctx context.Context, p Program) (int, error) {
	r := request{Argv: p.Argv, Env: p.Env, Alone: p.Alone}
	terminal := terminalOf(p)
	if terminal >= 0 {
		now := sizeOf(terminal)
		r.Terminal = &now
	}
	signals := make(chan os.Signal, 16)
	signal.Notify(signals, unix.SIGINT, unix.SIGTERM, unix.SIGHUP, unix.SIGQUIT, unix.SIGWINCH)
	defer signal.Stop(signals)
	conn, err := c.ask(ctx, r)
	if err != nil {
		return 0, err
	}
	defer conn.Close()
	if c, ok := conn.(*net.TCPConn); ok {
		// If this process dies, the guest must notice at once, and not after it has read all data.
		if err := c.SetLinger(0); err != nil {
			return 0, err
		}
	}
	defer context.AfterFunc(ctx, func() { conn.Close() })()
	if terminal >= 0 {
		before, err := term.MakeRaw(terminal)
		if err != nil {
			return 0, fmt.Errorf("setting up the terminal: %w", err)
		}
		defer func() { _ = term.Restore(terminal, before) }() // the terminal may be closed
	}
	f := &frames{w: conn}
	ended := make(chan struct{})
	defer close(ended)
	go func() {
		for {
			select {
			case s := <-signals:
				tell(f, s.(syscall.Signal), terminal)
			case <-ended:
				return
			}
		}
	}()
	go func() {
		// This ends with the process or with the input, because a read cannot be interrupted.
		if p.Input != nil {
			_, _ = io.Copy(stream{f, kindInput}, p.Input) // a program need not read all
		}
		_ = f.write(kindInput, nil) // it may have ended
	}()
	code, err := receive(conn, p)
	if ctx.Err() != nil {
		err = ctx.Err()
	}
	return code, err
}

// receive copies the output of the program until it ends.
func receive(conn net.Conn, p Program) (int, error) {
	for {
		k, content, err := readFrame(conn)
		if err != nil {
			return 0, fmt.Errorf("the guest has gone: %w", err)
		}
		switch k {
		case kindOutput:
			_, err = p.Output.Write(content)
		case kindError:
			_, err = p.Errors.Write(content)
		case kindFailed:
			err = failed(content)
		case kindExit:
			var e exit
			err = json.Unmarshal(content, &e)
			return e.Code, err
		}
		if err != nil {
			return 0, err
		}
	}
}

// tell forwards a signal. On a terminal, it sends interrupting signals as the characters that a user types.
func tell(f *frames, s syscall.Signal, terminal int) {
	if s != unix.SIGWINCH {
		_ = f.write(kindSignal, []byte{byte(s)}) // it may have ended
	} else if terminal >= 0 {
		_ = f.writeJSON(kindSize, sizeOf(terminal))
	}
}

// terminalOf returns the descriptor of the program's terminal, or -1.
func terminalOf(p Program) int {
	in, ok := p.Input.(*os.File)
	if !ok || !term.IsTerminal(int(in.Fd())) {
		return -1
	}
	if out, ok := p.Output.(*os.File); !ok || !term.IsTerminal(int(out.Fd())) {
		return -1
	}
	return int(in.Fd())
}

func sizeOf(terminal int) size {
	columns, rows, err := term.GetSize(terminal)
	if err != nil {
		return size{24, 80}
	}
	return size{uint16(rows), uint16(columns)}
}
