//go:build linux

package main

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// heldFlows is the number of flows that are open at once to measure the memory of an idle flow.
const heldFlows = 2000

const (
	// peakEvery is the interval between two readings of memory while bytes move.
	peakEvery = 50 * time.Millisecond
	// againAtRest limits the wait until idle processes have released their memory. Go's runtime collects garbage at
	// least every two minutes, and pools are empty after two collections.
	againAtRest = 250 * time.Second
	// restNoise is the allowed growth of idle memory, as a factor.
	restNoise = 1.1
)

// The rows of memory.
const (
	restRow     = "connected, nothing done"
	againRow    = "at rest again"
	gatewayRow  = "and the traffic gateway, since the system netstack was asked for"
	idleFlowRow = "an idle flow"
)

// measureRest reads the resident memory of kubevpn's processes before any other measurement.
func (b *bench) measureRest(_ context.Context, r *report) error {
	say("memory at rest")
	rest, err := b.resident()
	if err != nil {
		return err
	}
	r.add(restRow, laptopSide, rest.laptop/1e6)
	r.add(restRow, managerSide, rest.manager/1e6)
	return nil
}

// measureAfter waits until the processes use no more memory than measureRest read, or until againAtRest, and reads it.
func (b *bench) measureAfter(ctx context.Context, r *report) error {
	say("memory at rest again, which takes up to %v", againAtRest)
	before := residents{laptop: r.median(restRow, laptopSide) * 1e6, manager: r.median(restRow, managerSide) * 1e6}
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	began := time.Now()
	for {
		now, err := b.resident()
		if err != nil {
			return err
		}
		back := now.laptop <= restNoise*before.laptop && now.manager <= restNoise*before.manager
		if took := time.Since(began); back || took > againAtRest {
			r.add(againRow, laptopSide, now.laptop/1e6)
			r.add(againRow, managerSide, now.manager/1e6)
			r.add(againRow, all, took.Seconds())
			r.add(gatewayRow, managerSide, now.gateway/1e6)
			return nil
		}
		select {
		case <-tick.C:
		case <-ctx.Done():
			return ctx.Err()
		}
	}
}

// measureMemory reads the resident memory of kubevpn's processes without and with idle flows.
func (b *bench) measureMemory(ctx context.Context, r *report) error {
	before, err := b.resident()
	if err != nil {
		return err
	}
	say("memory of %d idle flows", heldFlows)
	spec, err := json.Marshal(work{Kind: "hold", Target: b.target(gvisorProxy, silentPort), Flows: heldFlows,
		Duration: time.Minute})
	if err != nil {
		return err
	}
	cmd := b.laptop(ctx, b.self, "-client", string(spec)) // the Go runtime raises the limit of open files by itself
	in, err := cmd.StdinPipe()
	if err != nil {
		return err
	}
	out, err := cmd.StdoutPipe()
	if err != nil {
		return err
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		return err
	}
	if _, err := bufio.NewReader(out).ReadString('\n'); err != nil {
		return errors.Join(fmt.Errorf("opening %d flows: %w", heldFlows, err), cmd.Wait())
	}
	during, err := b.resident()
	if err := errors.Join(err, in.Close(), cmd.Wait()); err != nil {
		return err
	}
	r.add(idleFlowRow, laptopSide, (during.laptop-before.laptop)/heldFlows/1e3)
	r.add(idleFlowRow, managerSide, (during.manager-before.manager)/heldFlows/1e3)
	return nil
}

// processes contains the process IDs of kubevpn's programs, all of which run on this machine. The traffic gateway is a
// separate program: it has run since the system netstack was requested, and carries no bytes.
type processes struct{ laptop, manager, gateway []int }

// processes finds the processes of this run.
func (b *bench) processes() (processes, error) {
	var found processes
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return found, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue // not a process
		}
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if err != nil {
			continue // a kernel thread, or a process that has ended
		}
		switch exe {
		case b.kubevpn():
			found.laptop = append(found.laptop, pid)
		case "/traffic":
			cgroup, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
			if err != nil || !strings.Contains(string(cgroup), "kubevpn-lab-"+b.Config().Name) {
				continue // of another lab
			}
			argv, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cmdline"))
			switch {
			case err != nil: // it has ended
			case strings.HasPrefix(string(argv), "/traffic\x00gateway"):
				found.gateway = append(found.gateway, pid)
			default:
				found.manager = append(found.manager, pid)
			}
		}
	}
	if len(found.laptop) == 0 || len(found.manager) == 0 {
		return found, fmt.Errorf("found %d processes of kubevpn on the laptop and %d of the traffic manager",
			len(found.laptop), len(found.manager))
	}
	return found, nil
}

type residents struct{ laptop, manager, gateway float64 } // bytes

// resident adds up the processes' resident memory.
func (p processes) resident() residents {
	return residents{sumOf(p.laptop), sumOf(p.manager), sumOf(p.gateway)}
}

func (b *bench) resident() (residents, error) {
	p, err := b.processes()
	return p.resident(), err
}

// peak returns the maximum of resident while do runs.
func (p processes) peak(do func() error) (residents, error) {
	done := make(chan error, 1)
	go func() { done <- do() }()
	tick := time.NewTicker(peakEvery)
	defer tick.Stop()
	var most residents
	for {
		now := p.resident()
		most.laptop, most.manager = max(most.laptop, now.laptop), max(most.manager, now.manager)
		select {
		case err := <-done:
			return most, err
		case <-tick.C:
		}
	}
}

// sumOf adds up the resident memory of processes; one that has ended has none.
func sumOf(pids []int) (sum float64) {
	for _, pid := range pids {
		if rss, err := residentOf(strconv.Itoa(pid)); err == nil {
			sum += rss
		}
	}
	return sum
}

func residentOf(pid string) (float64, error) {
	rss, err := field(filepath.Join("/proc", pid, "status"), "VmRSS")
	if err != nil {
		return 0, err
	}
	kb, err := strconv.ParseFloat(strings.TrimSuffix(rss, " kB"), 64)
	return kb * 1024, err
}
