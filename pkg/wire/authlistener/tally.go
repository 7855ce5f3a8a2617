package authlistener

import (
	"context"
	"log/slog"
	"maps"
	"slices"
	"sync"
	"time"
)

// Reason says why a connection was rejected, in a few words for the log.
type Reason string

// The reasons. The Listener uses TooMany for evicted connections. Handshake returns the others.
const (
	TooMany Reason = "too many at once"

	HungUp             Reason = "hung up"
	NoTLS              Reason = "no TLS handshake" // another protocol, an older version, garbage or a wrong signature
	TLSTooSlow         Reason = "TLS handshake too slow"
	NoCertificate      Reason = "no certificate"
	ExpiredCertificate Reason = "expired certificate"
	BadCertificate     Reason = "certificate of another authority"
)

// tallyPeriod is how often a reason is logged at most.
const tallyPeriod = time.Minute

// tally counts events by reason and logs them: the first of a reason at once, and the count at most once a minute. Its
// methods may be called concurrently.
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
	t.report(why, c, false)
}

// report logs c if it has new events and the last line is old enough, or if last is set. Call with mu held.
func (t *tally) report(why Reason, c *count, last bool) {
	if c.total == c.logged || !last && !c.at.IsZero() && time.Since(c.at) < tallyPeriod {
		return
	}
	t.log.Info(t.message, "reason", why, "remote", c.remote, "new", c.total-c.logged, "total", c.total)
	c.logged, c.at = c.total, time.Now()
}

// total returns the number of events of a reason.
func (t *tally) total(why Reason) int {
	t.mu.Lock()
	defer t.mu.Unlock()
	if c := t.counts[why]; c != nil {
		return c.total
	}
	return 0
}

// run logs the counts that add did not log, until ctx ends, and then the rest.
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
			t.report(why, t.counts[why], last)
		}
		t.mu.Unlock()
		if last {
			return
		}
	}
}
