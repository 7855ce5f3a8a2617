package testenv

import (
	"os"
	"strings"
)

// EndAtOnce returns an environment variable for a child process. If the child is built with the race detector, the
// variable makes it exit at once instead of after a second.
func EndAtOnce() string {
	return "GORACE=" + strings.TrimSpace(os.Getenv("GORACE")+" atexit_sleep_ms=0")
}
