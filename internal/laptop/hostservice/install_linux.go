package hostservice

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"path/filepath"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
	"kubevpn/pkg/host/osdns"
)

// Install installs the service, or replaces it, for the members of a group. If group is empty, it is for the user who
// called sudo. Install requires root. The policy stays as it is if there is one.
func Install(ctx context.Context, group string) error {
	if err := Supported(); err != nil {
		return err
	}
	who, err := allowed(ctx, group)
	if err != nil {
		return err
	}
	if err := installFiles("/proc/self/exe", unitDir, units(version.Full(), who)); err != nil {
		return api.Errorf(api.ExitPrivilege, "cannot install the service: %w", err)
	}
	for _, args := range [][]string{{"daemon-reload"}, {"enable", socketName}, {"restart", socketName}} {
		if err := systemctl(ctx, args...); err != nil {
			return err
		}
	}
	return nil
}

// Supported returns an error unless systemd manages the services of this machine: sd_booted(3).
func Supported() error {
	if info, err := os.Lstat("/run/systemd/system"); err == nil && info.IsDir() {
		return nil
	}
	return api.Errorf(api.ExitPrivilege, "systemd does not run on this machine, so it cannot start the root helper").
		WithHint("without the service, `kubevpn connect` uses sudo; `kubevpn run` and `kubevpn connect --socks` need " +
			"no root")
}

// makeGroup is what an administrator runs to make a group of users of the service.
const makeGroup = "groupadd --system %[1]s\n  usermod --append --groups %[1]s USER"

// groupExists reports whether the machine has a group. It does not use os/user, which without cgo does not know the
// groups of a directory service.
func groupExists(ctx context.Context, group string) bool {
	return exec.CommandContext(ctx, "getent", "group", group).Run() == nil
}

// Uninstall ends the connections of the service and removes it, with its policy. Without a service it does nothing.
// Uninstall requires root.
func Uninstall(ctx context.Context) error {
	unit := filepath.Join(unitDir, socketName)
	if _, err := os.Lstat(unit); err == nil && Supported() == nil {
		err := systemctl(ctx, "disable", "--now", socketName)
		if systemctl(ctx, "stop", instances) != nil { // also if an instance ended after the pattern had matched it
			err = errors.Join(err, systemctl(ctx, "stop", instances))
		}
		if err != nil {
			return err
		}
	}
	var errs []error
	service := filepath.Join(unitDir, serviceName)
	// The unit of the socket is the last: while it is there, a second try removes what the first could not.
	for _, path := range []string{service, service + ".d", unit + ".d", programDir, policyDir, Socket, unit} {
		errs = append(errs, os.RemoveAll(path))
	}
	_ = os.Remove(filepath.Dir(programDir)) // fails unless it is empty
	errs = append(errs, osdns.Remove(osdns.Options{}))
	if Supported() == nil {
		errs = append(errs, systemctl(ctx, "daemon-reload"))
	}
	if err := errors.Join(errs...); err != nil {
		return api.Errorf(api.ExitPrivilege, "cannot remove the whole service: %w", err)
	}
	return nil
}

// Status returns the state of the service. It requires no privilege.
func Status(ctx context.Context) (api.HelperService, error) {
	return status(filepath.Join(unitDir, socketName), func() bool {
		return exec.CommandContext(ctx, "systemctl", "--quiet", "is-active", socketName).Run() == nil
	})
}

func systemctl(ctx context.Context, args ...string) error {
	return run(ctx, append([]string{"systemctl"}, args...)...)
}
