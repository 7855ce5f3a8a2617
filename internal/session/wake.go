package session

import (
	"context"
	"time"
)

const (
	wakeTick  = 3 * time.Second
	wakeJump  = 5 * time.Second
	wakeProbe = 2 * time.Second
)

// watchWake asks the transport for a sign of life when the machine has slept. While it sleeps the monotonic clock
// stands still and the wall clock does not (clock_gettime(2), CLOCK_MONOTONIC), so the difference of the two jumps.
// Without it, a carrier that died meanwhile is noticed by its heartbeat, several seconds later.
func (s *Session) watchWake(ctx context.Context) error {
	tick := time.NewTicker(wakeTick)
	defer tick.Stop()
	before := time.Now()
	for {
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
		now := time.Now()
		if slept := asleep(before, now); slept > wakeJump {
			s.log.Info("the machine was asleep", "for", slept)
			s.client.Probe(wakeProbe)
			s.poke()
		}
		before = now
	}
}

// asleep is how much more time has passed on the wall than on the monotonic clock.
func asleep(before, now time.Time) time.Duration {
	return now.Round(0).Sub(before.Round(0)) - now.Sub(before)
}
