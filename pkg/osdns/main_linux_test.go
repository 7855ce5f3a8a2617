package osdns

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
)

// roleVariable names a function of roles that a child process runs instead of the tests.
const roleVariable = "KUBEVPN_TEST_ROLE"

func TestMain(m *testing.M) {
	roles := map[string]func() int{
		"journal":   journalRole,
		"holder":    holderRole,
		"upstream":  upstreamRole,
		"neighbour": neighbourRole,
	}
	if role, ok := roles[os.Getenv(roleVariable)]; ok {
		os.Exit(role())
	}
	goleak.VerifyTestMain(m)
}

// child is a command that runs a role of this test binary.
func child(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role)
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
	testenv.NeedPrograms(t, append(programs, "ip", "mount")...)
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
