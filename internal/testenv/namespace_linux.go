package testenv

import (
	"bytes"
	"net"
	"os"
	"os/exec"
	"syscall"
	"testing"
)

// InNamespace runs the rest of the calling test in a process of its own, in a network and a mount namespace that end
// with it, and reports whether this is that process: the caller returns unless it is. Loopback is up there, and mounts
// do not leave. The programs are needed besides ip and mount.
//
//	if !testenv.InNamespace(t, "nft") {
//		return
//	}
//
// A namespace for a part of a test, or several of them in one process, makes tuntest.NewNamespace.
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

// WaitGone waits until a link has gone: the kernel may finish removing a device after its owner's close, or end.
func WaitGone(t testing.TB, link string) {
	t.Helper()
	Until(t, link+" is gone", func() bool {
		_, err := net.InterfaceByName(link)
		return err != nil
	})
}
