//go:build linux

package main

import (
	"context"
	"fmt"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
)

// podProcess finds the echo server's process of the pod with that address.
func (b *bench) podProcess(addr netip.Addr) (int, error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return 0, err
	}
	for _, e := range entries {
		pid, err := strconv.Atoi(e.Name())
		if err != nil {
			continue // not a process
		}
		exe, _ := os.Readlink(filepath.Join("/proc", e.Name(), "exe"))
		if filepath.Base(exe) == "echo" && strings.Contains(procText(pid, "cgroup"), "kubevpn-lab-"+b.Config().Name) &&
			strings.Contains(procText(pid, "net/fib_trie"), addr.String()+"\n") {
			return pid, nil
		}
	}
	return 0, fmt.Errorf("no process of the pod %s was found", addr)
}

// inPod prepares a command in the network namespace of a pod.
func (b *bench) inPod(ctx context.Context, addr netip.Addr, argv ...string) *exec.Cmd {
	pid, err := b.podProcess(addr)
	if err != nil {
		return &exec.Cmd{Err: err}
	}
	return exec.CommandContext(ctx, "nsenter", append([]string{fmt.Sprintf("--net=/proc/%d/ns/net", pid), "--"},
		argv...)...)
}

// servePods runs this program as a server beside the echo server of both pods.
func (b *bench) servePods(ctx context.Context) (stop func(), err error) {
	return runAll(ctx, func(ctx context.Context) (servers []*exec.Cmd) {
		for _, addr := range []netip.Addr{b.pod, b.twin} {
			for _, port := range []int{sinkDatagrams, sourceDatagrams, securePort} {
				argv := []string{b.self, "-serve", strconv.Itoa(port)}
				if port == sinkDatagrams {
					argv = append(atOnce(), argv...)
				}
				cmd := b.inPod(ctx, addr, argv...)
				cmd.Stderr = os.Stderr
				servers = append(servers, cmd)
			}
		}
		return servers
	})
}

// runAll starts commands, which end with the context that they get. stop ends them and waits.
func runAll(ctx context.Context, commands func(context.Context) []*exec.Cmd) (stop func(), err error) {
	ctx, cancel := context.WithCancel(ctx)
	var running []*exec.Cmd
	stop = func() {
		cancel()
		for _, cmd := range running {
			_ = cmd.Wait()
		}
	}
	for _, cmd := range commands(ctx) {
		if err := cmd.Start(); err != nil {
			stop()
			return nil, fmt.Errorf("starting %s: %w", cmd.Path, err)
		}
		running = append(running, cmd)
	}
	return stop, nil
}

// atOnce returns the prefix of a command that gets a processor as soon as it can run. Receivers of datagrams use it,
// because they share the machine's processors with the programs that they measure: an overflow while they wait for a
// processor is not a loss of the path. The sender in the pod does not use it, because the kernel's work for its
// datagrams would take a processor from the path.
func atOnce() []string { return []string{"chrt", "--rr", "1"} }
