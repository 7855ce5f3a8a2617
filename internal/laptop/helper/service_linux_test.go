package helper

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/google/go-cmp/cmp"

	"kubevpn/internal/api"
	"kubevpn/internal/laptop/hostservice"
	"kubevpn/internal/testenv"
	"kubevpn/pkg/host/unixsocket"
)

const otherUID = testerUID + 1

// listen does what systemd does for the service: it starts exe for each connection to a socket, whose path it returns.
func listen(t *testing.T, exe string, env ...string) string {
	t.Helper()
	path := filepath.Join(filepath.Dir(exe), "helper.sock")
	l, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	ended := make(chan error)
	go func() {
		for {
			conn, err := l.AcceptUnix()
			if err != nil {
				ended <- err
				return
			}
			stdin, err := conn.File()
			conn.Close()
			if err != nil {
				ended <- err
				return
			}
			cmd := exec.Command(exe, "helper")
			cmd.Stdin, cmd.Stdout, cmd.Stderr = stdin, stdin, stdin // launchd may do so; systemd sets only the first
			cmd.Env = append(os.Environ(), env...)
			cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
			err = cmd.Start()
			stdin.Close()
			if err == nil {
				go cmd.Wait()
			}
		}
	}()
	t.Cleanup(func() {
		l.Close()
		if err := <-ended; !errors.Is(err, net.ErrClosed) {
			t.Error(err)
		}
	})
	if err := os.Chmod(path, 0o666); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestServiceStartsTheHelperWithoutSudo(t *testing.T) {
	if !testenv.InNamespace(t, "nft", "ps") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	before := machine(t)
	exe := installed(t)
	path := listen(t, exe)
	x := connect(t, exe, false, "HELPER_SERVICE="+path, "PATH=/nowhere")
	if got, want := x.line(t), "announced Using the root helper's service, kubevpn "; !strings.HasPrefix(got, want) {
		t.Errorf("got %s", got)
	}
	// The state of the role has a public network that the user allowed.
	want := "error: the root helper refuses the route 2001:db8::/32: it is not in private address space, and not in a network that " +
		"/etc/kubevpn/helper.yaml allows (link kubevpn0)\n"
	if diff := cmp.Diff(want, x.line(t)); diff != "" {
		t.Errorf("without a policy: -want +got\n%s", diff)
	}
	noHelper(t, exe)

	if err := errors.Join(os.MkdirAll(filepath.Dir(hostservice.PolicyFile), 0o755),
		os.WriteFile(hostservice.PolicyFile, []byte("networks: [2001:db8::/32, 203.0.113.0/24]\nallQueries: true\n"), 0o644)); err != nil {
		t.Fatal(err)
	}
	x = connect(t, exe, false, "HELPER_SERVICE="+path, "PATH=/nowhere")
	_ = x.line(t)
	if got := x.line(t); got != connected {
		t.Fatal(got)
	}
	if tables := testenv.Run(t, "nft list tables"); !strings.Contains(tables, fmt.Sprintf("kubevpn-%d-", testerUID)) {
		t.Errorf("no table has the user of the peer:\n%s", tables)
	}
	if err := x.cmd.Process.Kill(); err != nil {
		t.Fatal(err)
	}
	noHelper(t, exe)
	testenv.WaitGone(t, "kubevpn0")
	if err := os.RemoveAll(filepath.Dir(hostservice.PolicyFile)); err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff(before, machine(t)); diff != "" {
		t.Errorf("left behind: -before +after\n%s", diff)
	}
}

func TestServiceRejectsAPolicyThatOthersCanChange(t *testing.T) {
	if !testenv.InNamespace(t, "nft") {
		return
	}
	privateEtc(t, "nameserver 192.0.2.1\n")
	dir := filepath.Dir(hostservice.PolicyFile)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(hostservice.PolicyFile, []byte("networks: [203.0.113.0/24]\n"), 0o644); err != nil {
		t.Fatal(err)
	}
	for _, tt := range []struct{ change, undo, want string }{
		{"chmod 666 " + hostservice.PolicyFile, "chmod 644 " + hostservice.PolicyFile, hostservice.PolicyFile + " has mode 0666: users besides root can write to it"},
		{"chown 1000 " + hostservice.PolicyFile, "chown 0 " + hostservice.PolicyFile, hostservice.PolicyFile + " belongs to user 1000, not to root"},
		{"chmod 777 " + dir, "chmod 755 " + dir, dir + " has mode 0777: users besides root can write to it"},
		{"chown 1000 " + dir, "chown 0 " + dir, dir + " belongs to user 1000, not to root"},
	} {
		testenv.Run(t, tt.change)
		_, err := loadPolicy(hostservice.PolicyFile)
		if want := "cannot use the policy " + hostservice.PolicyFile + ": " + tt.want; err == nil || err.Error() != want {
			t.Errorf("%s: got %v\nwant %s", tt.change, err, want)
		}
		testenv.Run(t, tt.undo)
	}
	p, err := loadPolicy(hostservice.PolicyFile)
	if err != nil || len(p.Networks) != 1 {
		t.Errorf("%v, %v", p, err)
	}
	// A helper that cannot use the policy says so to the user.
	testenv.Run(t, "chmod 666 "+hostservice.PolicyFile)
	_, _, err = startService(t.Context(), listen(t, installed(t)))
	if err == nil || !strings.HasPrefix(err.Error(), "cannot use the policy ") || api.AsError(err).Code != api.ExitPrivilege {
		t.Errorf("connect: %v", err)
	}
}

// answering is a service that says one thing to each connection and closes it.
func answering(t *testing.T, says any) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s")
	l, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { l.Close() })
	go func() {
		for {
			conn, err := l.Accept()
			if err != nil {
				return
			}
			if says != nil {
				_ = unixsocket.NewConn(conn.(*net.UnixConn), maxMessage).Send(says, nil)
			}
			conn.Close()
		}
	}()
	return path
}

func TestServiceThatCannotServeIsAnError(t *testing.T) {
	stale := filepath.Join(t.TempDir(), "stale")
	if err := os.WriteFile(stale, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	for name, tt := range map[string]struct{ path, want string }{
		"none":   {filepath.Join(t.TempDir(), "none"), "there is no service of the root helper: "},
		"stale":  {stale, "there is no service of the root helper: "},
		"closed": {answering(t, nil), "the service of the root helper accepted the connection, but is not ready: it ended immediately"},
		"older": {answering(t, response{Ready: true, Version: "0.0.9"}),
			"the service of the root helper is kubevpn 0.0.9, which this kubevpn, "},
		"newer": {answering(t, response{Ready: true, Protocol: protocol + 1, Version: "9.0.0"}),
			"the service of the root helper is kubevpn 9.0.0, which this kubevpn, "},
		"its error": {answering(t, response{Error: api.Errorf(api.ExitNetwork, "no")}), "no"},
	} {
		_, _, err := startService(context.Background(), tt.path)
		if err == nil || !strings.HasPrefix(err.Error(), tt.want) || errors.Is(err, errNoService) != strings.HasPrefix(tt.want, "there is no") {
			t.Errorf("%s: %v", name, err)
		}
		if strings.Contains(tt.want, "which this") && !strings.Contains(api.AsError(err).Hint, "kubevpn service install") {
			t.Errorf("%s: the hint is %q", name, api.AsError(err).Hint)
		}
	}
}
