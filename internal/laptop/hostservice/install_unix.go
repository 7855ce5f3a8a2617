//go:build linux || darwin

package hostservice

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
)

// groupName matches the names of users and groups that systemd accepts, without specifiers of units.
var groupName = regexp.MustCompile(`^[a-zA-Z_][a-zA-Z0-9_.-]{0,30}$`)

// allowed returns who may use the service.
func allowed(ctx context.Context, group string) (owner, error) {
	uid := os.Getenv("SUDO_UID")
	switch {
	case group != "" && !groupName.MatchString(group):
		return owner{}, api.Errorf(api.ExitUsage, "--group: %q cannot be the name of a group", group)
	case group != "" && !groupExists(ctx, group):
		return owner{}, api.Errorf(api.ExitUsage, "this machine has no group %q", group).
			WithHint("create it, and add the users who may use kubevpn without a password:\n  "+makeGroup, group)
	case group != "":
		return owner{group: group}, nil
	case uid == "" || uid == "0":
		return owner{}, api.Errorf(api.ExitUsage, "root needs no service, and no user called sudo").
			WithHint("name the group whose members may use the service: --group NAME")
	}
	return owner{user: uid}, nil
}

// installFiles copies the program, and writes the units into dir, and the policy.
func installFiles(program, dir string, units map[string]string) error {
	unix.Umask(0o022) // users may read all of it
	if err := makeDir(programDir); err != nil {
		return err
	}
	self, err := os.Open(program)
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
		if err := replace(filepath.Join(dir, name), 0o644, strings.NewReader(content)); err != nil {
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

// replace writes a file by renaming a new one, because the old one may be a program that runs.
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

// status returns the state of the service whose unit is a file.
func status(file string, active func() bool) (api.HelperService, error) {
	content, err := os.ReadFile(file)
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
	s.Active = active()
	s.Allowed = s.Active && unix.Access(Socket, unix.W_OK) == nil
	return s, nil
}

// run executes a command of the system's service manager.
func run(ctx context.Context, argv ...string) error {
	out, err := exec.CommandContext(ctx, argv[0], argv[1:]...).CombinedOutput()
	if err != nil {
		return api.Errorf(api.ExitPrivilege, "`%s` failed: %w: %s", strings.Join(argv, " "), err,
			strings.Join(strings.Fields(string(out)), " "))
	}
	return nil
}
