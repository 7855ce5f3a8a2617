// Package wakeup suspends goroutines until something happens:
//
//	Pause      a time has passed
//	Signal     another goroutine has work for this one
//	Broadcast  a state has changed, for any number of goroutines
//	Value      a variable has a certain value, for any number of goroutines
//
// Go ends goroutines that it has started, and First those that have lost a race.
//
// Signals and changes that come before a goroutine wakes are joined to one. A goroutine reads the state when it wakes,
// so it misses none.
package wakeup

import (
	"context"
	"sync"
	"time"
)

// Pause waits for d. It returns false if ctx ends first.
func Pause(ctx context.Context, d time.Duration) bool {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
		return true
	case <-ctx.Done():
		return false
	}
}

// IsClosed reports whether c is closed. Nothing is ever sent to it.
func IsClosed(c <-chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

// Signal wakes one goroutine that receives from it. Create it with NewSignal.
type Signal chan struct{}

// NewSignal returns a Signal that nobody has raised.
func NewSignal() Signal { return make(Signal, 1) }

// Raise lets one receive succeed. It does not block.
func (s Signal) Raise() {
	select {
	case s <- struct{}{}:
	default:
	}
}

// Broadcast wakes every goroutine that waits for a change of a state. The zero value is ready. It is safe for
// concurrent use.
type Broadcast struct {
	mu   sync.Mutex
	next chan struct{} // nil: nobody waits
}

// Next returns a channel that the next Send closes. Call it before you read the state, or while the state is locked.
func (b *Broadcast) Next() <-chan struct{} {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next == nil {
		b.next = make(chan struct{})
	}
	return b.next
}

// Send wakes the goroutines. Call it after you change the state, or while the state is locked.
func (b *Broadcast) Send() {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.next != nil {
		close(b.next)
		b.next = nil
	}
}

// Value is a variable whose changes goroutines can wait for. The zero value is ready. It is safe for concurrent use.
type Value[T any] struct {
	mu      sync.Mutex
	value   T
	changed Broadcast
}

// Load returns the value.
func (v *Value[T]) Load() T {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.value
}

// Get returns the value, and a channel that the next Update closes.
func (v *Value[T]) Get() (value T, changed <-chan struct{}) {
	v.mu.Lock()
	defer v.mu.Unlock()
	return v.value, v.changed.Next()
}

// Update changes the value with f and wakes every waiting goroutine. f must not block.
func (v *Value[T]) Update(f func(*T)) {
	v.mu.Lock()
	defer v.mu.Unlock()
	f(&v.value)
	v.changed.Send()
}

// Await returns the first value for which ok returns true, or ctx's error.
func (v *Value[T]) Await(ctx context.Context, ok func(T) bool) (T, error) {
	for {
		value, changed := v.Get()
		if ok(value) {
			return value, nil
		}
		select {
		case <-changed:
		case <-ctx.Done():
			return value, ctx.Err()
		}
	}
}
