package daemon

import (
	"context"
	"errors"
	"maps"
	"sync"
	"time"

	"kubevpn/internal/api"
)

// runner is a task with the function that runs it: a *connectionTask or an *interceptTask.
type runner interface {
	comparable
	base() *task
	// run blocks until ctx ends or the task fails, and cleans up before it returns. It returns nil only if ctx ended.
	run(ctx context.Context) error
}

// registry owns the tasks of one kind, each under its key. A request starts a task or joins the one under its key:
//
//	          acquire                 run returns an error
//	(absent) ───────▶ starting ─────────────────────────────▶ (absent); the error is the answer
//	                     │ ready
//	                     ▼            run returns an error
//	                  active ───────────────────────────────▶ failed ── acquire, end ─▶ (absent)
//	                     │ release, end
//	                     ▼
//	                  ending ── run has returned ─▶ (absent)
//
// A task that a request started ends with its last waiter unless pin was called, so that Ctrl-C leaves nothing
// behind.
type registry[K comparable, T runner] struct {
	ended func() // called with mu held after a task has ended; may be nil

	mu    sync.Mutex
	tasks map[K]T
	group sync.WaitGroup // the goroutines of the tasks
}

// acquire returns the task under key with a waiter added, and whether the request joins it. choose is called with mu
// held. current is the task that runs under the key, or the zero T. choose returns current to join it, or a new task,
// which acquire starts. If choose returns a channel, acquire waits until that is closed and calls choose again.
func (r *registry[K, T]) acquire(
	ctx context.Context, key K, choose func(current T) (chosen T, busy <-chan struct{}, err error),
) (t T, joined bool, err error) {
	for {
		t, joined, busy, err := r.tryAcquire(key, choose)
		if busy == nil {
			return t, joined, err
		}
		select {
		case <-busy:
		case <-ctx.Done():
			return t, false, context.Cause(ctx)
		}
	}
}

// tryAcquire is one round of acquire.
func (r *registry[K, T]) tryAcquire(
	key K, choose func(T) (T, <-chan struct{}, error),
) (t T, joined bool, busy <-chan struct{}, err error) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var none T
	current := r.tasks[key]
	if current != none {
		switch c := current.base(); {
		case c.failed != nil:
			current = none
		case c.ending:
			return none, false, c.over.Done(), nil
		}
	}
	chosen, busy, err := choose(current)
	if busy != nil || err != nil {
		return none, false, busy, err
	}
	b := chosen.base()
	b.waiters++
	if chosen == current {
		return chosen, true, nil, nil
	}
	ctx, cancel := context.WithCancelCause(context.Background()) // the task outlives the request
	b.cancel, b.events.ready = cancel, b.ready
	r.tasks[key] = chosen
	r.group.Go(func() { r.run(ctx, key, chosen) })
	return chosen, false, nil, nil
}

// run runs a task, and then removes it, or keeps it as failed so that `status` can report its error.
func (r *registry[K, T]) run(ctx context.Context, key K, t T) {
	b := t.base()
	b.logger.Info(b.kind + " begins")
	err := t.run(ctx)
	if ctx.Err() != nil {
		if err != nil && !errors.Is(err, context.Canceled) {
			b.logger.Warn(b.kind+" ended with an error", "err", err)
		}
		err = context.Cause(ctx)
	}
	b.logger.Info(b.kind+" ended", "reason", err)

	r.mu.Lock()
	defer r.mu.Unlock()
	if requested := errors.Is(err, errStopped) || errors.Is(err, errReplaced); requested || !b.wasReady() {
		delete(r.tasks, key)
	} else {
		b.failed = api.AsError(err)
	}
	b.cancel(nil)
	b.finish(err)
	if r.ended != nil {
		r.ended()
	}
}

// pin keeps tasks that have no waiters.
func (r *registry[K, T]) pin(ts ...T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range ts {
		t.base().pinned = true
	}
}

// release removes a waiter from each task. It ends the tasks that have no waiters left and are not pinned, and
// returns them. Zero values in ts are ignored.
func (r *registry[K, T]) release(ts ...T) (abandoned []T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	var none T
	for _, t := range ts {
		if t == none {
			continue
		}
		b := t.base()
		b.waiters--
		if b.waiters == 0 && !b.pinned && !b.isOver() {
			b.endLocked(errStopped)
			abandoned = append(abandoned, t)
		}
	}
	return abandoned
}

// end cancels tasks and removes those that have failed. It does not wait: await does.
func (r *registry[K, T]) end(cause error, ts ...T) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, t := range ts {
		if b := t.base(); b.failed == nil {
			b.endLocked(cause)
			continue
		}
		maps.DeleteFunc(r.tasks, func(_ K, other T) bool { return other == t })
	}
}

// await waits until nothing is left of the tasks, at most timeout for all of them, and returns the ones that have not
// ended.
func (r *registry[K, T]) await(timeout time.Duration, ts ...T) (late []T) {
	deadline := time.Now().Add(timeout)
	for _, t := range ts {
		b := t.base()
		select {
		case <-b.over.Done():
		case <-time.After(time.Until(deadline)):
			b.logger.Error("the "+b.kind+" did not end in time", "timeout", timeout)
			late = append(late, t)
		}
	}
	return late
}
