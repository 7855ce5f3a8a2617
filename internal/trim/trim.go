// Package trim gives memory back to the system when a program that was busy is not any more. Go by itself takes four
// minutes for it: buffers lie in pools until they have been left alone for two collections, and an idle program is
// collected every two minutes.
//
//	busy, memory grows ──▶ quiet for an interval ──▶ two collections, and what is free goes back ──▶ quiet
//
// The daemon on the laptop and the traffic manager each run one. Processors is about the other thing that a program should not have
// all of.
package trim

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// Interval is how often Run looks, and so for how long a program has to be quiet.
	Interval = 10 * time.Second
	// quiet is how many goroutines may be woken in a second. A single flow of any speed wakes more; heartbeats, timers
	// and watches wake fewer.
	quiet = 100
	// worthwhile is by how much memory has to have grown since the last time.
	worthwhile = 8 << 20
)

// Run trims until ctx ends, and returns nil then.
func Run(ctx context.Context) error { return run(ctx, Interval) }

func run(ctx context.Context, interval time.Duration) error {
	tick := time.NewTicker(interval)
	defer tick.Stop()
	before := look()
	floor := before.held
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-tick.C:
		}
		now := look()
		woken := now.woken - before.woken
		before = now
		if float64(woken) > quiet*interval.Seconds() || now.held < floor+worthwhile {
			continue
		}
		runtime.GC() // buffers leave the pools for the pools' victims
		debug.FreeOSMemory()
		before = look()
		floor = before.held
	}
}

// seen is what the runtime says of the program.
type seen struct {
	held  uint64 // bytes that the system has given and not got back
	woken uint64 // goroutines, since the program began
}

func look() seen {
	samples := []metrics.Sample{
		{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}, {Name: "/sched/latencies:seconds"},
	}
	metrics.Read(samples)
	s := seen{held: samples[0].Value.Uint64() - samples[1].Value.Uint64()}
	for _, n := range samples[2].Value.Float64Histogram().Counts {
		s.woken += n
	}
	return s
}
