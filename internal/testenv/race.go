package testenv

import (
	"os"
	"strings"
	"testing"
)

// WithoutRace skips a test under the race detector, for the given reason. The part "plain" of scripts/test runs such
// tests without it.
func WithoutRace(t *testing.T, reason string) {
	t.Helper()
	if raceEnabled {
		t.Skip(reason)
	}
}

// EndAtOnce returns an environment variable for a child process. If the child is built with the race detector, the
// variable makes it exit at once instead of after a second.
func EndAtOnce() string {
	return "GORACE=" + strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0")
}
