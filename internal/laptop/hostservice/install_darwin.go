package hostservice

import (
	"context"
	"errors"
	"os"
	"os/exec"
	"os/user"
	"path/filepath"
	"strconv"

	"kubevpn/internal/api"
	"kubevpn/internal/process/version"
)

const (
	jobDir = "/Library/LaunchDaemons"
	// makeGroup is what an administrator runs to make a group of users of the service.
	makeGroup = "dseditgroup -o create %[1]s\n  dseditgroup -o edit -a USER -t user %[1]s"
)

// Supported returns nil: each macOS has launchd.
func Supported() error { return nil }

// Install installs the service, or replaces it, for the members of a group. If group is empty, it is for the user who
// called sudo. Install requires root. The policy stays as it is if there is one.
func Install(ctx context.Context, group string) error {
	who, err := allowed(ctx, group)
	if err != nil {
		return err
	}
	number, err := numberOf(who)
	if err != nil {
		return err
	}
	program, err := os.Executable()
	if err == nil {
		err = installFiles(program, jobDir, map[string]string{plistName: job(version.Full(), who, number)})
	}
	if err != nil {
		return api.Errorf(api.ExitPrivilege, "cannot install the service: %w", err)
	}
	if loaded(ctx) {
		if err := launchctl(ctx, "bootout", "system/"+label); err != nil {
			return err
		}
	}
	return launchctl(ctx, "bootstrap", "system", filepath.Join(jobDir, plistName))
}

func groupExists(_ context.Context, group string) bool {
	_, err := user.LookupGroup(group)
	return err == nil
}

// numberOf returns the number of the user or group.
func numberOf(who owner) (int, error) {
	text := who.user
	if who.group != "" {
		g, err := user.LookupGroup(who.group)
		if err != nil {
			return 0, api.Errorf(api.ExitUsage, "cannot look up the group %s: %w", who.group, err)
		}
		text = g.Gid
	}
	n, err := strconv.Atoi(text)
	if err != nil {
		return 0, api.Errorf(api.ExitUsage, "SUDO_UID: %w", err)
	}
	return n, nil
}

// Uninstall ends the connections of the service and removes it, with its policy. Without a service it does nothing.
// Uninstall requires root.
func Uninstall(ctx context.Context) error {
	if loaded(ctx) {
		if err := launchctl(ctx, "bootout", "system/"+label); err != nil {
			return err
		}
	}
	var errs []error
	for _, path := range []string{filepath.Join(jobDir, plistName), programDir, policyDir, Socket} {
		errs = append(errs, os.RemoveAll(path))
	}
	if err := errors.Join(errs...); err != nil {
		return api.Errorf(api.ExitPrivilege, "cannot remove the whole service: %w", err)
	}
	return nil
}

// Status returns the state of the service. It requires no privilege.
func Status(ctx context.Context) (api.HelperService, error) {
	return status(filepath.Join(jobDir, plistName), func() bool { return loaded(ctx) })
}

// loaded reports whether launchd has the job.
func loaded(ctx context.Context) bool {
	return exec.CommandContext(ctx, "launchctl", "print", "system/"+label).Run() == nil
}

func launchctl(ctx context.Context, args ...string) error {
	return run(ctx, append([]string{"launchctl"}, args...)...)
}
