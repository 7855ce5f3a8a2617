package testenv

import (
	"fmt"
	"testing"
	"time"
)

// Poll calls check until it returns nil. After the time within it returns the last error of check. Its pauses grow
// with the time that has passed, up to 100 ms. A check that takes longer, such as a command, gets a pause of its own
// duration, up to half a second: it must not take the processors from what it waits for.
func Poll(within time.Duration, check func() error) error {
	began := time.Now()
	for {
		asked := time.Now()
		err := check()
		if err == nil {
			return nil
		}
		passed, took := time.Since(began), time.Since(asked)
		if passed > within {
			return fmt.Errorf("after %v: %w", passed.Round(time.Millisecond), err)
		}
		time.Sleep(max(min(time.Millisecond+passed/8, 100*time.Millisecond), min(took, 500*time.Millisecond)))
	}
}

// Eventually polls check, and fails the test unless it returns nil within the time.
func Eventually(t testing.TB, within time.Duration, check func() error) {
	t.Helper()
	if err := Poll(within, check); err != nil {
		t.Fatal(err)
	}
}

// Until waits for a condition, and fails the test after 20 seconds, which is enough on a busy machine.
func Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	Eventually(t, 20*time.Second, func() error {
		if !ok() {
			return fmt.Errorf("still not: %s", what)
		}
		return nil
	})
}
