package wakeup

import (
	"context"
	"errors"
	"io"
	"sync"
)

// First calls f with the numbers below n, at once, and returns the first result that is not nil, or all errors. It ends
// the ctx of the other calls, waits for them, and closes what they return.
func First[C io.Closer](ctx context.Context, n int, f func(context.Context, int) (C, error)) (first C, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	errs := make([]error, n)
	var mu sync.Mutex // guards first and found
	found := false
	var running sync.WaitGroup
	for i := range n {
		running.Go(func() {
			result, err := f(ctx, i)
			mu.Lock()
			defer mu.Unlock()
			switch errs[i] = err; {
			case any(result) == nil:
			case found:
				result.Close()
			default:
				first, found = result, true
				cancel()
			}
		})
	}
	running.Wait()
	if found {
		return first, nil
	}
	return first, errors.Join(errs...)
}
