package docker

import (
	"sync"
	"syscall"
	"time"
)

// way is how a signal comes to a container's first process.
type way int

const (
	byKubevpn way = 1
	byEngine  way = -1
)

// ways tells one signal that comes by both ways from two signals. What a terminal or a service manager sends to a whole process group
// `docker run` gets as well as kubevpn, and both pass it on; what is sent to kubevpn alone comes by its way only.
//
//	to the group ─┬─▶ kubevpn ────── order ───▶ first process ─▶ the program
//	              └─▶ docker run ─▶ engine ───▶       └─ drops what came by the other way
//
// The zero value is ready.
type ways struct {
	mu    sync.Mutex
	known map[syscall.Signal]lead
}

// lead is how many more have come by kubevpn's way, when the last one came.
type lead struct {
	by int
	at time.Time
}

// echoTime is how long after the one way a signal may come by the other, which takes it through two daemons.
const echoTime = 2 * time.Second

// first reports whether a signal has not come by the other way already.
func (w *ways) first(s syscall.Signal, from way) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	l := w.known[s]
	now := time.Now()
	if now.Sub(l.at) > echoTime {
		l.by = 0
	}
	first := l.by*int(from) >= 0
	if w.known == nil {
		w.known = map[syscall.Signal]lead{}
	}
	w.known[s] = lead{by: l.by + int(from), at: now}
	return first
}
