package door

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// Reason is why somebody was turned away: a few words for the log.
type Reason string

// TooMany is the Door's own reason; the others are Shake's.
const (
	TooMany Reason = "too many at once"

	HungUp             Reason = "hung up"
	NoTLS              Reason = "no TLS handshake" // another protocol, an older version, garbage, a wrong signature
	TLSTooSlow         Reason = "TLS handshake too slow"
	NoCertificate      Reason = "no certificate"
	ExpiredCertificate Reason = "expired certificate"
	BadCertificate     Reason = "certificate of another authority"
)

// tallyPeriod is how often a reason is logged at most.
const tallyPeriod = time.Minute

// tally counts events and logs them: a reason's first at once, and then how many there are at most once a minute,
// however many come. It is safe for concurrent use.
type tally struct {
	message string
	log     *slog.Logger

	mu     sync.Mutex
	counts map[Reason]*count
}

type count struct {
	total, logged int
	at            time.Time // of the latest line
	remote        string    // of the latest event
}

func newTally(message string, log *slog.Logger) *tally {
	return &tally{message: message, log: log, counts: make(map[Reason]*count)}
}

// add counts one event.
func (t *tally) add(why Reason, remote string) {
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
func (t *tally) tell(why Reason, c *count, last bool) {
	if c.total == c.logged || !last && !c.at.IsZero() && time.Since(c.at) < tallyPeriod {
		return
	}
	t.log.Info(t.message, "reason", why, "remote", c.remote, "new", c.total-c.logged, "total", c.total)
	c.logged, c.at = c.total, time.Now()
}

// total is how many events of the reason there were.
func (t *tally) total(why Reason) int {
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
