package route

import (
	"bytes"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"

	"kubevpn/internal/testenv"
)

// inNamespace runs the rest of the calling test in a process of its own, in a network and a mount namespace
// that end with it, and reports whether this is that process.
func inNamespace(t *testing.T) bool {
	t.Helper()
	const marker = "KUBEVPN_TEST_NAMESPACE"
	if os.Getenv(marker) != "" {
		return true
	}
	testenv.NeedRoot(t)
	testenv.NeedPrograms(t, "ip")
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
	return false
}

// run executes one command line and returns what it prints.
func run(t *testing.T, line string) string {
	t.Helper()
	f := strings.Fields(line)
	out, err := exec.Command(f[0], f[1:]...).CombinedOutput()
	if err != nil {
		t.Fatalf("%s: %v\n%s", line, err, out)
	}
	return string(out)
}
