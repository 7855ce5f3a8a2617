package manager

// wakeup wakes the goroutine that receives from it. Several calls of send before it receives count as one.
type wakeup chan struct{}

func newWakeup() wakeup { return make(wakeup, 1) }

func (w wakeup) send() {
	select {
	case w <- struct{}{}:
	default:
	}
}
