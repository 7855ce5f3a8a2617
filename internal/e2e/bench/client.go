//go:build linux

package main

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

// work is one measurement, done by this program again inside the laptop's network namespace.
type work struct {
	Kind     string        // down, up, rtt, loaded, connect, hold
	Target   string        // address of the echo server's port
	Sink     string        // loaded: where the upload goes beside which round trips are measured
	Flows    int           // at the same time
	Duration time.Duration // bounded by the caller
}

// measured is what one measurement saw.
type measured struct {
	MBps  float64 // down, up: 10^6 bytes a second, all flows together
	P50us float64 // rtt: median
	P99us float64
	PerS  float64 // connect: connections opened, used and closed a second
	Count int     // of round trips, connections, or flows held
	CPUs  float64 // down, up: seconds of processor time of the whole machine for each GB
}

const dialTimeout = 10 * time.Second

func (w work) do(ready io.Writer, release io.Reader) (measured, error) {
	switch w.Kind {
	case "down", "up":
		return w.bulk()
	case "rtt":
		return w.roundTrips()
	case "loaded":
		return w.loaded()
	case "connect":
		return w.connects()
	case "hold":
		return w.hold(ready, release)
	}
	return measured{}, fmt.Errorf("no measurement %q", w.Kind)
}

// bulk moves bytes one way. The first fifth of the time is not counted: windows open and buffers fill in it.
func (w work) bulk() (measured, error) {
	var bytes atomic.Int64
	var group sync.WaitGroup
	errs := make(chan error, w.Flows)
	start := time.Now()
	count := start.Add(w.Duration / 5)
	end := start.Add(w.Duration)
	var before atomic.Int64
	counting := time.AfterFunc(time.Until(count), func() { before.Store(int64(processorTime())) })
	defer counting.Stop()
	for range w.Flows {
		c, err := net.DialTimeout("tcp", w.Target, dialTimeout)
		if err != nil {
			return measured{}, err
		}
		group.Go(func() {
			defer c.Close()
			if err := c.SetDeadline(end); err != nil {
				errs <- err
				return
			}
			buf := make([]byte, 256<<10)
			op := c.Read
			if w.Kind == "up" {
				op = c.Write
			}
			for {
				n, err := op(buf)
				if now := time.Now(); now.After(count) && now.Before(end) {
					bytes.Add(int64(n))
				}
				if err != nil {
					if !os.IsTimeout(err) {
						errs <- err
					}
					return
				}
			}
		})
	}
	group.Wait()
	busy := processorTime() - time.Duration(before.Load())
	select {
	case err := <-errs:
		return measured{}, err
	default:
	}
	moved := float64(bytes.Load())
	return measured{MBps: moved / 1e6 / end.Sub(count).Seconds(), CPUs: busy.Seconds() / (moved / 1e9)}, nil
}

// processorTime is how long all processors of the machine together have not been idle since it booted (proc(5): stat).
func processorTime() time.Duration {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	var busy int64
	for i, field := range strings.Fields(first)[1:] {
		if n, err := strconv.ParseInt(field, 10, 64); err == nil && i < 7 && i != 3 && i != 4 { // neither idle nor iowait
			busy += n
		}
	}
	const hertz = 100 // USER_HZ, on every architecture that Go runs on
	return time.Duration(busy) * time.Second / hertz
}

// loaded is roundTrips beside an upload that takes all it can get.
func (w work) loaded() (measured, error) {
	upload, measure := w, w
	upload.Kind, upload.Target, upload.Duration = "up", w.Sink, w.Duration+time.Second
	measure.Kind = "rtt"
	uploaded := make(chan error, 1)
	go func() {
		_, err := upload.bulk()
		uploaded <- err
	}()
	time.Sleep(time.Second) // until queues have filled: what is measured is the state afterwards
	m, err := measure.roundTrips()
	return m, errors.Join(err, <-uploaded)
}

// roundTrips sends one byte and waits for it, again and again.
func (w work) roundTrips() (measured, error) {
	c, err := net.DialTimeout("tcp", w.Target, dialTimeout)
	if err != nil {
		return measured{}, err
	}
	defer c.Close()
	end := time.Now().Add(w.Duration)
	if err := c.SetDeadline(end.Add(dialTimeout)); err != nil {
		return measured{}, err
	}
	var took []time.Duration
	b := []byte{1}
	for time.Now().Before(end) {
		start := time.Now()
		if _, err := c.Write(b); err != nil {
			return measured{}, err
		}
		if _, err := io.ReadFull(c, b); err != nil {
			return measured{}, err
		}
		took = append(took, time.Since(start))
	}
	slices.Sort(took)
	us := func(q int) float64 { return float64(took[len(took)*q/100].Nanoseconds()) / 1e3 }
	return measured{P50us: us(50), P99us: us(99), Count: len(took)}, nil
}

// connects opens a connection, has one byte echoed and closes it. The echo is part of it because a port-forward
// accepts whatever the pod does.
func (w work) connects() (measured, error) {
	var n atomic.Int64
	var group sync.WaitGroup
	errs := make(chan error, w.Flows)
	start := time.Now()
	for range w.Flows {
		group.Go(func() {
			b := []byte{1}
			for time.Since(start) < w.Duration {
				c, err := net.DialTimeout("tcp", w.Target, dialTimeout)
				if err != nil {
					errs <- err
					return
				}
				err = c.SetDeadline(time.Now().Add(dialTimeout))
				if err == nil {
					_, err = c.Write(b)
				}
				if err == nil {
					_, err = io.ReadFull(c, b)
				}
				c.Close()
				if err != nil {
					errs <- err
					return
				}
				n.Add(1)
			}
		})
	}
	group.Wait()
	select {
	case err := <-errs:
		return measured{}, err
	default:
	}
	return measured{PerS: float64(n.Load()) / time.Since(start).Seconds(), Count: int(n.Load())}, nil
}

// hold opens flows, says so, and keeps them open until told to end.
func (w work) hold(ready io.Writer, release io.Reader) (measured, error) {
	conns := make([]net.Conn, 0, w.Flows)
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range w.Flows {
		c, err := net.DialTimeout("tcp", w.Target, dialTimeout)
		if err != nil {
			return measured{Count: len(conns)}, err
		}
		conns = append(conns, c)
	}
	if err := json.NewEncoder(ready).Encode(measured{Count: len(conns)}); err != nil {
		return measured{}, err
	}
	_, err := io.Copy(io.Discard, release)
	return measured{Count: len(conns)}, err
}
