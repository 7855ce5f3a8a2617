//go:build unix

package helper

import (
	"bytes"
	"context"
	"errors"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/pkg/host/unixsocket"
)

// readyTimeout limits the time from the helper's start until it is ready. Before its start, a user may take any time to
// type a password.
const readyTimeout = 10 * time.Second

// Start starts the helper process as root. If this process does not run as root, the service does that, else sudo. Once
// the helper is ready, Start returns this process's end of the socket. sudo asks for a password on this process's
// terminal. The helper outlives the terminal; it ends when every copy of the returned file is closed.
func Start(ctx context.Context, cfg StartConfig) (*os.File, error) {
	announce := cfg.Announce
	if announce == nil {
		announce = func(string) {}
	}
	if os.Geteuid() == 0 {
		return startProcess(ctx, cfg)
	}
	denied := false
	if cfg.Service != "" {
		socket, version, err := startService(ctx, cfg.Service)
		if !errors.Is(err, errNoService) {
			if err == nil {
				announce("Using the root helper's service, kubevpn " + version)
			}
			return socket, err
		}
		denied = errors.Is(err, fs.ErrPermission)
	}
	announce("Links, routes and name resolution require root: sudo may ask for your password.")
	socket, err := startProcess(ctx, cfg)
	if e, ok := errors.AsType[*api.Error](err); ok && denied {
		err = e.WithHint("%s\nThe service of the root helper is for other users: see `kubevpn service status`", e.Hint)
	}
	return socket, err
}

// startProcess starts the helper with a socketpair, by sudo if this process does not run as root.
func startProcess(ctx context.Context, cfg StartConfig) (*os.File, error) {
	ours, theirs, err := unixsocket.Pair("helper")
	if err != nil {
		return nil, api.Errorf(api.ExitPrivilege, "cannot create a socketpair: %w", err)
	}
	defer theirs.Close()

	argv := []string{cfg.Executable, "helper"}
	if os.Geteuid() != 0 {
		if argv, err = withSudo(argv); err != nil {
			ours.Close()
			return nil, err
		}
	}
	if err := runStarter(ctx, cfg, argv, theirs); err != nil {
		ours.Close()
		return nil, err
	}
	theirs.Close() // so that the end of the helper is the end of the socket
	if _, err := awaitReady(ctx, ours); err != nil {
		ours.Close()
		return nil, notReady(err, "the root helper has started", "")
	}
	return ours, nil
}

func withSudo(argv []string) ([]string, error) {
	sudo, err := exec.LookPath("sudo")
	if err != nil {
		return nil, api.Errorf(api.ExitPrivilege,
			"links, routes and name resolution require root, and sudo is not installed").
			WithHint("run kubevpn as root, or install sudo")
	}
	out := []string{sudo}
	if !haveTerminal() {
		out = append(out, "-n") // without a terminal the user cannot answer
	}
	return append(append(out, "--"), argv...), nil
}

func haveTerminal() bool {
	f, err := os.OpenFile("/dev/tty", os.O_RDWR|unix.O_NOCTTY, 0)
	if err != nil {
		return false
	}
	f.Close()
	return true
}

// runStarter runs the first helper process, which ends when it has started the second.
func runStarter(ctx context.Context, cfg StartConfig, argv []string, socket *os.File) error {
	var output bytes.Buffer
	cmd := exec.Command(argv[0], argv[1:]...)
	cmd.Stdin = socket
	cmd.Stderr = &output
	if cfg.Stderr != nil {
		cmd.Stderr = io.MultiWriter(&output, cfg.Stderr)
	}
	if err := cmd.Start(); err != nil {
		return api.Errorf(api.ExitPrivilege, "cannot start the root helper: %w", err)
	}
	ended := make(chan error, 1)
	go func() { ended <- cmd.Wait() }()
	err := unlessInterrupted(ctx, ended)
	switch {
	case err == nil:
		return nil
	case ctx.Err() != nil:
		// This process may lack the right to kill sudo, which runs as root. Ctrl-C also ends sudo, because it is in the
		// foreground of the terminal. Otherwise the helper that it starts finds its socket closed and ends.
		_ = cmd.Process.Kill()
		return ctx.Err()
	default:
		return explainStart(argv, err, output.String())
	}
}

// interruptTime is the maximum delay from the failure of sudo until its cause, an interrupt, ends ctx.
const interruptTime = 100 * time.Millisecond

// unlessInterrupted waits for a process on the user's terminal, or for the end of ctx. Ctrl-C ends both, and the
// process may end first: its failure counts only if ctx continues.
func unlessInterrupted(ctx context.Context, ended <-chan error) (err error) {
	select {
	case <-ctx.Done():
		return ctx.Err()
	case err = <-ended:
	}
	if err == nil {
		return nil
	}
	select {
	case <-ctx.Done():
		return ctx.Err()
	case <-time.After(interruptTime):
		return err
	}
}

// explainStart returns the error for a start that failed with err, after sudo wrote output to stderr.
func explainStart(argv []string, err error, output string) error {
	lines := strings.Split(strings.TrimSpace(output), "\n")
	reason := strings.TrimPrefix(lines[len(lines)-1], "sudo: ")
	if reason == "" {
		reason = err.Error()
	}
	e := api.Errorf(api.ExitPrivilege, "cannot start the root helper: %s", reason)
	switch {
	case os.Geteuid() == 0:
		return e
	case len(argv) > 1 && argv[1] == "-n":
		program := argv[len(argv)-2]
		const hint = "sudo has no terminal to ask for a password: run `kubevpn connect` in a terminal, run kubevpn " +
			"as root, or allow"
		if !replaceable(program) {
			return e.WithHint("%s `%s helper` in sudoers without a password", hint, program)
		}
		return e.WithHint("%s `/usr/local/bin/kubevpn helper` in sudoers without a password; "+
			"you can replace %s, so NOPASSWD for it would make every program that you run root. Install it first:\n"+
			"  sudo install -o root -g root -m 755 %s /usr/local/bin/kubevpn", hint, program, api.ShellQuote(program))
	default:
		return e.WithHint("links, routes and name resolution require root: run kubevpn as root, or as a user whom "+
			"sudoers allows to run `%s helper`", argv[len(argv)-2])
	}
}

// replaceable reports whether this user can change the program at path, or put another one there.
func replaceable(path string) bool {
	for own := os.Getuid(); ; path = filepath.Dir(path) {
		var st unix.Stat_t
		if err := unix.Stat(path, &st); err != nil {
			return true
		}
		// In a sticky directory this user cannot move others' files.
		shared := st.Mode&unix.S_IFMT == unix.S_IFDIR && st.Mode&unix.S_ISVTX != 0
		if int(st.Uid) == own || !shared && unix.Access(path, unix.W_OK) == nil {
			return true
		}
		if path == filepath.Dir(path) {
			return false
		}
	}
}

// awaitReady reads and returns the helper's first message. It leaves socket open.
func awaitReady(ctx context.Context, socket *os.File) (first response, err error) {
	conn, err := copyWire(socket)
	if err != nil {
		return first, err
	}
	defer conn.Close()
	if err := conn.SetReadDeadline(time.Now().Add(readyTimeout)); err != nil {
		return first, err
	}
	defer context.AfterFunc(ctx, func() { _ = conn.SetReadDeadline(time.Unix(1, 0)) })()
	if _, err := conn.Receive(&first, ""); err != nil {
		if ctx.Err() != nil {
			return first, ctx.Err()
		}
		return first, err
	}
	if first.Error != nil {
		return first, first.Error
	}
	if !first.Ready {
		return first, errors.New("unexpected first message")
	}
	return first, nil
}

// notReady returns the error of a helper that is not ready, with the cause err of awaitReady. who says how it began.
func notReady(err error, who, hint string) error {
	if errors.As(err, new(*api.Error)) || errors.Is(err, context.Canceled) {
		return err
	}
	if errors.Is(err, io.EOF) {
		err = errors.New("it ended immediately")
	}
	return api.Errorf(api.ExitPrivilege, "%s but is not ready: %w", who, err).WithHint("%s", hint)
}
