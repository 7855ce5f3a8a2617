package session

import (
	"testing"
	"testing/synctest"
	"time"

	"kubevpn/internal/api"
)

// A short name that is asked for as soon as it says "Connected" must not go where outside names go.
func TestShortNamesAreAwaited(t *testing.T) {
	for _, tt := range []struct {
		name string
		tell func(*names)
		want time.Duration
	}{
		{"told", func(n *names) { n.apply(fromManager, api.NameDelta{Reset: true}) }, time.Second},
		{"nobody_may_tell", (*names).giveUp, time.Second},
		{"not_told", func(*names) {}, namesTimeout},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				s := bare(t)
				time.AfterFunc(time.Second, func() { tt.tell(s.names) })
				start := time.Now()
				if err := s.awaitNames(t.Context()); err != nil {
					t.Fatal(err)
				}
				if took := time.Since(start); took != tt.want {
					t.Errorf("waited %v, want %v", took, tt.want)
				}
			})
		})
	}
}
