package transport

import (
	"container/heap"
	"context"
)

// scheduler selects the link's next writer by start-time fair queueing (Goyal, Vin, Cheng 1996). A quiet stream starts
// at the link's virtual time, and a stream that has just written starts where its last write ended. The smallest start
// is next. So bulk streams share the link evenly, and a stream that writes little overtakes streams that write much.
// link.mu guards it.
type scheduler struct {
	now      uint64 // virtual time, in bytes: the start of the last grant
	waiting  waitHeap
	reserved int // bytes that were granted to writers which have not appended them yet
}

type waitHeap []*turn

func (h waitHeap) Len() int           { return len(h) }
func (h waitHeap) Less(i, j int) bool { return h[i].start < h[j].start }
func (h waitHeap) Swap(i, j int) {
	h[i], h[j] = h[j], h[i]
	h[i].place, h[j].place = i, j
}
func (h *waitHeap) Push(x any) {
	t := x.(*turn)
	t.place = len(*h)
	*h = append(*h, t)
}
func (h *waitHeap) Pop() any {
	old := *h
	t := old[len(old)-1]
	old[len(old)-1] = nil
	*h = old[:len(old)-1]
	return t
}

// turn is a stream's part in the scheduling.
type turn struct {
	stream        *Stream
	link          *link  // whose room was granted
	start, finish uint64 // virtual
	want          int    // bytes to append
	granted       int    // bytes that may be appended now; 0: waiting
	place         int    // in the heap
	whole         bool   // want cannot be split (a datagram)
}

// room reports whether a writer may append. Call with mu held.
func (l *link) room() bool {
	held := l.out.held() + l.sched.reserved
	return !l.full(held) && l.out.unsent()+l.sched.reserved < maxUnsent &&
		// The budget does not bound less than replayFloor: perhaps no acknowledgement is due that would wake writers.
		(held < replayFloor || l.session.bytes.fits(largeChunk))
}

// await waits for s's turn to append up to want bytes, and returns how many it may. Call with mu held; await releases
// it while it waits. The caller appends at once, and wakes the stream when ctx ends (wakeOn).
func (l *link) await(ctx context.Context, s *Stream, want int, whole bool) (int, error) {
	q := &l.sched
	t := &s.turn
	t.want, t.whole, t.granted = want, whole, 0
	t.start = max(q.now, t.finish)
	if len(q.waiting) == 0 && l.room() {
		n := l.share(t)
		q.now, t.finish = t.start, t.start+uint64(n)
		return n, nil
	}
	t.stream = s
	heap.Push(&q.waiting, t)
	for {
		err := s.writeError()
		if err == nil && ctx.Err() != nil {
			err = context.Cause(ctx)
		}
		if err != nil {
			if t.granted > 0 {
				q.reserved -= t.granted
				l.dispatch()
			} else {
				heap.Remove(&q.waiting, t.place)
			}
			return 0, err
		}
		if t.granted > 0 {
			q.reserved -= t.granted
			return t.granted, nil
		}
		s.canWrite.Wait()
	}
}

// share returns how much a writer may append at once: one frame, or a quantum when others wait. It is a small part of
// what may be in flight, because the other end acknowledges whole frames.
func (l *link) share(t *turn) int {
	if t.whole {
		return t.want
	}
	most := max(l.inFlight()/marksPerRTT, leastShare)
	if len(l.sched.waiting) > 0 {
		return min(t.want, quantum, most)
	}
	return min(t.want, maxPayload, most)
}

// dispatch grants turns while there is room. Call with mu held, whenever room may have appeared.
func (l *link) dispatch() {
	for len(l.sched.waiting) > 0 && l.room() {
		l.sched.next(l).stream.canWrite.Signal()
	}
	l.session.bulk.grant(l)
}

// next grants room of the link to the next writer. Call with l.mu held, and with what guards q.
func (q *scheduler) next(l *link) *turn {
	t := heap.Pop(&q.waiting).(*turn)
	t.link, t.granted = l, l.share(t)
	q.now, t.finish = t.start, t.start+uint64(t.granted)
	l.sched.reserved += t.granted
	return t
}
