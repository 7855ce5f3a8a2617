//go:build linux

package main

import (
	"bytes"
	"context"
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

	"kubevpn/internal/kube/client"
	"kubevpn/internal/kube/podconn"
)

// work is one measurement. A second process of this program makes it inside the laptop's network namespace.
type work struct {
	Kind     string        // down, up, rtt, connect, hold; udp-down, udp-up; http2-down...; await, requests, fetch
	Target   string        // address of the echo server's port, or the path to request from its HTTP port
	Beside   *work         // down or up: begins before this one, and ends after it
	Pod      string        // if set: connections are upgraded requests through pods/proxy, to this pod's HTTP port
	Laptop   []int         // processes that count as the laptop's processor time, besides the client
	Flows    int           // at the same time
	Rate     float64       // udp-down, udp-up: 10^6 bits a second; requests: a second, 0: one after the other
	Duration time.Duration // bounded by the caller

	Targets []string // await, requests, fetch: addresses of the application's pods
	Header  string   // requests, fetch: the value of the header that selects requests; empty: no header
}

// measured is the result of one measurement.
type measured struct {
	MBps  float64 // down, up: 10^6 bytes a second, all flows together
	P50us float64 // rtt: median
	P99us float64
	PerS  float64 // connect: connections opened, used and closed a second
	Count int     // of round trips, connections, or flows held
	CPUs  float64 // down, up: seconds of processor time of the whole machine for each GB

	LaptopCPUs float64 // down, up: the part of CPUs that the client and work.Laptop use

	Lost       float64 // udp-down, udp-up: percent of the datagrams
	Mbps       float64 // udp-down, udp-up: 10^6 bits a second that were received
	Disordered int     // udp-down, udp-up: datagrams that arrived after a later one
	Busy       float64 // udp-down, udp-up: processors of the machine that were busy
}

const (
	dialTimeout = 10 * time.Second
	httpPort    = 8080 // of the echo server
)

// dialer connects to a work's target.
type dialer func(target string) (net.Conn, error)

func (w work) dialer() (dialer, error) {
	if w.Pod == "" {
		return func(target string) (net.Conn, error) { return net.DialTimeout("tcp", target, dialTimeout) }, nil
	}
	kubeconfig, err := os.ReadFile(os.Getenv("KUBECONFIG"))
	if err != nil {
		return nil, fmt.Errorf("reading the kubeconfig: %w", err)
	}
	c, err := client.Load(kubeconfig, client.Options{})
	if err != nil {
		return nil, err
	}
	pods := podconn.New(c)
	return func(target string) (net.Conn, error) {
		ctx, cancel := context.WithTimeout(context.Background(), dialTimeout)
		defer cancel()
		return pods.PodProxy(ctx, podconn.PodProxyOptions{
			Namespace: "default", Pod: w.Pod, Port: httpPort, Path: target, Protocol: "raw",
		})
	}, nil
}

// worker makes a measurement.
type worker struct {
	work
	dial dialer
}

func (w work) do(ready io.Writer, release io.Reader) (measured, error) {
	dial, err := w.dialer()
	if err != nil {
		return measured{}, err
	}
	return worker{w, dial}.do(ready, release)
}

func (w worker) do(ready io.Writer, release io.Reader) (measured, error) {
	if w.Beside != nil {
		return w.loaded(ready, release)
	}
	switch w.Kind {
	case "down", "up":
		return w.bulk()
	case "udp-down", "udp-up":
		return w.datagrams()
	case "http2-down", "http2-up", "http3-down", "http3-up":
		return w.secure()
	case "rtt":
		return w.roundTrips()
	case "connect":
		return w.connects()
	case "hold":
		return w.hold(ready, release)
	case "await":
		return w.await()
	case "requests":
		return w.requests()
	case "fetch":
		return w.fetch()
	}
	return measured{}, fmt.Errorf("no measurement %q", w.Kind)
}

// bulk moves bytes one way. The first fifth of the time is not counted: windows open and buffers fill in it.
func (w worker) bulk() (measured, error) {
	var first, moved atomic.Int64 // bytes before count, and after it
	var group sync.WaitGroup
	errs := make(chan error, w.Flows)
	start := time.Now()
	count := start.Add(w.Duration / 5)
	end := start.Add(w.Duration)
	counted := make(chan processorTimes, 1)
	counting := time.AfterFunc(time.Until(count), func() { counted <- w.processorTimes() })
	defer counting.Stop()
	for range w.Flows {
		c, err := w.dial(w.Target)
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
				switch now := time.Now(); {
				case now.Before(count):
					first.Add(int64(n))
				case now.Before(end):
					moved.Add(int64(n))
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
	after := w.processorTimes()
	select {
	case err := <-errs:
		return measured{}, err
	default:
	}
	before := <-counted // all flows end at end, if they do not fail
	switch {
	case first.Load()+moved.Load() == 0:
		return measured{}, errors.New("no byte has moved")
	case moved.Load() == 0: // a conn on a lossy line may stand still for seconds
		return measured{}, nil
	}
	gigabytes := float64(moved.Load()) / 1e9
	return measured{
		MBps:       1e3 * gigabytes / end.Sub(count).Seconds(),
		CPUs:       (after.machine - before.machine).Seconds() / gigabytes,
		LaptopCPUs: (after.laptop - before.laptop).Seconds() / gigabytes,
	}, nil
}

// processorTimes contains times since the machine booted or the process started.
type processorTimes struct{ machine, laptop time.Duration }

func (w work) processorTimes() processorTimes {
	t := processorTimes{machine: processorTime()}
	for _, pid := range append([]int{os.Getpid()}, w.Laptop...) {
		t.laptop += processTime(pid)
	}
	return t
}

const hertz = 100 // USER_HZ, on every architecture that Go runs on

// processorTime returns the total time that the machine's processors have been busy since boot (proc(5): stat).
func processorTime() time.Duration {
	text, err := os.ReadFile("/proc/stat")
	if err != nil {
		return 0
	}
	first, _, _ := strings.Cut(string(text), "\n")
	var busy int64
	for i, field := range strings.Fields(first)[1:] {
		// neither idle nor iowait
		if n, err := strconv.ParseInt(field, 10, 64); err == nil && i < 7 && i != 3 && i != 4 {
			busy += n
		}
	}
	return time.Duration(busy) * time.Second / hertz
}

// processTime returns the processor time of a process (proc(5): pid/stat), or 0 if it does not exist.
func processTime(pid int) time.Duration {
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0
	}
	after := strings.Fields(string(text[bytes.LastIndexByte(text, ')')+1:])) // the name before it may contain blanks
	if len(after) < 13 {
		return 0
	}
	var ticks int64
	for _, field := range after[11:13] { // utime, stime
		if n, err := strconv.ParseInt(field, 10, 64); err == nil {
			ticks += n
		}
	}
	return time.Duration(ticks) * time.Second / hertz
}

// loaded makes the measurement beside a load that runs as fast as it can.
func (w worker) loaded(ready io.Writer, release io.Reader) (measured, error) {
	load, alone := w, w
	load.work, alone.Beside = *w.Beside, nil
	load.Duration = w.fill() + w.Duration + time.Second // it ends last
	loaded := make(chan error, 1)
	go func() {
		_, err := load.bulk()
		loaded <- err
	}()
	time.Sleep(w.fill()) // measure only after queues have filled
	m, err := alone.do(ready, release)
	return m, errors.Join(err, <-loaded)
}

// fill returns how long the load of Beside runs alone first, until queues have filled.
func (w work) fill() time.Duration { return max(time.Second, w.Duration/2) }

// roundTrips sends one byte and waits for it, again and again.
func (w worker) roundTrips() (measured, error) {
	c, err := w.dial(w.Target)
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
	return quantiles(took), nil
}

// quantiles returns the median and the 99th percentile of at least one duration.
func quantiles(took []time.Duration) measured {
	slices.Sort(took)
	us := func(q int) float64 { return float64(took[len(took)*q/100].Nanoseconds()) / 1e3 }
	return measured{P50us: us(50), P99us: us(99), Count: len(took)}
}

// connects opens a connection, waits for the echo of one byte and closes it. It waits for the echo because a
// port-forward accepts connections whether or not the pod does.
func (w worker) connects() (measured, error) {
	var n atomic.Int64
	var group sync.WaitGroup
	errs := make(chan error, w.Flows)
	start := time.Now()
	for range w.Flows {
		group.Go(func() {
			b := []byte{1}
			for time.Since(start) < w.Duration {
				c, err := w.dial(w.Target)
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

// hold opens flows, reports that, and keeps them open until the caller releases them.
func (w worker) hold(ready io.Writer, release io.Reader) (measured, error) {
	conns := make([]net.Conn, 0, w.Flows)
	defer func() {
		for _, c := range conns {
			c.Close()
		}
	}()
	for range w.Flows {
		c, err := w.dial(w.Target)
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
