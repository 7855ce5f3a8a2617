package connection

import (
	"context"
	"time"

	"kubevpn/pkg/wakeup"
)

const (
	wakeTick  = 3 * time.Second
	wakeJump  = 5 * time.Second
	wakeProbe = 2 * time.Second
)

// watchWake calls onWake when the machine has slept. While it sleeps, the monotonic clock stands still and the wall
// clock does not (clock_gettime(2), CLOCK_MONOTONIC), so their difference jumps. Without it, only the heartbeat of a
// conn that died meanwhile notices, several seconds later.
func watchWake(ctx context.Context, onWake func(slept time.Duration)) error {
	for before := time.Now(); wakeup.Pause(ctx, wakeTick); {
		now := time.Now()
		if slept := asleep(before, now); slept > wakeJump {
			onWake(slept)
		}
		before = now
	}
	return ctx.Err()
}

// asleep returns how much more time passed on the wall clock than on the monotonic clock.
func asleep(before, now time.Time) time.Duration {
	return now.Round(0).Sub(before.Round(0)) - now.Sub(before)
}
