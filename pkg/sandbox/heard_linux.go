package sandbox

import (
	"os"
	"os/signal"
	"sync"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// heard are the signals that init got itself and nobody has asked for. Parent, init and program are one process group, and what is
// sent to all of it, by the terminal, a shell's `kill %1`, timeout(1) or a service manager, has reached the program; it
// must not come a second time when the parent passes it on, as many programs end at once when it does.
//
//	to the group ──▶ parent ──▶ order to init ─┐
//	            ├──▶ init ── heard ────────────┴─▶ nothing: the program has it
//	            └──▶ program
//	to the parent ─▶ parent ──▶ order to init ─── not heard in time ──▶ program
type heard struct {
	mu   sync.Mutex
	at   map[syscall.Signal]time.Time // the latest of each, as the kernel keeps no more either
	more chan struct{}                // closed when there is one more
}

// echoTime is how far apart init and the parent may be seen to get one signal. The kernel sends it to both in one call.
const echoTime = 100 * time.Millisecond

// listen makes init deaf to what is sent to the whole process group and what somebody may send to every process. What was ignored
// stays ignored, for the program. Signals that stop do not stop the first process of a namespace.
func listen() *heard {
	h := &heard{at: map[syscall.Signal]time.Time{}, more: make(chan struct{})}
	signals := make(chan os.Signal, 16)
	for _, sig := range []os.Signal{unix.SIGINT, unix.SIGQUIT, unix.SIGHUP, unix.SIGTERM, unix.SIGUSR1, unix.SIGUSR2} {
		if !signal.Ignored(sig) {
			signal.Notify(signals, sig) // ignored signals would be ignored by the program too
		}
	}
	go func() {
		for s := range signals {
			h.note(s.(syscall.Signal))
		}
	}()
	return h
}

func (h *heard) note(s syscall.Signal) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.at[s] = time.Now()
	close(h.more)
	h.more = make(chan struct{})
}

// take reports whether init got the signal as well, and forgets it: the next one is another.
func (h *heard) take(s syscall.Signal) bool {
	over := time.NewTimer(echoTime)
	defer over.Stop()
	for {
		h.mu.Lock()
		at, got := h.at[s]
		if got {
			delete(h.at, s)
		}
		more := h.more
		h.mu.Unlock()
		if got && time.Since(at) < echoTime {
			return true
		}
		select {
		case <-more:
		case <-over.C:
			return false
		}
	}
}
