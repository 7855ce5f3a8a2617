package intercept

import (
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"sync"
	"time"

	"kubevpn/internal/api"
	"kubevpn/pkg/wakeup"
	"kubevpn/pkg/wire/transport"
)

const (
	// keptForFollowers is how many exchanges wait for followers that read slowly.
	keptForFollowers = 1000
	// maxKeptBytes bounds the exchanges of one intercept.
	maxKeptBytes = 16 << 20
	// maxRecord is the largest line of a record stream: two heads, and two bodies in base64.
	maxRecord = 2 << 20

	recordPause = time.Second // between two attempts to make an agent record
	// recordTimeout is how long Requests waits until the agents of the intercepted pods record.
	recordTimeout = 5 * time.Second
)

// records holds the exchanges that the agents of one intercept have recorded, and the options with which they record.
// Its methods are safe for concurrent use.
//
//	agents ─▶ sessions ─ add ─▶ ring ─┬─ kept: the last ones, if the user asked for it
//	                               └─ followers: each reads at its own pace, and misses what the ring has forgotten
type records struct {
	keep    int // api.InterceptSpec.Record
	options wakeup.Value[recordOptions]

	mu        sync.Mutex
	ring      []*api.Exchange
	first     uint64 // number of ring[0]
	bytes     int
	dropped   uint64 // by agents
	followers map[*follower]struct{}
	changed   wakeup.Broadcast
}

// follower reads exchanges.
type follower struct{ body int } // bytes to record of each body

// recordOptions tells the sessions how their agents must record.
type recordOptions struct {
	on   bool
	turn int // grows whenever on becomes true
	body int // bytes to record of each body
}

func newRecords(keep int) *records {
	r := &records{keep: min(max(keep, 0), api.MaxKept), followers: make(map[*follower]struct{})}
	r.update()
	return r
}

// update sets the options. Call with mu held.
func (r *records) update() {
	now := recordOptions{on: r.keep > 0 || len(r.followers) > 0}
	for f := range r.followers {
		now.body = max(now.body, f.body)
	}
	r.options.Update(func(o *recordOptions) {
		if now.turn = o.turn; now.on && !o.on {
			now.turn++
		}
		*o = now
	})
	if !now.on {
		r.first += uint64(len(r.ring))
		r.ring, r.bytes = nil, 0
	}
}

// join makes the agents record, with that many bytes of each body, until the caller calls leave.
func (r *records) join(body int) (leave func()) {
	r.mu.Lock()
	defer r.mu.Unlock()
	f := &follower{body}
	r.followers[f] = struct{}{}
	r.update()
	return func() {
		r.mu.Lock()
		defer r.mu.Unlock()
		delete(r.followers, f)
		r.update()
	}
}

// add adds an exchange, unless it is nil, and a number of dropped ones.
func (r *records) add(e *api.Exchange, dropped uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.dropped += dropped
	if e != nil && r.options.Load().on {
		r.ring = append(r.ring, e)
		r.bytes += e.Weight()
		limit := r.keep
		if len(r.followers) > 0 {
			limit = max(limit, keptForFollowers)
		}
		for len(r.ring) > limit || r.bytes > maxKeptBytes {
			r.bytes -= r.ring[0].Weight()
			r.ring[0] = nil
			r.ring = r.ring[1:]
			r.first++
		}
	}
	r.changed.Send()
}

// from returns the exchanges from number n on, the number of the next one, how many before them the ring has forgotten,
// and how many agents dropped in all. changed closes when there are more.
func (r *records) from(n uint64) (all []*api.Exchange, next, missed, dropped uint64, changed <-chan struct{}) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if n < r.first {
		missed, n = r.first-n, r.first
	}
	return slices.Clone(r.ring[n-r.first:]), r.first + uint64(len(r.ring)), missed, r.dropped, r.changed.Next()
}

// position returns the number of a reader's first exchange: the oldest kept one, else the next one.
func (r *records) position() (n, dropped uint64) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.keep > 0 {
		return r.first + uint64(max(0, len(r.ring)-r.keep)), 0
	}
	return r.first + uint64(len(r.ring)), r.dropped
}

// Requests calls emit with the kept exchanges, and redacts the headers of req.Redact. If req.Follow is set, the agents
// record until ctx ends, and Requests calls emit with each further exchange. A slow emit misses exchanges, which
// api.Record.Dropped counts.
func (i *Intercept) Requests(ctx context.Context, req api.RequestsRequest, emit func(api.Record)) error {
	r := i.records
	at, before := r.position()
	if !req.Follow && r.keep == 0 {
		return api.Errorf(api.ExitUsage, "the requests of %s are not recorded", i.cfg.Workload).
			WithHint("`kubevpn requests %s -f` records from now on; `kubevpn proxy %s --record 1000` keeps the last "+
				"1000", i.cfg.Workload, i.cfg.Workload)
	}
	if req.Follow {
		defer r.join(min(max(req.Body, 0), api.MaxRecordedBody))()
		if err := i.awaitRecording(ctx, emit); err != nil {
			return nil // ctx has ended
		}
	}
	var missed, told uint64
	warned := ""
	for {
		i.mu.Lock()
		cut, noticed := i.now.cut, i.changed.Next()
		i.mu.Unlock()
		if cut != "" && cut != warned {
			emit(api.Record{Warning: cut})
		}
		warned = cut
		all, next, lost, dropped, changed := r.from(at)
		at, missed = next, missed+lost
		total := dropped - before + missed
		for _, e := range all {
			shown := *e
			shown.Redact(req.Redact)
			emit(api.Record{Exchange: &shown, Dropped: total})
		}
		if len(all) == 0 && total != told {
			emit(api.Record{Dropped: total})
		}
		told = total
		if !req.Follow {
			return nil
		}
		select {
		case <-changed:
		case <-noticed:
		case <-ctx.Done():
			return nil
		}
	}
}

// awaitRecording waits, for a limited time, until the agents of the intercepted pods record, and emits how many do.
func (i *Intercept) awaitRecording(ctx context.Context, emit func(api.Record)) error {
	bounded, cancel := context.WithTimeout(ctx, recordTimeout)
	defer cancel()
	recording, turn := 0, i.records.options.Load().turn
	_ = i.await(bounded, func() bool { // after the timeout, the others do not count
		recording = 0
		settled := true
		for _, c := range i.byUID {
			if c.linked.recording == turn {
				recording++
			} else if c.active() {
				settled = false
			}
		}
		return settled
	})
	emit(api.Record{Pods: recording})
	return ctx.Err()
}

// keepRecording makes the agent record whenever recording is on, until ctx ends.
func (l *agentSession) keepRecording(ctx context.Context, s *transport.Session) {
	for ctx.Err() == nil {
		options, err := l.record.options.Await(ctx, func(o recordOptions) bool { return o.on })
		if err != nil {
			return
		}
		err = l.runRecording(ctx, s, options.turn)
		l.change(func(st *sessionState) { st.recording = 0 })
		if err != nil && ctx.Err() == nil {
			l.log.Debug("the agent does not record", "err", err)
			wakeup.Pause(ctx, recordPause)
		}
	}
}

// runRecording adds the exchanges that the agent records to l.record. It returns nil when the turn is over.
func (l *agentSession) runRecording(ctx context.Context, s *transport.Session, turn int) error {
	stream, err := s.Open(ctx, transport.Request{Proto: transport.ProtoRecord})
	if err != nil {
		return err
	}
	ctx, cancel := context.WithCancel(ctx)
	var ordering sync.WaitGroup
	defer ordering.Wait()
	defer cancel()
	defer stream.Close()
	defer context.AfterFunc(ctx, func() { stream.Close() })()
	over := false
	ordering.Go(func() {
		defer cancel()
		over = l.orderRecords(ctx, stream, turn)
	})
	dropped := uint64(0)
	for in := api.NewLines(stream, maxRecord); ; {
		var r api.Record
		if err := in.Next(&r); err != nil {
			cancel()
			ordering.Wait()
			if over {
				return nil
			}
			return fmt.Errorf("reading recorded exchanges from the agent: %w", err)
		}
		if r.Error != nil {
			return r.Error
		}
		if r.Exchange == nil && r.Dropped == 0 {
			l.change(func(st *sessionState) { st.recording = turn })
			continue
		}
		if r.Exchange != nil {
			l.complete(r.Exchange)
		}
		l.record.add(r.Exchange, r.Dropped-min(dropped, r.Dropped))
		dropped = r.Dropped
	}
}

// orderRecords sends the options to the agent whenever they change. over reports that the turn is over.
func (l *agentSession) orderRecords(ctx context.Context, stream *transport.Stream, turn int) (over bool) {
	enc := json.NewEncoder(stream)
	sent := -1
	for {
		options, changed := l.record.options.Get()
		if !options.on || options.turn != turn {
			return true
		}
		if options.body != sent {
			if enc.Encode(api.RecordOrder{Claim: l.claim.ID, Body: options.body}) != nil {
				return false
			}
			sent = options.body
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return false
		}
	}
}

// complete adds the fields that the laptop knows to an exchange of an agent, and corrects impossible values.
func (l *agentSession) complete(e *api.Exchange) {
	e.Namespace, e.Workload, e.Pod, e.Match = l.about.Namespace, l.about.Workload, l.about.Pod, l.about.Match
	e.Redacted = nil
	e.Seconds = max(e.Seconds, 0)
	e.Wait = min(max(e.Wait, 0), e.Seconds)
	bodies := []*api.ExchangeBody{&e.Request.Body}
	if e.Response != nil {
		bodies = append(bodies, &e.Response.Body)
	}
	for _, b := range bodies {
		b.Size = max(b.Size, int64(len(b.Data)))
	}
}
