package helper

import (
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

// testTimeout limits the wait for an expected condition.
const testTimeout = 20 * time.Second

// TestMain runs the helper or a role if a test has started this binary as a child process.
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
	cmd.Env = append(append(os.Environ(), roleVariable+"="+role, testenv.EndAtOnce()), env...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	return cmd
}

// machine returns the configuration of this namespace that kubevpn may change, without counters.
func machine(t *testing.T) string {
	t.Helper()
	var b strings.Builder
	for _, cmd := range []string{
		"ip -j addr", "ip -j -4 route show table all", "ip -j -6 route show table all", "ip -j -4 rule", "ip -j -6 rule",
		"nft list ruleset", "stat -L -c %Y.%y.%a.%u.%g.%s /etc/resolv.conf", "cat /etc/resolv.conf", "cat /etc/hosts",
	} {
		b.WriteString("# " + cmd + "\n" + testenv.Run(t, cmd) + "\n")
	}
	return b.String()
}

// privateEtc mounts copies of /etc and /var/lib in the mount namespace of the test.
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
		testenv.Run(t, c)
	}
	t.Cleanup(func() { testenv.Run(t, "umount -l /etc"); testenv.Run(t, "umount -l /var/lib") })
	if err := os.WriteFile("/etc/resolv.conf", []byte(resolvConf), 0o644); err != nil {
		t.Fatal(err)
	}
	old := time.Date(2024, 2, 29, 12, 0, 0, 123456789, time.UTC)
	if err := errors.Join(os.Chtimes("/etc/resolv.conf", old, old)); err != nil {
		t.Fatal(err)
	}
}
