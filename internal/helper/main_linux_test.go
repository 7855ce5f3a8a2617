package helper

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
)

// roleVariable names a function of roles that a child process runs instead of the tests.
const roleVariable = "KUBEVPN_TEST_ROLE"

// TestMain makes this binary what a test's child process must be: `EXE helper` is the helper itself.
func TestMain(m *testing.M) {
	if len(os.Args) == 2 && os.Args[1] == "helper" {
		ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
		defer stop()
		if err := Main(ctx); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	roles := map[string]func() error{"daemon": daemonRole, "serve": serveRole, "connect": connectRole}
	if role, ok := roles[os.Getenv(roleVariable)]; ok {
		if err := role(); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	goleak.VerifyTestMain(m)
}

// child is a command that runs a role of this test binary.
func child(role string, env ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe")
	cmd.Env = append(append(os.Environ(), roleVariable+"="+role), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	return cmd
}

// inNamespace runs the rest of the calling test in a process of its own, in a network and a mount namespace
// that end with it, and reports whether this is that process.
func inNamespace(t *testing.T, programs ...string) bool {
	t.Helper()
	const marker = "KUBEVPN_TEST_NAMESPACE"
	if os.Getenv(marker) != "" {
		run(t, "mount --make-rprivate /")
		run(t, "ip link set lo up")
		return true
	}
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, append(programs, "ip", "nft", "mount")...)
	cmd := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), marker+"=1")
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("in its namespace: %v\n%s", err, out)
	}
	if !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Fatalf("it did not run in its namespace:\n%s", out)
	}
	if testing.Verbose() {
		t.Logf("%s", out)
	}
	return false
}

// run executes one command line and returns what it prints.
func run(t testing.TB, line string) string {
	t.Helper()
	f := strings.Fields(line)
	out, err := exec.Command(f[0], f[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return string(out)
}

// eventually waits until what returns nothing, and fails with its last answer.
func eventually(t testing.TB, what func() string) {
	t.Helper()
	var last string
	for deadline := time.Now().Add(10 * time.Second); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if last = what(); last == "" {
			return
		}
	}
	t.Fatal(last)
}

// machine is all that kubevpn may change of this namespace, without counters.
func machine(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, cmd := range []string{
		"ip -j addr", "ip -j -4 route show table all", "ip -j -6 route show table all", "ip -j -4 rule", "ip -j -6 rule",
		"nft list ruleset", "stat -L -c %Y.%y.%a.%u.%g.%s /etc/resolv.conf", "cat /etc/resolv.conf", "cat /etc/hosts",
	} {
		b.WriteString("# " + cmd + "\n" + run(t, cmd) + "\n")
	}
	return b.String()
}

// privateEtc gives the test's mount namespace an /etc, and a /var/lib, of its own.
func privateEtc(t *testing.T, resolvConf string) {
	t.Helper()
	dir := t.TempDir()
	for _, c := range []string{
		"cp -a /etc " + dir + "/etc",
		"mount --bind " + dir + "/etc /etc",
		"mkdir " + dir + "/lib",
		"mount --bind " + dir + "/lib /var/lib",
		"rm -f /etc/resolv.conf",
	} {
		run(t, c)
	}
	t.Cleanup(func() { run(t, "umount -l /etc"); run(t, "umount -l /var/lib") })
	if err := os.WriteFile("/etc/resolv.conf", []byte(resolvConf), 0o644); err != nil {
		t.Fatal(err)
	}
	old := time.Date(2024, 2, 29, 12, 0, 0, 123456789, time.UTC)
	if err := errors.Join(os.Chtimes("/etc/resolv.conf", old, old)); err != nil {
		t.Fatal(err)
	}
}
