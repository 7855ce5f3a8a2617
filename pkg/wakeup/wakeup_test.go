package wakeup

import (
	"context"
	"errors"
	"sync"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"
)

func TestPauseEndsWithTheTimeOrTheContext(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		began := time.Now()
		if !Pause(t.Context(), time.Minute) || time.Since(began) != time.Minute {
			t.Errorf("a pause of a minute took %v", time.Since(began))
		}
		ctx, cancel := context.WithTimeout(t.Context(), time.Second)
		defer cancel()
		if Pause(ctx, time.Minute) {
			t.Error("the pause outlasted its context")
		}
	})
}

func TestSignalJoinsRaises(t *testing.T) {
	s := NewSignal()
	s.Raise()
	s.Raise()
	<-s
	select {
	case <-s:
		t.Error("two raises woke twice")
	default:
	}
}

func TestBroadcastWakesAllThatWait(t *testing.T) {
	var b Broadcast
	b.Send() // nobody waits
	first, second := b.Next(), b.Next()
	b.Send()
	<-first
	<-second
	select {
	case <-b.Next():
		t.Error("a Send woke a goroutine that began to wait after it")
	default:
	}
}

func TestAwaitMissesNoUpdate(t *testing.T) {
	const updates = 1000
	var v Value[int]
	var waiting sync.WaitGroup
	for range 4 {
		waiting.Go(func() {
			for seen := 0; seen < updates; {
				now, err := v.Await(t.Context(), func(n int) bool { return n > seen })
				if err != nil {
					t.Error(err)
					return
				}
				seen = now
			}
		})
	}
	for range updates {
		v.Update(func(n *int) { *n++ })
	}
	waiting.Wait()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := v.Await(ctx, func(int) bool { return false }); !errors.Is(err, context.Canceled) {
		t.Errorf("Await with an ended context returned %v", err)
	}
}

func TestStopOfGoWaitsForEachFunction(t *testing.T) {
	var ended atomic.Int32
	wait := func(ctx context.Context) {
		<-ctx.Done()
		ended.Add(1)
	}
	Go(t.Context(), wait, wait)()
	if n := ended.Load(); n != 2 {
		t.Errorf("%d functions have returned, want 2", n)
	}
}
