package wakeup

import (
	"context"
	"sync"
)

// Go calls each function in a goroutine of its own. stop ends their ctx, and waits until they have returned.
func Go(ctx context.Context, functions ...func(context.Context)) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var running sync.WaitGroup
	for _, f := range functions {
		running.Go(func() { f(ctx) })
	}
	return func() {
		cancel()
		running.Wait()
	}
}
