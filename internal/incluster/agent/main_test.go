//go:build linux

package agent

import (
	"os"
	"testing"

	"go.uber.org/goleak"
)

// asAgent is a variable that makes the test's program run `traffic agent`.
const asAgent = "KUBEVPN_TEST_AGENT"

func TestMain(m *testing.M) {
	if os.Getenv(asAgent) != "" {
		os.Exit(beAgent())
	}
	goleak.VerifyTestMain(m)
}

func beAgent() int {
	cmd := NewCommand()
	cmd.SetArgs(os.Args[1:])
	if err := cmd.Execute(); err != nil {
		os.Stderr.WriteString("traffic: " + err.Error() + "\n")
		return 1
	}
	return 0
}
