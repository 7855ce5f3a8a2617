//go:build unix

package sshjump

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/unixsocket"
)

const (
	// rejectedPause is the time without another login after the jump host has rejected one.
	rejectedPause = time.Minute
	// saidDelay limits the wait for messages of a process that inherited ssh's standard error.
	saidDelay = 500 * time.Millisecond
	maxHops   = 10 // of jump hosts in the user's SSH configuration
)

// Client opens connections from the last of the hosts. It is safe for concurrent use.
type Client struct {
	config Config

	mu       sync.Mutex
	master   net.Conn // holds the master; nil: there is none
	failed   error    // of the latest login without the user, if the host rejected it
	failedAt time.Time
}

// New returns a client. It starts no process.
func New(c Config) *Client { return &Client{config: c} }

// Hosts returns the jump hosts.
func (c *Client) Hosts() Hosts { return c.config.Hosts }

// Open opens the master unless it is open. ssh asks the user on the terminal of this process and writes to messages. If
// messages is nil, ssh fails instead of asking. Errors are *Error, or ctx's.
func (c *Client) Open(ctx context.Context, messages io.Writer) error {
	if c.hold() {
		return nil
	}
	unlock, err := c.lock(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if c.hold() {
		return nil
	}
	batch := messages == nil
	c.mu.Lock()
	failed, failedAt := c.failed, c.failedAt
	c.mu.Unlock()
	if batch && failed != nil && time.Since(failedAt) < rejectedPause {
		return failed
	}
	err = c.login(ctx, messages)
	if e := (*Error)(nil); batch && errors.As(err, &e) && e.rejected() {
		c.mu.Lock()
		c.failed, c.failedAt = err, time.Now()
		c.mu.Unlock()
	}
	return err
}

// hold reports whether there is a master, and keeps it alive until Release.
func (c *Client) hold() bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.master != nil {
		return true
	}
	conn, err := net.Dial("unix", c.config.control())
	if err != nil {
		return false
	}
	c.master = conn
	go func() { // ends with the master
		_, _ = io.Copy(io.Discard, conn)
		conn.Close()
		c.mu.Lock()
		defer c.mu.Unlock()
		if c.master == conn {
			c.master = nil
		}
	}()
	return true
}

// Release lets the master end when all connections through it have ended. The next DialContext holds it again.
func (c *Client) Release() {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.master != nil {
		c.master.Close()
	}
}

// lock prevents two processes from opening masters at once: the second master would end only with its connection. It
// locks the directory, because a lock file would remain.
func (c *Client) lock(ctx context.Context) (unlock func(), err error) {
	dir, err := os.Open(c.config.Dir)
	if err != nil {
		return nil, fmt.Errorf("opening the directory of the SSH control socket: %w", err)
	}
	locked := make(chan error, 1)
	go func() {
		err := unix.Flock(int(dir.Fd()), unix.LOCK_EX)
		for errors.Is(err, unix.EINTR) {
			err = unix.Flock(int(dir.Fd()), unix.LOCK_EX)
		}
		locked <- err
	}()
	select {
	case err := <-locked:
		if err != nil {
			dir.Close()
			return nil, fmt.Errorf("locking %s: %w", c.config.Dir, err)
		}
		return func() { dir.Close() }, nil
	case <-ctx.Done():
		go func() {
			<-locked
			dir.Close()
		}()
		return nil, ctx.Err()
	}
}

// login opens a master.
func (c *Client) login(ctx context.Context, messages io.Writer) error {
	cmd := exec.CommandContext(ctx, c.config.Program, c.config.masterArguments(messages == nil)...)
	cmd.Env, cmd.WaitDelay = c.config.Env, saidDelay
	var said bytes.Buffer
	cmd.Stderr = &said
	if messages == nil {
		detach(cmd)
	} else {
		// To ask, ssh must stay in the terminal's foreground group. It also receives Ctrl-C.
		cmd.Stderr = io.MultiWriter(&said, messages)
		cmd.Cancel = func() error { return cmd.Process.Signal(os.Interrupt) }
	}
	err := cmd.Run()
	switch {
	case ctx.Err() != nil:
		return ctx.Err()
	case err == nil, errors.Is(err, exec.ErrWaitDelay): // the master still has standard error
		if c.hold() {
			return nil
		}
		err = errors.New("the connection ended at once")
	}
	return c.failure("", said.String(), err)
}

// detach takes the terminal from ssh, and from the ssh processes of other hops, which do not inherit BatchMode.
func detach(cmd *exec.Cmd) {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	cmd.Env = append(slices.Clone(cmd.Env), "SSH_ASKPASS_REQUIRE=never", "DISPLAY=")
}

func (c *Client) failure(to, said string, err error) *Error {
	e := &Error{Hosts: c.config.Hosts, To: to, Said: lastLine(said)}
	if e.Said == "" {
		e.Said = err.Error()
	}
	return e
}

// DialContext opens a connection from the last host to the address, and the master if there is none. It does not wait
// for the answer: if the host cannot connect, Read and Write return an *Error. Errors are *Error, or ctx's.
func (c *Client) DialContext(ctx context.Context, address string) (net.Conn, error) {
	if err := c.Open(ctx, nil); err != nil {
		return nil, err
	}
	ours, theirs, err := unixsocket.Pair("ssh")
	if err != nil {
		return nil, err
	}
	defer theirs.Close()
	stream, err := net.FileConn(ours)
	ours.Close() // FileConn duplicates it
	if err != nil {
		return nil, err
	}
	conn := &channel{Conn: stream, client: c, address: address, ended: make(chan struct{})}
	cmd := exec.Command(c.config.Program, c.config.channelArguments(address)...)
	cmd.Env, cmd.WaitDelay = c.config.Env, saidDelay
	cmd.Stdin, cmd.Stdout, cmd.Stderr = theirs, theirs, &conn.said
	detach(cmd)
	if err := cmd.Start(); err != nil {
		stream.Close()
		return nil, c.failure(address, "", err)
	}
	go func() {
		defer close(conn.ended)
		conn.err = cmd.Wait()
	}()
	return conn, nil
}

// channel is a connection through the master.
type channel struct {
	net.Conn
	client  *Client
	address string
	begun   atomic.Bool // data has come

	ended chan struct{} // closed when ssh has ended
	said  bytes.Buffer  // read it after ended
	err   error         // likewise
}

func (c *channel) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	if n > 0 {
		c.begun.Store(true)
	}
	return n, c.explain(err)
}

func (c *channel) Write(p []byte) (int, error) {
	n, err := c.Conn.Write(p)
	return n, c.explain(err)
}

// explain returns why ssh failed if no data has come.
func (c *channel) explain(err error) error {
	broken := errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) || errors.Is(err, syscall.EPIPE)
	if !broken || c.begun.Load() {
		return err
	}
	c.Conn.Close() // ssh ends only after both directions have ended
	<-c.ended
	if c.err == nil {
		return err
	}
	return c.client.failure(c.address, c.said.String(), c.err)
}

// Peer returns the host to which ssh itself connects, a name or an IP address: the first one, or its first jump host in
// the user's SSH configuration. It returns "" if a ProxyCommand connects.
func (c *Client) Peer(ctx context.Context) (string, error) {
	at := c.config.Hosts[:1]
	for range maxHops {
		cmd := exec.CommandContext(ctx, c.config.Program, append([]string{"-G"}, at.Arguments()...)...)
		var said bytes.Buffer
		cmd.Env, cmd.Stderr, cmd.WaitDelay = c.config.Env, &said, saidDelay
		detach(cmd)
		out, err := cmd.Output()
		if err != nil {
			return "", c.failure("", said.String(), err)
		}
		found := settings(string(out))
		if found["proxyjump"] == "" {
			if found["proxycommand"] != "" {
				return "", nil
			}
			return found["hostname"], nil
		}
		first, _, _ := strings.Cut(found["proxyjump"], ",")
		if at, err = Parse(first); err != nil {
			return "", fmt.Errorf("the SSH configuration's ProxyJump: %w", err)
		}
	}
	return "", fmt.Errorf("the SSH configuration has more than %d jump hosts before %s", maxHops, c.config.Hosts)
}
