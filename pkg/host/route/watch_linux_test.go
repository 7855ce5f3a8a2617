package route

import (
	"context"
	"errors"
	"fmt"
	"net"
	"testing"
	"testing/synctest"
	"time"

	"go.uber.org/goleak"

	"kubevpn/internal/testenv"
	"kubevpn/pkg/wakeup"
)

func TestWatchTellsOfChangesBeyondOwnLinks(t *testing.T) {
	if !testenv.InNamespace(t) {
		return
	}
	defer goleak.VerifyNone(t)
	for _, line := range []string{
		"ip link add wlan0 type veth peer name eth0", "ip link set eth0 up", "ip link set wlan0 up",
		"ip addr add 192.0.2.1/24 dev wlan0",
		"ip link add kubevpn0 type bridge", "ip link set kubevpn0 up",
	} {
		testenv.Run(t, line)
	}
	ctx, cancel := context.WithCancel(t.Context())
	changes, ended := make(chan struct{}, 10), make(chan error, 1)
	go func() {
		ended <- Watch(ctx, func() []string { return []string{"kubevpn0"} }, func() { changes <- struct{}{} })
	}()
	told := func(within time.Duration) bool {
		select {
		case <-changes:
			return true
		case <-time.After(within):
			return false
		}
	}
	for n := 10; ; n++ { // until it has read the first state
		testenv.Run(t, fmt.Sprintf("ip addr add 192.0.2.%d/24 dev wlan0", n))
		if told(3 * quietTime) {
			break
		}
	}
	for _, tt := range []struct {
		change string
		want   bool
	}{
		{"ip addr add 192.0.2.2/24 dev wlan0", true},
		{"ip addr add 198.19.0.1/32 dev kubevpn0", false},
		{"ip route add 10.96.0.0/16 dev kubevpn0", false},
		{"ip addr add fe80::7/64 dev wlan0 nodad", false},
		{"ip route add default via 192.0.2.7", true},
		{"ip route change default via 192.0.2.8", true},
		{"ip route add default via 192.0.2.9 metric 7 table 77", false}, // no rule names the table
		{"ip rule add table 77", true},
		{"ip link set wlan0 down", true},
	} {
		began := time.Now()
		testenv.Run(t, tt.change)
		within := 3 * quietTime
		if tt.want {
			within = 20 * time.Second
		}
		if got := told(within); got != tt.want {
			t.Errorf("%s: told %v", tt.change, got)
		}
		t.Logf("%s: %v", tt.change, time.Since(began).Round(time.Millisecond))
	}
	gone := GoneAddress()
	for address, want := range map[string]bool{"127.0.0.9": false, "192.0.2.2": false, "192.0.2.3": true} {
		if got := gone(&net.TCPAddr{IP: net.ParseIP(address)}); got != want {
			t.Errorf("address %s is gone: %v", address, got)
		}
	}
	if gone(&net.UnixAddr{}) {
		t.Error("a unix socket has lost its address")
	}
	cancel()
	if err := <-ended; !errors.Is(err, context.Canceled) {
		t.Errorf("Watch returned %v", err)
	}
}

func TestWatchWaitsUntilChangesEnd(t *testing.T) {
	for name, tt := range map[string]struct {
		every time.Duration
		count int
		want  time.Duration
	}{
		"one":     {0, 0, quietTime},
		"some":    {50 * time.Millisecond, 4, 200*time.Millisecond + quietTime},
		"no end":  {50 * time.Millisecond, 100, busyTime},
		"too far": {2 * quietTime, 1, quietTime},
	} {
		t.Run(name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				events := wakeup.NewSignal()
				stop := wakeup.Go(t.Context(), func(ctx context.Context) {
					for range tt.count {
						if !wakeup.Pause(ctx, tt.every) {
							return
						}
						events.Raise()
					}
				})
				began := time.Now()
				settle(t.Context(), events)
				if took := time.Since(began); took != tt.want {
					t.Errorf("waited for %v, want %v", took, tt.want)
				}
				stop()
			})
		})
	}
}
