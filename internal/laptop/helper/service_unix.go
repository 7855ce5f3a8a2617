//go:build unix

package helper

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/process/version"
)

// errNoService means that the service of the helper is not there, or not for this user.
var errNoService = errors.New("there is no service of the root helper")

// startService connects to the service of the helper, and waits until the helper that it starts is ready. It returns
// the socket and the version of that helper. The error is errNoService if another method must start the helper; it is
// also fs.ErrPermission if the service is there, but not for this user.
func startService(ctx context.Context, path string) (*os.File, string, error) {
	conn, err := (&net.Dialer{}).DialContext(ctx, "unix", path)
	switch {
	case errors.Is(err, unix.ENOENT), errors.Is(err, unix.ECONNREFUSED), errors.Is(err, fs.ErrPermission):
		return nil, "", fmt.Errorf("%w: %w", errNoService, err)
	case err != nil:
		return nil, "", api.Errorf(api.ExitPrivilege, "cannot connect to the service of the root helper: %w", err)
	}
	defer conn.Close()
	socket, err := conn.(*net.UnixConn).File()
	if err != nil {
		return nil, "", api.Errorf(api.ExitPrivilege, "cannot use the socket of the root helper: %w", err)
	}
	first, err := awaitReady(ctx, socket)
	if err == nil && first.Protocol != protocol {
		err = api.Errorf(api.ExitPrivilege, "the service of the root helper is kubevpn %s, which this kubevpn, %s, "+
			"cannot use", first.Version, version.Full()).
			WithHint("replace the program of the service by this one:\n  kubevpn service install")
	}
	if err != nil {
		socket.Close()
		const hint = "see `" + hostservice.Log + "` for the cause, or remove the service with `kubevpn service " +
			"uninstall`; kubevpn then uses sudo"
		return nil, "", notReady(err, "the service of the root helper accepted the connection,", hint)
	}
	return socket, first.Version, nil
}

// fromListener reports whether a process accepted the socket from a listener, as systemd and launchd do: it has the
// listener's path. The ends of a socketpair have none, which the library shows as "@".
func fromListener(fd int) bool {
	addr, err := unix.Getsockname(fd)
	local, ok := addr.(*unix.SockaddrUnix)
	return err == nil && ok && strings.HasPrefix(local.Name, "/")
}

// serviceConfig is the configuration of the helper of the service. Its standard input is a connection that systemd or
// launchd accepted, and its standard error is the system's journal or a file. It has no terminal that could close, so
// one process is enough.
func serviceConfig(socket *os.File) (LocalConfig, error) {
	cfg := LocalConfig{Journal: slog.NewTextHandler(os.Stderr, nil)}
	uid, known, err := creator(socket)
	if err == nil && !known {
		err = errors.New("the system does not say who connected")
	}
	if err == nil {
		cfg.UID = uid
		slog.New(cfg.Journal).Info("connected", "uid", uid)
		err = checkNetwork(socket)
	}
	if err == nil {
		cfg.Policy, err = loadPolicy(hostservice.PolicyFile)
	}
	return cfg, err
}

// loadPolicy reads the policy. If there is no file, the defaults apply.
func loadPolicy(file string) (*Policy, error) {
	if err := hostservice.RootOwned(file); err != nil {
		return nil, api.Errorf(api.ExitPrivilege, "cannot use the policy %s: %w", file, err).
			WithHint("run as root:\n  chown -R root:root %[1]s\n  chmod -R go-w %[1]s", filepath.Dir(file))
	}
	content, err := os.ReadFile(file)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, api.Errorf(api.ExitPrivilege, "cannot read the policy: %w", err)
	}
	return parsePolicy(file, content)
}
