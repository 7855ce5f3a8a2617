package testenv

import (
	"fmt"
	"testing"
	"time"
)

// Poll calls check until it gives nil, or for longer than within: then it gives check's last error. It pauses in
// between for an eighth of the time that has passed, so that what happens soon is seen soon, and up to 100 ms.
func Poll(within time.Duration, check func() error) error {
	began := time.Now()
	for {
		err := check()
		if err == nil {
			return nil
		}
		passed := time.Since(began)
		if passed > within {
			return fmt.Errorf("after %v: %w", passed.Round(time.Millisecond), err)
		}
		time.Sleep(min(time.Millisecond+passed/8, 100*time.Millisecond))
	}
}

// Eventually polls check, and ends the test unless it gives nil within the time.
func Eventually(t testing.TB, within time.Duration, check func() error) {
	t.Helper()
	if err := Poll(within, check); err != nil {
		t.Fatal(err)
	}
}

// Until waits for a condition, and ends the test if that takes longer than anything may on a machine that is busy.
func Until(t testing.TB, what string, ok func() bool) {
	t.Helper()
	Eventually(t, 20*time.Second, func() error {
		if !ok() {
			return fmt.Errorf("still not: %s", what)
		}
		return nil
	})
}
