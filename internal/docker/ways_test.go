package docker

import (
	"syscall"
	"testing"
	"testing/synctest"
	"time"
)

func TestWays(t *testing.T) {
	const pause = way(0)
	for _, tt := range []struct {
		name string
		come []way
		want int // how many are passed on
	}{
		{"to kubevpn alone", []way{byKubevpn}, 1},
		{"to the group", []way{byKubevpn, byEngine}, 1},
		{"to the group, the engine first", []way{byEngine, byKubevpn}, 1},
		{"to the group twice", []way{byKubevpn, byEngine, byKubevpn, byEngine}, 2},
		{"to the group twice, the engine late", []way{byKubevpn, byKubevpn, byEngine, byEngine}, 2},
		{"to kubevpn, and then to the group", []way{byKubevpn, byKubevpn, byEngine}, 2},
		{"by docker kill", []way{byEngine, byEngine}, 2},
		{"by docker kill, long after", []way{byKubevpn, pause, byEngine}, 2},
	} {
		t.Run(tt.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				var w ways
				got := 0
				for _, from := range tt.come {
					if from == pause {
						time.Sleep(echoTime + 1) // of synctest's clock
						continue
					}
					if w.first(syscall.SIGINT, from) {
						got++
					}
				}
				if got != tt.want {
					t.Errorf("%d are passed on, want %d", got, tt.want)
				}
				if !w.first(syscall.SIGTERM, byEngine) {
					t.Error("another signal is not its echo")
				}
			})
		})
	}
}
