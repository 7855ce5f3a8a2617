package authlistener

import (
	"log/slog"
	"sync"
	"time"

	"golang.org/x/time/rate"
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

// tally counts events by reason and logs them: the first of a reason at once, later ones with the total at most once a
// minute. Its methods may be called concurrently.
type tally struct {
	message string
	log     *slog.Logger

	mu     sync.Mutex
	counts map[Reason]*count
}

type count struct {
	total int
	line  rate.Sometimes // of the log
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
		c = &count{line: rate.Sometimes{Interval: tallyPeriod}}
		t.counts[why] = c
	}
	c.total++
	c.line.Do(func() { t.log.Info(t.message, "reason", why, "remote", remote, "total", c.total) })
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
