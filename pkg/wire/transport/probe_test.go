package transport

import (
	"testing"
	"time"
)

// A pong waits behind what the other end has sent before it.
func TestProbeWaitsWhileTheConnReceives(t *testing.T) {
	began := time.Now()
	at := func(ms int) time.Time { return began.Add(time.Duration(ms) * time.Millisecond) }
	for name, tt := range map[string]struct {
		now, last int    // ms
		ponged    uint64 // the probe's ping is number 7
		fails     bool
		deadline  int // ms; -1: the probe has ended
	}{
		"before the deadline":            {299, -50, 6, false, 300},
		"silent":                         {300, -50, 6, true, -1},
		"answered":                       {300, 2, 7, false, -1},
		"receives data":                  {300, 250, 6, false, 550},
		"received data, and then silent": {600, 250, 6, true, -1},
	} {
		p := probe{deadline: at(300), timeout: 300 * time.Millisecond, seq: 7}
		fails := p.fails(&linkConn{last: at(tt.last)}, at(tt.now), tt.ponged)
		var deadline time.Time
		if tt.deadline >= 0 {
			deadline = at(tt.deadline)
		}
		if fails != tt.fails || !p.deadline.Equal(deadline) {
			t.Errorf("%s: fails %v, deadline after %v", name, fails, p.deadline.Sub(began))
		}
	}
}
