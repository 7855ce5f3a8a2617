package sandbox

import (
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"syscall"
	"testing"
	"testing/fstest"

	"golang.org/x/sys/unix"

	"kubevpn/pkg/host/subreaper"
	"kubevpn/pkg/host/unixsocket"
)

func TestNamespacesAllowedNamesTheSettingThatForbids(t *testing.T) {
	for _, tt := range []struct {
		name       string
		files      map[string]string
		root, user string // part of the error; empty: none
	}{
		{"plain", map[string]string{"sys/user/max_user_namespaces": "1000\n"}, "", ""},
		{"nothing-known", nil, "", ""},
		{"none", map[string]string{"sys/user/max_user_namespaces": "0\n"}, "user.max_user_namespaces", "user.max_user_namespaces"},
		{"debian", map[string]string{"sys/kernel/unprivileged_userns_clone": "0\n"}, "", "kernel.unprivileged_userns_clone=1"},
		{"debian-allowed", map[string]string{"sys/kernel/unprivileged_userns_clone": "1\n"}, "", ""},
		{"ubuntu", map[string]string{"sys/kernel/apparmor_restrict_unprivileged_userns": "1\n", "self/attr/current": "unconfined\n"}, "", "userns,"},
		{"ubuntu-with-profile", map[string]string{"sys/kernel/apparmor_restrict_unprivileged_userns": "1\n", "self/attr/apparmor/current": "kubevpn (unconfined)\n"}, "", ""},
		{"ubuntu-allowed", map[string]string{"sys/kernel/apparmor_restrict_unprivileged_userns": "0\n", "self/attr/current": "unconfined\n"}, "", ""},
	} {
		t.Run(tt.name, func(t *testing.T) {
			root := fstest.MapFS{}
			for name, content := range tt.files {
				root["proc/"+name] = &fstest.MapFile{Data: []byte(content)}
			}
			for _, who := range []struct {
				privileged bool
				want       string
			}{{true, tt.root}, {false, tt.user}} {
				err := namespacesAllowed(root, who.privileged)
				if (err == nil) != (who.want == "") || err != nil && (!errors.Is(err, ErrNotAllowed) || !strings.Contains(err.Error(), who.want)) {
					t.Errorf("privileged %v: %v, want %q", who.privileged, err, who.want)
				}
			}
		})
	}
}

func TestExplainNamesMissingPermission(t *testing.T) {
	for errno, want := range map[syscall.Errno]bool{unix.EPERM: true, unix.ENOSPC: true, unix.ENOMEM: false} {
		err := explain(fmt.Errorf("fork: %w", errno))
		if errors.Is(err, ErrNotAllowed) != want || !errors.Is(err, errno) {
			t.Errorf("%v: %v", errno, err)
		}
	}
}

func TestIdentityMaps(t *testing.T) {
	const rootless = "         0       1000          1\n         1     100000      65536\n"
	all, err := identity(0, true, rootless)
	want := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 0, Size: 1}, {ContainerID: 1, HostID: 1, Size: 65536}}
	if err != nil || !slices.Equal(all, want) {
		t.Errorf("%v, %v", all, err)
	}
	one, err := identity(1000, false, rootless)
	if err != nil || !slices.Equal(one, []syscall.SysProcIDMap{{ContainerID: 1000, HostID: 1000, Size: 1}}) {
		t.Errorf("%v, %v", one, err)
	}
}

func FuzzIdentity(f *testing.F) {
	f.Add("         0          0 4294967295\n")
	f.Add("0 0 x")
	f.Fuzz(func(t *testing.T, table string) {
		maps, err := identity(0, true, table)
		if err == nil && len(maps) == 0 {
			t.Error("no map and no error")
		}
		for _, m := range maps {
			if m.ContainerID != m.HostID || m.ContainerID < 0 || m.Size < 0 {
				t.Errorf("%q gives %+v", table, m)
			}
		}
	})
}

func TestInitByHand(t *testing.T) {
	if err := Init(); !errors.Is(err, errNotInit) {
		t.Errorf("Init: %v", err)
	}
}

func controlPair(t testing.TB) (a, b *unixsocket.Conn) {
	t.Helper()
	a, file, err := newPair()
	if err != nil {
		t.Fatal(err)
	}
	if b, err = unixsocket.Open(file, maxMessage); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.Close(); b.Close() })
	return a, b
}

func TestControlBoundsMessages(t *testing.T) {
	a, b := controlPair(t)
	if err := a.Send(report{Log: &unixsocket.LogLine{Message: strings.Repeat("x", maxMessage)}}, nil); err == nil {
		t.Error("Send accepted a message that is too long")
	}
	if err := a.Send(report{Error: subreaper.NewFailure(errors.New(strings.Repeat("\x00", maxMessage)))}, nil); err != nil {
		t.Errorf("a long error: %v", err)
	}
	var r report
	if _, err := b.Receive(&r, ""); err != nil || r.Error == nil {
		t.Errorf("received %+v, %v", r, err)
	}
}

func FuzzReceive(f *testing.F) {
	for _, message := range []any{order{Dial: &endpoint{"tcp", "127.0.0.1:80"}}, report{Error: subreaper.NewFailure(unix.ECONNREFUSED)}, report{Ended: &ExitStatus{Code: 1}}} {
		b, err := json.Marshal(message)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Fuzz(func(t *testing.T, b []byte) {
		var r report
		if json.Unmarshal(b, &r) == nil && r.Error != nil {
			_ = errors.Is(r.Error, unix.ENOENT)
		}
		_ = json.Unmarshal(b, new(order))
	})
}
