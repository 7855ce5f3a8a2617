package transport

import (
	"sync"
	"time"
)

// deadline wakes waiters at a point in time. Their lock guards it.
type deadline struct {
	at    time.Time
	timer *time.Timer
}

// set calls wake now and at a point in time, with the lock held. Call with it held.
func (d *deadline) set(at time.Time, lock sync.Locker, wake func()) {
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
			lock.Lock()
			defer lock.Unlock()
			wake()
		})
	}
	wake()
}

func (d *deadline) passed() bool { return !d.at.IsZero() && !time.Now().Before(d.at) }
