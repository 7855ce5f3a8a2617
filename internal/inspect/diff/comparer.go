package diff

import (
	"context"
	"crypto/sha256"
	"fmt"
	"maps"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/golang-lru/v2/simplelru"

	"kubevpn/internal/api"
)

const (
	maxQueued = 256 // exchanges that wait for the program
	workers   = 8   // requests at a time
	maxBefore = 256 // answers of the workload that are kept, to find what varies between two of them
	maxBytes  = 8 << 20
)

// Config configures a Comparer.
type Config struct {
	// Send sends the request of an exchange to the local program, and returns the resulting exchange, or nil if no
	// program listens yet on the port. It may be called concurrently.
	Send     func(ctx context.Context, e *api.Exchange) *api.Exchange
	Results  *Results
	Ignored  *Ignored
	Unsafe   bool // send requests that may change something, too: each once, in their order
	NoDetect bool // do not look for places that vary
	Requests int  // end after so many; 0: no limit
	// Differ is called with both exchanges of a request whose answers differ. May be nil.
	Differ func(from, to *api.Exchange, all []Difference)
}

// Comparer compares the answers in recorded exchanges with those of the local program. Call Run once. Offer may be
// called at any time, but not concurrently.
type Comparer struct {
	cfg     Config
	queue   chan *api.Exchange
	dropped atomic.Uint64
	before  *before // used by Offer alone

	enough context.CancelFunc // by Run
	mu     sync.Mutex
	left   int
}

// Reasons why an exchange is not compared. The CLI has a hint for NotSafe.
const (
	NotSafe    = "not GET, HEAD or OPTIONS"
	late       = "the comparison ended first"
	unlistened = "no program of this machine listened on the port yet"
)

// New returns a Comparer.
func New(cfg Config) *Comparer {
	return &Comparer{cfg: cfg, queue: make(chan *api.Exchange, maxQueued), left: cfg.Requests, before: newBefore()}
}

// Dropped returns how many exchanges were lost because the program was too slow.
func (c *Comparer) Dropped() uint64 { return c.dropped.Load() }

// Safe reports whether a method changes nothing.
func Safe(method string) bool {
	return method == http.MethodGet || method == http.MethodHead || method == http.MethodOptions
}

// Offer queues an exchange, or counts it if it cannot be compared. It never waits.
func (c *Comparer) Offer(e *api.Exchange) {
	if reason := c.unfit(e); reason != "" {
		c.cfg.Results.skip(reason)
		return
	}
	if !c.cfg.NoDetect && Safe(e.Request.Method) {
		if earlier := c.before.swap(e); earlier != nil {
			all, _ := Compare(earlier, e, c.cfg.Ignored)
			c.cfg.Results.vary(e, all, "two answers of the workload to the same request differ")
		}
	}
	select {
	case c.queue <- e:
	default:
		c.dropped.Add(1)
	}
}

// unfit returns why an exchange cannot be compared, or "".
func (c *Comparer) unfit(e *api.Exchange) string {
	switch r := &e.Request; {
	case !c.cfg.Unsafe && !Safe(r.Method):
		return NotSafe
	case e.To != api.ToApplication:
		return "another intercept answered"
	case e.Response == nil || e.Error != "":
		return "the answer is not whole"
	case e.Response.Status == http.StatusSwitchingProtocols:
		return "not HTTP after the request, such as a WebSocket"
	case e.Truncated:
		return "its headers are too long"
	case int64(len(r.Body.Data)) != r.Body.Size:
		return "its body is longer than the limit"
	}
	return ""
}

// Run sends requests until ctx ends or there are enough, and waits for their answers.
func (c *Comparer) Run(ctx context.Context) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	c.enough = cancel
	n := workers
	if c.cfg.Unsafe {
		n = 1
	}
	var all sync.WaitGroup
	for range n {
		all.Go(func() {
			for {
				select {
				case <-ctx.Done():
					return
				case e := <-c.queue:
					c.compare(ctx, e)
				}
			}
		})
	}
	all.Wait()
	for range len(c.queue) {
		<-c.queue
		c.cfg.Results.skip(late)
	}
}

// compare sends one request, twice if it is safe.
func (c *Comparer) compare(ctx context.Context, e *api.Exchange) {
	to := c.cfg.Send(ctx, e)
	switch {
	case ctx.Err() != nil:
		c.cfg.Results.skip(late)
		return
	case to == nil:
		c.cfg.Results.skip(unlistened)
		return
	}
	if !c.cfg.NoDetect && Safe(e.Request.Method) && to.Response != nil {
		if again := c.cfg.Send(ctx, e); again != nil && again.Response != nil {
			all, _ := Compare(to, again, c.cfg.Ignored)
			c.cfg.Results.vary(e, all, "two answers of this machine's program to the same request differ")
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.cfg.Requests > 0 {
		if c.left == 0 {
			c.cfg.Results.skip(late)
			return
		}
		if c.left--; c.left == 0 {
			c.enough()
		}
	}
	all, incomplete := Compare(e, to, c.cfg.Ignored)
	if all = c.cfg.Results.Add(e, all, incomplete); len(all) > 0 && c.cfg.Differ != nil {
		c.cfg.Differ(e, to, all)
	}
}

// before has the last answers of the workload, by request.
type before struct {
	answers *simplelru.LRU[[sha256.Size]byte, *api.Exchange]
	bytes   int
}

func newBefore() *before {
	b := new(before)
	b.answers, _ = simplelru.NewLRU(maxBefore, func(_ [sha256.Size]byte, e *api.Exchange) { b.bytes -= e.Weight() })
	return b
}

// perRequest are prefixes of headers that differ from request to request, whatever the request asks for.
var perRequest = []string{"B3", "Content-Length", "Date", "Forwarded", "Sentry-Trace", "Traceparent", "Tracestate",
	"User-Agent", "X-Amzn-Trace-Id", "X-B3-", "X-Correlation-Id", "X-Datadog-", "X-Forwarded-", "X-Request-Id"}

// swap stores an exchange, and returns the one before with the same request, or nil.
func (b *before) swap(e *api.Exchange) (earlier *api.Exchange) {
	r := &e.Request
	h := sha256.New()
	fmt.Fprintf(h, "%q %q %q %q %x\n", r.Method, r.Scheme, r.Host, r.Path, r.Body.Data)
	for _, name := range slices.Sorted(maps.Keys(r.Headers)) {
		if !slices.ContainsFunc(perRequest, func(prefix string) bool { return strings.HasPrefix(name, prefix) }) {
			fmt.Fprintf(h, "%q: %q\n", name, r.Headers[name])
		}
	}
	id := [sha256.Size]byte(h.Sum(nil))
	earlier, _ = b.answers.Get(id)
	b.answers.Remove(id)
	b.answers.Add(id, e)
	for b.bytes += e.Weight(); b.bytes > maxBytes; {
		b.answers.RemoveOldest()
	}
	return earlier
}
