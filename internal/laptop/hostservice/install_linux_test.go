package hostservice

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"kubevpn/internal/api"
	"kubevpn/internal/testenv"
)

func TestOnlyNamedUsersAreAllowed(t *testing.T) {
	for _, tt := range []struct {
		group, uid string
		want       owner
		fails      string
	}{
		{"", "1000", owner{user: "1000"}, ""},
		{"root", "1000", owner{group: "root"}, ""},
		{"", "", owner{}, "root needs no service, and no user called sudo"},
		{"", "0", owner{}, "root needs no service, and no user called sudo"},
		{"nobody-has-this", "1000", owner{}, `this machine has no group "nobody-has-this"`},
		{"a\nSocketMode=0666", "1000", owner{}, `--group: "a\nSocketMode=0666" cannot be the name of a group`},
		{"%i", "1000", owner{}, `--group: "%i" cannot be the name of a group`},
	} {
		t.Setenv("SUDO_UID", tt.uid)
		got, err := allowed(t.Context(), tt.group)
		if got != tt.want || (err == nil) != (tt.fails == "") || err != nil && err.Error() != tt.fails {
			t.Errorf("%q, SUDO_UID=%s: %+v, %v", tt.group, tt.uid, got, err)
		}
		if err != nil && api.AsError(err).Code != api.ExitUsage {
			t.Errorf("%q: exit code %d", tt.group, api.AsError(err).Code)
		}
	}
}

func TestRootOwned(t *testing.T) {
	testenv.NeedRoot(t)
	dir, err := os.MkdirTemp("/var/lib", "kubevpn-test")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { os.RemoveAll(dir) })
	for _, c := range []string{"chmod 755 " + dir, "mkdir -p DIR/good DIR/writable DIR/foreign", "touch DIR/good/file DIR/writable/file DIR/foreign/file",
		"chmod 644 DIR/good/file", "chmod 775 DIR/writable", "chown 1000 DIR/foreign", "ln -s DIR/good/file DIR/good/link",
		"ln -s DIR/writable/file DIR/good/out", "ln -s DIR/good/file DIR/foreign/in"} {
		testenv.Run(t, strings.ReplaceAll(c, "DIR", dir))
	}
	for path, want := range map[string]string{
		"good/file": "", "good/link": "", "good/none": "", "good/none/none": "",
		"writable/file": "writable has mode 0775: users besides root can write to it",
		"writable/none": "writable has mode 0775: users besides root can write to it",
		"good/out":      "writable has mode 0775: users besides root can write to it",
		"foreign/in":    "foreign belongs to user 1000, not to root",
		"foreign/none":  "foreign belongs to user 1000, not to root",
	} {
		if want != "" {
			want = filepath.Join(dir, want)
		}
		got := ""
		if err := RootOwned(filepath.Join(dir, path)); err != nil {
			got = err.Error()
		}
		if got != want {
			t.Errorf("%s: %q, want %q", path, got, want)
		}
	}
}

func TestInstallNeedsSystemd(t *testing.T) {
	if Supported() == nil {
		t.Skip("systemd runs here, and this test would install the service")
	}
	err := Install(t.Context(), "")
	if err == nil || err.Error() != "systemd does not run on this machine, so it cannot start the root helper" ||
		!strings.Contains(api.AsError(err).Hint, "`kubevpn connect` uses sudo") {
		t.Errorf("%v", err)
	}
	if s, err := Status(t.Context()); err != nil || s.Installed {
		t.Errorf("status: %+v, %v", s, err)
	}
}
