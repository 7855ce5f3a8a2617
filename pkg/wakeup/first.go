package wakeup

import (
	"context"
	"errors"
	"io"
	"sync"
	"time"
)

// First calls f with the numbers below n, and returns the first result that is not nil, or all errors. Each call begins
// when the one before has ended, or has taken as long as pace; 0: all begin at once. First ends the ctx of the other
// calls, waits for them, and closes what they return.
func First[C io.Closer](ctx context.Context, n int, pace time.Duration,
	f func(context.Context, int) (C, error)) (first C, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, n)
	var mu sync.Mutex // guards first
	var running sync.WaitGroup
	for i := range n {
		ended := make(chan struct{})
		running.Go(func() {
			defer close(ended)
			result, err := f(ctx, i)
			mu.Lock()
			defer mu.Unlock()
			switch errs[i] = err; {
			case any(result) == nil:
			case any(first) != nil:
				result.Close()
			default:
				first = result
				cancel()
			}
		})
		if pace == 0 {
			continue
		}
		select {
		case <-ended:
		case <-time.After(pace):
		}
		if ctx.Err() != nil {
			break
		}
	}
	running.Wait()
	if any(first) != nil {
		return first, nil
	}
	return first, errors.Join(errs...)
}
