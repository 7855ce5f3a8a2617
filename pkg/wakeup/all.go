package wakeup

import "sync"

// All calls f for all items of a list at the same time, and returns the results in the order of the items.
func All[T, R any](list []T, f func(T) R) []R {
	results := make([]R, len(list))
	var running sync.WaitGroup
	for n, item := range list {
		running.Go(func() { results[n] = f(item) })
	}
	running.Wait()
	return results
}
