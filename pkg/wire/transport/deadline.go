package transport

import (
	"sync"
	"time"
)

// deadline wakes the waiters of a condition at a point in time. The condition's lock guards it.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

func (d *deadline) set(at time.Time, c *sync.Cond) {
	if d.timer != nil {
		d.timer.Stop()
		d.timer = nil
	}
	d.at = at
	if at.IsZero() {
		return
	}
	if wait := time.Until(at); wait > 0 {
		d.timer = time.AfterFunc(wait, func() {
			c.L.Lock()
			defer c.L.Unlock()
			c.Broadcast()
		})
	}
	c.Broadcast()
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }
