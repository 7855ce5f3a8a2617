//go:build linux

package agent

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/time/rate"

	"kubevpn/internal/api"
	"kubevpn/pkg/protocol/interceptor"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

// These limits bound the bytes that wait for laptops, and the exchanges a second of one claim, because encoding and
// sending an exchange takes about as long as forwarding it. The agent drops and counts exchanges beyond them.
const (
	maxRecorded    = 32 << 20 // bytes of all claims
	maxOwnRecorded = 4 << 20  // bytes of one claim
	recordedHead   = 4 << 10  // bytes that count for the head of a request in flight
	recordRate     = 100      // exchanges a second
	recordBurst    = 500
	dropReport     = time.Second // interval of reports that contain only the number of drops
	// recordDelay collects exchanges: sending each by itself wakes the laptop, and costs several times as much.
	recordDelay = 100 * time.Millisecond

	maxHeadSent    = 64 << 10 // bytes of a header that are sent
	maxTextSent    = 16 << 10 // of a path, a host or a method
	maxRecordOrder = 4 << 10
)

// recorder records the requests of a claim while the laptop of its owner asks for them.
type recorder struct{ queue atomic.Pointer[recordQueue] }

// begin is interceptor.Claim.Record.
func (r *recorder) begin() (end func(*interceptor.Exchange), body int) {
	q := r.queue.Load()
	if q == nil {
		return nil, 0
	}
	return q.begin()
}

// set makes q receive the exchanges, and ends the previous queue. If q is nil, no queue receives them.
func (r *recorder) set(q *recordQueue) {
	if old := r.queue.Swap(q); old != nil {
		old.cancel()
	}
}

// recordQueue holds the exchanges of a claim that wait for a laptop.
type recordQueue struct {
	claim  string        // interceptor.Claim.ID
	mirror bool          // of the claim
	shared *atomic.Int64 // bytes of all queues of the agent
	rate   *rate.Limiter
	more   wakeup.Signal
	cancel context.CancelFunc // ends the stream

	mu      sync.Mutex
	body    int
	waiting []*interceptor.Exchange
	held    int // bytes, including those of requests in flight
	dropped uint64
	closed  bool
}

// begin admits a request, or counts it as dropped.
func (q *recordQueue) begin() (end func(*interceptor.Exchange), body int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	reserved := recordedHead + 2*q.body
	if q.closed || !q.rate.Allow() || !q.hold(reserved) {
		q.dropped++
		return nil, 0
	}
	return func(e *interceptor.Exchange) { q.end(e, reserved) }, q.body
}

// hold reserves n bytes if there is room. Call with mu held.
func (q *recordQueue) hold(n int) bool {
	if q.held+n > maxOwnRecorded {
		return false
	}
	if q.shared.Add(int64(n)) > maxRecorded {
		q.shared.Add(int64(-n))
		return false
	}
	q.held += n
	return true
}

// release frees n bytes that hold has reserved. Call with mu held.
func (q *recordQueue) release(n int) {
	q.held -= n
	q.shared.Add(int64(-n))
}

// end queues an exchange for which begin held bytes.
func (q *recordQueue) end(e *interceptor.Exchange, reserved int) {
	n := weigh(e)
	q.mu.Lock()
	defer q.mu.Unlock()
	q.release(reserved)
	if q.closed || !q.hold(n) {
		q.dropped++
		return
	}
	q.waiting = append(q.waiting, e)
	q.more.Raise()
}

// weigh returns about how many bytes of memory an exchange takes.
func weigh(e *interceptor.Exchange) int {
	return 1<<10 + len(e.URI) + len(e.Host) + api.HeaderWeight(e.Header) + api.HeaderWeight(e.Answer) +
		api.HeaderWeight(e.Trailer) + cap(e.Body.Data) + cap(e.AnswerBody.Data)
}

// next takes the oldest exchange, or nil.
func (q *recordQueue) next() (e *interceptor.Exchange, dropped uint64) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.waiting) == 0 {
		q.waiting = nil
		return nil, q.dropped
	}
	e = q.waiting[0]
	q.waiting[0] = nil
	q.waiting = q.waiting[1:]
	q.release(weigh(e))
	return e, q.dropped
}

// lost returns how many exchanges were dropped.
func (q *recordQueue) lost() uint64 {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.dropped
}

func (q *recordQueue) setBody(n int) {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.body = min(max(n, 0), api.MaxRecordedBody)
}

// close drops the waiting exchanges.
func (q *recordQueue) close() {
	q.mu.Lock()
	q.closed = true
	q.mu.Unlock()
	for e, _ := q.next(); e != nil; e, _ = q.next() {
	}
}

// record begins to record for a claim of the owner. The caller ends it with stop.
func (l *leader) record(by *owner, o *api.RecordOrder, cancel context.CancelFunc) (q *recordQueue, stop func(),
	err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	n := slices.IndexFunc(l.claims, func(c *claim) bool { return c.owner == by && c.id == o.Claim })
	if n < 0 {
		return nil, nil, api.Errorf(api.ExitWorkload, "you have no intercept %q in this pod", o.Claim)
	}
	c := l.claims[n]
	q = &recordQueue{claim: c.globalID(), mirror: c.mirror && !c.observe, shared: &l.recorded,
		rate: rate.NewLimiter(recordRate, recordBurst), more: wakeup.NewSignal(), cancel: cancel}
	q.setBody(o.Body)
	c.record.set(q)
	l.log.Info("recording", "claim", c.id, "owner", by.name, "body", q.body)
	return q, func() {
		c.record.queue.CompareAndSwap(q, nil)
		q.close()
	}, nil
}

// serveRecords serves a record stream until it ends, or the claim does:
//
//	laptop                    leader
//	  │ RecordOrder ────────────▶│
//	  │◀──────────────── Record  │   empty: recording; or Error, and the stream ends
//	  │◀──────────────── Record  │   for each exchange; drops at least once a second
//	  │ RecordOrder ────────────▶│   another Body
func (s *laptopSession) serveRecords(ctx context.Context, cancel context.CancelFunc, stream *transport.Stream,
	reading *sync.WaitGroup) error {
	var order api.RecordOrder
	lines, err := readFirst(stream, maxRecordOrder, &order)
	if err != nil {
		return fmt.Errorf("reading an order to record: %w", err)
	}
	q, stop, err := s.leader.record(s.owner, &order, cancel)
	if err != nil {
		return errors.Join(json.NewEncoder(stream).Encode(api.Record{Error: api.AsError(err)}), stream.CloseWrite())
	}
	defer stop()
	reading.Go(func() {
		defer cancel()
		for lines.Next(&order) == nil {
			q.setBody(order.Body)
		}
	})
	return q.send(ctx, stream)
}

// send writes the exchanges until ctx ends.
func (q *recordQueue) send(ctx context.Context, stream *transport.Stream) error {
	w := bufio.NewWriter(stream)
	enc := json.NewEncoder(w)
	enc.SetEscapeHTML(false)
	ticker := time.NewTicker(dropReport)
	defer ticker.Stop()
	err := enc.Encode(api.Record{})
	told := uint64(0)
	for err == nil {
		e, dropped := q.next()
		switch {
		case e != nil:
			told = dropped
			err = enc.Encode(api.Record{Exchange: q.describe(e), Dropped: dropped})
			continue
		case w.Buffered() > 0:
			err = w.Flush()
			continue
		}
		select {
		case <-q.more:
			wakeup.Pause(ctx, recordDelay)
		case <-ticker.C:
			if dropped := q.lost(); dropped != told {
				told = dropped
				err = enc.Encode(api.Record{Dropped: dropped})
			}
		case <-ctx.Done():
			return nil
		}
	}
	return fmt.Errorf("sending recorded exchanges: %w", err)
}

// describe converts an exchange for the laptop.
func (q *recordQueue) describe(e *interceptor.Exchange) *api.Exchange {
	d := &api.Exchange{
		Began: e.Began, Seconds: e.Ended.Sub(e.Began).Seconds(), To: api.ToApplication, Mirrored: q.mirror,
		Client: e.Flow.Client, Server: e.Flow.Dst,
		Request: api.ExchangeRequest{Method: e.Method, Scheme: "http", Host: e.Host, Path: e.URI, Proto: e.Proto,
			Body: api.ExchangeBody(e.Body)},
	}
	d.Wait = d.Seconds
	if e.TLS {
		d.Request.Scheme = "https"
	}
	switch {
	case e.To == nil:
	case e.To.ID != q.claim:
		d.To = api.ToOther
	default:
		d.To = api.ToLaptop
		if _, cloned := e.To.Target.(*clone); cloned {
			d.To = api.ToClone
		}
	}
	if e.Err != nil {
		d.Error = strings.ToValidUTF8(e.Err.Error(), "")
	}
	for _, text := range []*string{&d.Request.Method, &d.Request.Host, &d.Request.Path} {
		if len(*text) > maxTextSent {
			*text, d.Truncated = (*text)[:maxTextSent], true
		}
	}
	d.Request.Headers = shorten(e.Header, &d.Truncated)
	if e.Status != 0 {
		d.Wait = e.Answered.Sub(e.Began).Seconds()
		d.Response = &api.ExchangeResponse{Status: e.Status, Headers: shorten(e.Answer, &d.Truncated),
			Trailers: shorten(e.Trailer, &d.Truncated), Body: api.ExchangeBody(e.AnswerBody)}
	}
	return d
}

// shorten returns the header, or a part of it that is not too long.
func shorten(h http.Header, truncated *bool) http.Header {
	out := make(http.Header, len(h))
	size := 0
	for name, values := range h {
		if len(values) == 0 {
			continue
		}
		if size += api.HeaderWeight(http.Header{name: values}); size > maxHeadSent {
			*truncated = true
			break
		}
		out[name] = values
	}
	return out
}
