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

// heldFlows are opened at once to see what an idle flow costs.
const heldFlows = 2000

// measureRest reads the resident memory of kubevpn's processes before anything was measured with them.
func (b *bench) measureRest(_ context.Context, r *report) error {
	say("memory at rest")
	rest, err := b.resident()
	if err != nil {
		return err
	}
	r.add("daemon and helper at rest", gvisor, rest.laptop/1e6)
	r.add("traffic manager at rest", gvisor, rest.manager/1e6)
	return nil
}

// measureMemory reads the resident memory of kubevpn's processes without and with idle flows.
func (b *bench) measureMemory(ctx context.Context, r *report) error {
	before, err := b.resident()
	if err != nil {
		return err
	}
	say("memory of %d idle flows", heldFlows)
	spec, err := json.Marshal(work{Kind: "hold", Target: b.target(gvisor, silentPort), Flows: heldFlows, Duration: time.Minute})
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
	r.add("an idle flow, laptop", gvisor, (during.laptop-before.laptop)/heldFlows/1e3)
	r.add("an idle flow, traffic manager", gvisor, (during.manager-before.manager)/heldFlows/1e3)
	return nil
}

type residents struct{ laptop, manager float64 } // bytes

// resident adds up the resident memory of this run's kubevpn processes and of the manager, which are all processes of
// this machine.
func (b *bench) resident() (residents, error) {
	var sum residents
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return sum, err
	}
	for _, e := range entries {
		exe, err := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if err != nil {
			continue // not a process, or one that has ended
		}
		cgroup, err := os.ReadFile(filepath.Join("/proc", e.Name(), "cgroup"))
		if err != nil {
			continue
		}
		rss, err := residentOf(e.Name())
		if err != nil {
			continue
		}
		switch {
		case exe == b.kubevpn():
			sum.laptop += rss
		case exe == "/traffic" && strings.Contains(string(cgroup), "kubevpn-lab-"+b.Config().Name):
			sum.manager += rss
		}
	}
	if sum.laptop == 0 || sum.manager == 0 {
		return sum, fmt.Errorf("kubevpn's processes were not found: laptop %.0f, manager %.0f bytes", sum.laptop, sum.manager)
	}
	return sum, nil
}

func residentOf(pid string) (float64, error) {
	status, err := os.ReadFile(filepath.Join("/proc", pid, "status"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(status)) {
		if rest, ok := strings.CutPrefix(line, "VmRSS:"); ok {
			kb, err := strconv.ParseFloat(strings.TrimSpace(strings.TrimSuffix(strings.TrimSpace(rest), "kB")), 64)
			return kb * 1024, err
		}
	}
	return 0, errors.New("no VmRSS")
}
