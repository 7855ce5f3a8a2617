//go:build unix

package config

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

func TestLocateFollowsXDG(t *testing.T) {
	own := t.TempDir()
	user := dirs{home: "/home/ann", runtime: "/tmp/kubevpn-1000"}
	tests := []struct {
		name string
		env  map[string]string
		dirs dirs
		want Paths
	}{
		{"plain-user", nil, user, Paths{"/home/ann/.config/kubevpn/config.yaml", "/tmp/kubevpn-1000", "/home/ann/.local/state/kubevpn"}},
		{"root", nil, dirs{home: "/home/ann", runtime: "/run/kubevpn", state: "/var/lib/kubevpn"},
			Paths{"/home/ann/.config/kubevpn/config.yaml", "/run/kubevpn", "/var/lib/kubevpn"}},
		{"xdg", map[string]string{"XDG_RUNTIME_DIR": own, "XDG_CONFIG_HOME": "/c", "XDG_STATE_HOME": own}, user,
			Paths{"/c/kubevpn/config.yaml", own + "/kubevpn", own + "/kubevpn"}},
		{"relative-xdg-is-ignored", map[string]string{"XDG_RUNTIME_DIR": "r", "XDG_CONFIG_HOME": "c", "XDG_STATE_HOME": "s"}, user,
			Paths{"/home/ann/.config/kubevpn/config.yaml", "/tmp/kubevpn-1000", "/home/ann/.local/state/kubevpn"}},
	}
	for _, tt := range tests {
		t.Run(tt.name, func(t *testing.T) {
			got, err := locate(func(k string) string { return tt.env[k] }, tt.dirs)
			if err != nil || got != tt.want {
				t.Errorf("locate = %+v, %v; want %+v", got, err, tt.want)
			}
		})
	}
}

func TestLocateRejectsUnusableDirectories(t *testing.T) {
	long := "/tmp/" + strings.Repeat("x", 100)
	if _, err := locate(func(k string) string { return map[string]string{"XDG_RUNTIME_DIR": long}[k] }, dirs{home: "/h"}); err == nil ||
		!strings.Contains(err.Error(), "bytes too long for a socket") {
		t.Errorf("error = %v, want the path's length", err)
	}
	if _, err := locate(func(string) string { return "" }, dirs{runtime: "/tmp/k"}); err == nil || err.Error() != "cannot determine the home directory" {
		t.Errorf("error = %v, want that there is no home", err)
	}
}

func TestLocateIgnoresDirectoriesOfOtherUsers(t *testing.T) {
	testenv.NeedRoot(t) // to give a directory away
	theirs := t.TempDir()
	if err := os.Chown(theirs, 12345, 12345); err != nil {
		t.Fatal(err)
	}
	got, err := locate(func(k string) string {
		return map[string]string{"XDG_RUNTIME_DIR": theirs, "XDG_STATE_HOME": theirs}[k]
	},
		dirs{home: "/root", runtime: "/run/kubevpn", state: "/var/lib/kubevpn"})
	if err != nil || got.RuntimeDir != "/run/kubevpn" || got.StateDir != "/var/lib/kubevpn" {
		t.Errorf("locate = %+v, %v; want nothing in another user's directories", got, err)
	}
	wantDaemonError(t, Paths{RuntimeDir: theirs}.MakeRuntimeDir(), "belongs to user 12345")
}

func TestMakeRuntimeDirRejectsUnsafeDirectories(t *testing.T) {
	base := t.TempDir()
	p := Paths{RuntimeDir: filepath.Join(base, "new", "kubevpn")}
	if err := p.CheckRuntimeDir(); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("checking a missing directory: %v, want fs.ErrNotExist", err)
	}
	for range 2 { // creating it, and finding it
		if err := p.MakeRuntimeDir(); err != nil {
			t.Fatal(err)
		}
	}
	if info, err := os.Stat(p.RuntimeDir); err != nil || info.Mode().Perm() != 0o700 {
		t.Errorf("mode = %v, %v; want 0700", info.Mode(), err)
	}

	link := filepath.Join(base, "link")
	open := filepath.Join(base, "open")
	file := filepath.Join(base, "file")
	if err := errors.Join(os.Symlink(p.RuntimeDir, link), os.Mkdir(open, 0o755), os.WriteFile(file, nil, 0o600)); err != nil {
		t.Fatal(err)
	}
	wantDaemonError(t, Paths{RuntimeDir: link}.MakeRuntimeDir(), "is not a directory")
	wantDaemonError(t, Paths{RuntimeDir: file}.MakeRuntimeDir(), "is not a directory")
	wantDaemonError(t, Paths{RuntimeDir: open}.MakeRuntimeDir(), "has mode 0755, but must not be accessible to others (0700)")
}

func wantDaemonError(t *testing.T, err error, part string) {
	t.Helper()
	var e *api.Error
	if !errors.As(err, &e) || e.Code != api.ExitDaemon || !strings.Contains(e.Message, part) {
		t.Errorf("error = %v, want one with exit code %d and %q", err, api.ExitDaemon, part)
	}
}
