package manager

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// reason is why somebody was turned away at the proxy port.
type reason string

const (
	tooMany    reason = "too many at once"
	noRequest  reason = "no HTTP request" // garbage, another protocol, or nothing at all
	tooLarge   reason = "request too large"
	tooSlow    reason = "request too slow"
	noUpgrade  reason = "not an upgrade to kubevpn"
	noTicket   reason = "no ticket"
	hungUp     reason = "hung up"
	noTLS      reason = "no TLS handshake"
	tlsTooSlow reason = "TLS handshake too slow"

	unknownSession reason = "unknown session" // or one that has ended
	wrongSecret    reason = "wrong secret"
	expiredTicket  reason = "expired ticket"

	noCertificate      reason = "no certificate"
	expiredCertificate reason = "expired certificate"
	badCertificate     reason = "certificate of another authority"
	othersCertificate  reason = "another session's certificate"
	othersHello        reason = "another session's hello"
)

// tallyPeriod is how often a reason is logged at most.
const tallyPeriod = time.Minute

// tally counts events and logs them: a reason's first at once, and then how many there are at most once a minute,
// however many come. It is safe for concurrent use.
type tally struct {
	log *slog.Logger

	mu     sync.Mutex
	counts map[reason]*count
}

type count struct {
	total, logged int
	at            time.Time // of the latest line
	remote        string    // of the latest event
}

func newTally(log *slog.Logger) *tally {
	return &tally{log: log, counts: make(map[reason]*count)}
}

// add counts one event.
func (t *tally) add(why reason, remote string) {
	t.mu.Lock()
	defer t.mu.Unlock()
	c := t.counts[why]
	if c == nil {
		c = new(count)
		t.counts[why] = c
	}
	c.total++
	c.remote = remote
	t.tell(why, c, false)
}

// tell logs c if it is time to, and if there is something to tell. Call with mu held.
func (t *tally) tell(why reason, c *count, last bool) {
	if c.total == c.logged || !last && !c.at.IsZero() && time.Since(c.at) < tallyPeriod {
		return
	}
	t.log.Info("proxy port: turned away", "reason", why, "remote", c.remote, "new", c.total-c.logged, "total", c.total)
	c.logged, c.at = c.total, time.Now()
}

// total is how many events of the reason there were.
func (t *tally) total(why reason) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.counts[why]; c != nil {
		return c.total
	}
	return 0
}

// run logs what add has kept back, until ctx ends, and then the rest.
func (t *tally) run(ctx context.Context) {
	ticker := time.NewTicker(tallyPeriod)
	defer ticker.Stop()
	for {
		last := false
		select {
		case <-ticker.C:
		case <-ctx.Done():
			last = true
		}
		t.mu.Lock()
		for _, why := range slices.Sorted(maps.Keys(t.counts)) {
			t.tell(why, t.counts[why], last)
		}
		t.mu.Unlock()
		if last {
			return
		}
	}
}
