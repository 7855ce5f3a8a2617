package testenv

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
)

// InNamespace runs the calling test again in a child process with its own network and mount namespaces, and reports
// whether this is the child: the caller must return if it is not. In the child, loopback is up and mounts are
// private. The test is skipped without ip, mount and the given programs.
//
//	if !testenv.InNamespace(t, "nft") {
//		return
//	}
//
// Use tuntest.NewNamespace for a namespace for a part of a test, or for several namespaces in one process.
func InNamespace(t *testing.T, programs ...string) bool {
	t.Helper()
	const marker = "KUBEVPN_TEST_NAMESPACE"
	if os.Getenv(marker) != "" {
		Run(t, "mount --make-rprivate /")
		Run(t, "ip link set lo up")
		return true
	}
	NeedRoot(t)
	NeedPrograms(t, append(programs, "ip", "mount")...)
	cmd := exec.Command("/proc/self/exe", "-test.run", "^"+t.Name()+"$", "-test.v", "-test.count=1")
	cmd.Env = append(os.Environ(), marker+"=1", EndAtOnce())
	cmd.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags: syscall.CLONE_NEWNET | syscall.CLONE_NEWNS, Pdeathsig: syscall.SIGKILL,
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		t.Fatalf("the test in its namespace failed: %v\n%s", err, out)
	}
	if !bytes.Contains(out, []byte("--- PASS: "+t.Name())) {
		t.Fatalf("the test did not run in its namespace:\n%s", out)
	}
	if testing.Verbose() {
		t.Logf("%s", out)
	}
	return false
}

// WaitGone waits until a link is gone: the kernel may remove a device only after its owner's Close has returned.
func WaitGone(t testing.TB, link string) {
	t.Helper()
	Until(t, link+" is gone", func() bool {
		_, err := net.InterfaceByName(link)
		return err != nil
	})
}

// Ruleset returns the rules that nft lists, without the owner's name that it adds on some kernels.
func Ruleset(t testing.TB) string {
	t.Helper()
	var b strings.Builder
	for line := range strings.Lines(Run(t, "nft list ruleset")) {
		line, _, _ = strings.Cut(line, " # progname")
		b.WriteString(strings.TrimRight(line, "\n") + "\n")
	}
	return b.String()
}
