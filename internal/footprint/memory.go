// Package footprint keeps what a program takes of its machine small: ReleaseMemory returns memory to the system after a
// busy time, and HalveProcessors leaves processors to the programs that this one serves.
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
	// interval is how often ReleaseMemory looks, and so how long a program has to be quiet.
	interval = 10 * time.Second
	// quiet is how many goroutines per second may wake in a quiet program. A single flow of any speed wakes more;
	// heartbeats, timers and watches wake fewer.
	quiet = 100
	// worthwhile is by how many bytes memory must have grown since the last release.
	worthwhile = 8 << 20
)

// ReleaseMemory returns free memory to the system whenever the program becomes quiet. It blocks until ctx ends, and
// then returns nil.
func ReleaseMemory(ctx context.Context) error { return releaseMemory(ctx, interval, sample()) }

// releaseMemory compares with before, which is a sample from its start.
func releaseMemory(ctx context.Context, interval time.Duration, before usage) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	floor := before.held
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now := sample()
		woken := now.woken - before.woken
		before = now
		if float64(woken) > quiet*interval.Seconds() || now.held < floor+worthwhile {
			continue
		}
		runtime.GC() // moves pooled buffers to the pools' victim caches; FreeOSMemory collects those
		debug.FreeOSMemory()
		before = sample()
		floor = before.held
	}
}

// usage is what the runtime reports about the program.
type usage struct {
	held  uint64 // bytes that the system has given and not got back
	woken uint64 // goroutines, since the program began
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
