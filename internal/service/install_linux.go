package service

import (
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"regexp"
	"strings"

	"golang.org/x/sys/unix"

	"kubevpn/internal/api"
	"kubevpn/internal/version"
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
	if err := installFiles(units(version.Full(), who)); err != nil {
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

// groupName matches the names of users and groups that systemd accepts, without specifiers of units.
var groupName = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_.-]{0,30}$`)

// allowed returns who may use the service.
func allowed(ctx context.Context, group string) (owner, error) {
	uid := os.Getenv("SUDO_UID")
	switch {
	case group != "" && !groupName.MatchString(group):
		return owner{}, api.Errorf(api.ExitUsage, "--group: %q cannot be the name of a group", group)
	case group != "":
		// Not os/user, which without cgo does not know the groups of a directory service.
		if err := exec.CommandContext(ctx, "getent", "group", group).Run(); err != nil {
			return owner{}, api.Errorf(api.ExitUsage, "this machine has no group %q", group).
				WithHint("create it, and add the users who may use kubevpn without a password:\n"+
					"  groupadd --system %[1]s\n  usermod --append --groups %[1]s USER", group)
		}
		return owner{group: group}, nil
	case uid == "" || uid == "0":
		return owner{}, api.Errorf(api.ExitUsage, "root needs no service, and no user called sudo").
			WithHint("name the group whose members may use the service: --group NAME")
	}
	return owner{user: uid}, nil
}

// installFiles copies this program and writes the units and the policy.
func installFiles(units map[string]string) error {
	if err := makeDir(programDir); err != nil {
		return err
	}
	self, err := os.Open("/proc/self/exe") // the program that runs, whatever its path names now
	if err != nil {
		return err
	}
	defer self.Close()
	if err := replace(Program, 0o755, self); err != nil {
		return err
	}
	if err := makeDir(policyDir); err != nil {
		return err
	}
	if _, err := os.Lstat(PolicyFile); errors.Is(err, fs.ErrNotExist) {
		if err := replace(PolicyFile, 0o644, strings.NewReader(defaultPolicy)); err != nil {
			return err
		}
	}
	for name, content := range units {
		if err := replace(filepath.Join(unitDir, name), 0o644, strings.NewReader(content)); err != nil {
			return err
		}
	}
	return nil
}

// makeDir creates a directory that only root can change, and returns an error if others can.
func makeDir(dir string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	return RootOwned(dir)
}

// replace writes a file by renaming a new one, because the old one may run.
func replace(path string, mode fs.FileMode, content io.Reader) error {
	f, err := os.CreateTemp(filepath.Dir(path), ".kubevpn-")
	if err != nil {
		return err
	}
	defer os.Remove(f.Name()) // fails after the rename
	_, err = io.Copy(f, content)
	if err = errors.Join(err, f.Chmod(mode), f.Sync(), f.Close()); err != nil {
		return fmt.Errorf("writing %s: %w", path, err)
	}
	return os.Rename(f.Name(), path)
}

// Uninstall ends the connections of the service and removes it, with its policy. Without a service it does nothing.
// Uninstall requires root.
func Uninstall(ctx context.Context) error {
	unit := filepath.Join(unitDir, socketName)
	if _, err := os.Lstat(unit); err == nil && Supported() == nil {
		err := systemctl(ctx, "disable", "--now", socketName)
		if err = errors.Join(err, systemctl(ctx, "stop", instances)); err != nil {
			return err
		}
	}
	var errs []error
	for _, path := range []string{unit, filepath.Join(unitDir, serviceName), unit + ".d",
		filepath.Join(unitDir, serviceName+".d"), programDir, policyDir, Socket} {
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
	content, err := os.ReadFile(filepath.Join(unitDir, socketName))
	if errors.Is(err, fs.ErrNotExist) {
		return api.HelperService{}, nil
	}
	if err != nil {
		return api.HelperService{}, api.Errorf(api.ExitUnexpected, "cannot read the unit of the service: %w", err)
	}
	s := parseUnit(string(content))
	if u, err := user.LookupId(s.User); err == nil {
		s.User = u.Username
	}
	s.Active = exec.CommandContext(ctx, "systemctl", "--quiet", "is-active", socketName).Run() == nil
	s.Allowed = s.Active && unix.Access(Socket, unix.W_OK) == nil
	return s, nil
}

func systemctl(ctx context.Context, args ...string) error {
	out, err := exec.CommandContext(ctx, "systemctl", args...).CombinedOutput()
	if err != nil {
		return api.Errorf(api.ExitPrivilege, "`systemctl %s` failed: %w: %s", strings.Join(args, " "), err,
			strings.Join(strings.Fields(string(out)), " "))
	}
	return nil
}
