package connection

import (
	"context"
	"time"

	"kubevpn/pkg/host/route"
	"kubevpn/pkg/wakeup"
)

const (
	wakeTick   = time.Second     // between two looks at the clock
	wakeJump   = 2 * time.Second // of the wall clock, beyond a tick: a busy machine is late by less
	watchAgain = 5 * time.Second // the pause after a failure to watch the network
)

// watchWake calls onWake when the machine has slept. While it sleeps, the monotonic clock stands still and the wall
// clock does not (clock_gettime(2), CLOCK_MONOTONIC); while this process is stopped, both go on. In either case the
// wall clock jumps between two ticks. Without watchWake, only the heartbeat of a conn that died meanwhile notices,
// several seconds later.
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

// asleep returns how much more time than a tick has passed on the wall clock.
func asleep(before, now time.Time) time.Duration {
	return now.Round(0).Sub(before.Round(0)) - wakeTick
}

// watchNetwork follows the changes of this machine's network until ctx ends.
func (c *Connection) watchNetwork(ctx context.Context) error {
	for {
		err := route.Watch(ctx, func() []string { return []string{c.packets.deviceName()} }, c.onMove)
		if ctx.Err() != nil {
			return ctx.Err()
		}
		c.log.Warn("cannot follow the changes of this machine's network; trying again", "err", err, "in", watchAgain)
		wakeup.Pause(ctx, watchAgain)
		c.onMove()
	}
}

// onWake is called after the machine slept.
func (c *Connection) onWake(slept time.Duration) {
	c.log.Info("the machine was asleep", "for", slept)
	c.onMove()
}

// onMove replaces what the present network of this machine does not carry.
func (c *Connection) onMove() {
	c.log.Info("this machine's network may have changed")
	c.client.Probe(route.GoneAddress())
	c.moved.Send()
	c.changed.Raise() // the routes may overlap those of the new network
}

// Moved returns a channel that is closed when this machine has woken up or its network has changed.
func (c *Connection) Moved() <-chan struct{} { return c.moved.Next() }
