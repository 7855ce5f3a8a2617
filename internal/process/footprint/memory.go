// Package footprint limits the memory and the processors that a program uses: ReleaseMemory returns memory to the
// system after a busy time, and HalveProcessors leaves processors to the programs that this one serves.
//
//	busy, memory grows ──▶ quiet for an interval ──▶ two collections; free memory goes back ──▶ quiet
//
// Go by itself takes four minutes to return the memory of pooled buffers: a pool keeps them until two collections have
// passed without use, and an idle program is collected every two minutes.
package footprint

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// interval is the pause between two checks of ReleaseMemory. A quiet program has been quiet for this long.
	interval = 10 * time.Second
	// quiet is the number of goroutines per second that may wake in a quiet program. A single flow of any speed wakes
	// more; heartbeats, timers and watches wake fewer.
	quiet = 100
	// worthwhile is the number of bytes by which memory must have grown since the last release.
	worthwhile = 8 << 20
)

// ReleaseMemory returns free memory to the system after the start and whenever the program becomes quiet. It blocks
// until ctx ends, and then returns nil.
func ReleaseMemory(ctx context.Context) error {
	program{sample, release}.watch(ctx)
	return nil
}

// program observes and releases the memory of this program; tests have another.
type program struct {
	sample  func() usage
	release func()
}

// watch releases memory until ctx ends.
func (p program) watch(ctx context.Context) {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	before := p.sample()
	var floor uint64 // the first quiet interval releases what the start of the program has left
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		now := p.sample()
		woken := now.woken - before.woken
		before = now
		if float64(woken) > quiet*interval.Seconds() || now.held < floor+worthwhile {
			continue
		}
		p.release()
		before = p.sample()
		floor = before.held
	}
}

// release returns free memory to the system.
func release() {
	runtime.GC() // moves pooled buffers to the pools' victim caches; FreeOSMemory collects those
	debug.FreeOSMemory()
}

// usage is a report of the runtime about the program.
type usage struct {
	held  uint64 // bytes that the program has received from the system and not returned
	woken uint64 // number of times that a goroutine became runnable, since the program began
}

func sample() usage {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"},
		{Name: "/sched/latencies:seconds"},
	}
	metrics.Read(samples)
	u := usage{held: samples[0].Value.Uint64() - samples[1].Value.Uint64()}
	for _, n := range samples[2].Value.Float64Histogram().Counts {
		u.woken += n
	}
	return u
}
