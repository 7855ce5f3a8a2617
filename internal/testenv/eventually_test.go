package testenv

import (
	"errors"
	"testing"
	"testing/synctest"
	"time"
)

func TestPollReturnsAsSoonAsTheConditionHolds(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		late := errors.New("late")
		for _, due := range []time.Duration{0, 5 * time.Millisecond, 300 * time.Millisecond, 9 * time.Second} {
			began := time.Now()
			err := Poll(10*time.Second, func() error {
				if time.Since(began) < due {
					return late
				}
				return nil
			})
			if took := time.Since(began); err != nil || took > due+due/8+time.Millisecond {
				t.Errorf("seen %v after it was due after %v: %v", took, due, err)
			}
		}
		began := time.Now()
		if err := Poll(10*time.Second, func() error { return late }); !errors.Is(err, late) {
			t.Errorf("Poll gives %v", err)
		}
		if took := time.Since(began); took < 10*time.Second || took > 10200*time.Millisecond {
			t.Errorf("it gave up after %v", took)
		}
	})
}
