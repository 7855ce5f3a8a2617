//go:build unix

package helper

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/host/unixsocket"
)

// secondVariable tells the second process that it is that.
const secondVariable = "KUBEVPN_HELPER_SECOND"

// Main is `kubevpn helper`. Its standard input is a connection that systemd accepted (see serviceConfig), or the
// helper's end of a socketpair:
//
//	sudo (perhaps in a pty of its own, which goes with it)
//	  └─ kubevpn helper                  the first: starts the second, exits 0
//	       └─ kubevpn helper (setsid)    the second: no terminal, /dev/null, / and umask 077; Serve
//
// So the helper continues when the terminal closes, and no sudo process stays. The socket tells whether the second is
// ready.
func Main(ctx context.Context) error {
	if os.Geteuid() != 0 {
		return api.Errorf(api.ExitPrivilege, "`kubevpn helper` must run as root").
			WithHint("`kubevpn connect` starts it")
	}
	w, err := copyWire(os.Stdin)
	if err != nil {
		return api.Errorf(api.ExitUsage, "standard input: %w", err).
			WithHint("`kubevpn connect` starts the helper; it cannot use a sudo with the option log_input, which " +
				"replaces standard input")
	}
	w.Close()
	if fromListener(int(os.Stdin.Fd())) {
		return serveStdin(ctx, serviceConfig)
	}
	if os.Getenv(secondVariable) == "" {
		return first()
	}
	// SIGHUP and SIGINT are for programs on a terminal. SIGTERM ends ctx, and with it everything.
	signal.Ignore(syscall.SIGHUP, syscall.SIGINT)
	return serveStdin(ctx, func(socket *os.File) (LocalConfig, error) {
		uid, err := caller(socket)
		return LocalConfig{UID: uid}, err
	})
}

func first() error {
	program, err := thisProgram()
	if err != nil {
		return api.Errorf(api.ExitPrivilege, "cannot find this program: %w", err)
	}
	cmd := exec.Command(program, "helper")
	cmd.Args[0] = os.Args[0]
	cmd.Stdin = os.Stdin
	cmd.Env = []string{"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", secondVariable + "=1"}
	if uid := os.Getenv("SUDO_UID"); uid != "" {
		cmd.Env = append(cmd.Env, "SUDO_UID="+uid)
	}
	cmd.Dir = "/"
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	if err := cmd.Start(); err != nil {
		return api.Errorf(api.ExitPrivilege, "cannot start the helper: %w", err)
	}
	return cmd.Process.Release()
}

// serveStdin serves the socket on standard input, with the configuration for it.
func serveStdin(ctx context.Context, configure func(socket *os.File) (LocalConfig, error)) error {
	unix.Umask(0o077)
	socket, err := takeStdin()
	if err != nil {
		return err
	}
	cfg, err := configure(socket)
	if err = reportReady(socket, cfg, err); err != nil {
		return errors.Join(err, socket.Close())
	}
	return Serve(ctx, socket, cfg)
}

// takeStdin moves the socket away from descriptor 0 and puts /dev/null there. So no other file gets that number, and no
// child process gets the socket. launchd may make it the standard output and error too, like inetd: messages do not
// belong on it.
func takeStdin() (*os.File, error) {
	fd, err := unix.FcntlInt(0, unix.F_DUPFD_CLOEXEC, 3)
	if err != nil {
		return nil, err
	}
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	defer null.Close()
	for n := range 3 {
		var socket, other unix.Stat_t
		if err := errors.Join(unix.Fstat(fd, &socket), unix.Fstat(n, &other)); err != nil {
			return nil, err
		}
		if other.Dev == socket.Dev && other.Ino == socket.Ino {
			if err := unix.Dup2(int(null.Fd()), n); err != nil {
				return nil, err
			}
		}
	}
	return os.NewFile(uintptr(fd), "socket"), nil
}

// creator returns the user who created a socketpair, or who connected. macOS does not know the former: only a process
// that inherited the socketpair from the caller of sudo has it.
func creator(socket *os.File) (uid int, known bool, err error) {
	uid, err = unixsocket.PeerUID(socket)
	if err != nil && runtime.GOOS == "darwin" {
		return 0, false, nil
	}
	return uid, err == nil, err
}

// caller returns the user of sudo, or root. If the system knows who created the socketpair, it must be that user, or
// root.
func caller(socket *os.File) (uid int, err error) {
	uid = os.Getuid()
	if s := os.Getenv("SUDO_UID"); s != "" {
		if uid, err = strconv.Atoi(s); err != nil {
			return 0, fmt.Errorf("SUDO_UID: %w", err)
		}
	}
	owner, known, err := creator(socket)
	if err != nil {
		return 0, fmt.Errorf("cannot determine the owner of the socket: %w", err)
	}
	if known && owner != 0 && owner != uid {
		return 0, fmt.Errorf("user %d created the socket, but user %d started the helper", owner, uid)
	}
	return uid, nil
}

// reportReady recovers, and reports over the socket that the helper is ready, or the error. broken is an error of an
// earlier step. It leaves socket open.
func reportReady(socket *os.File, cfg LocalConfig, broken error) error {
	w, err := copyWire(socket)
	if err != nil {
		return err
	}
	defer w.Close()
	var did string
	if broken == nil {
		if did, err = Recover(cfg); err != nil {
			broken = explainNetwork(recoverAction, err)
		}
	}
	if broken != nil {
		return errors.Join(broken, w.Send(response{Error: api.AsError(broken)}, nil))
	}
	err = w.Send(response{Ready: true, Protocol: protocol, Version: version.Full()}, nil)
	if did != "" {
		line := &unixsocket.LogLine{Message: "recovered", Attrs: []string{"what", did}}
		err = errors.Join(err, w.Send(response{Log: line}, nil))
	}
	return err
}
