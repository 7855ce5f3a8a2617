package osdns

import (
	"os"
	"os/exec"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
)

// roleVariable names a function of roles that a child process runs instead of the tests.
const roleVariable = "KUBEVPN_TEST_ROLE"

// testTimeout limits the wait for an expected event.
const testTimeout = 20 * time.Second

func TestMain(m *testing.M) {
	roles := map[string]func() int{
		"journal":   journalRole,
		"holder":    holderRole,
		"upstream":  upstreamRole,
		"neighbour": neighbourRole,
		"scutil":    scutilRole,
	}
	if role, ok := roles[os.Getenv(roleVariable)]; ok {
		os.Exit(role())
	}
	goleak.VerifyTestMain(m)
}

// child returns a command that runs a role of this test binary.
func child(role string, args ...string) *exec.Cmd {
	cmd := exec.Command("/proc/self/exe", args...)
	cmd.Env = append(os.Environ(), roleVariable+"="+role, testenv.EndAtOnce())
	cmd.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	cmd.Stderr = os.Stderr
	return cmd
}
