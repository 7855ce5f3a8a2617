//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"
)

// The measurement of `kubevpn requests`: the rate at which the laptop answers intercepted requests, without and with
// recording. The order of the two alternates, because the machine's speed drifts.

const recordingRow = "`wrk -c 16`, answered by the laptop"

// The columns of the table.
const (
	unrecorded path = "without"
	recorded   path = "recorded"
)

const recordingRatioRow = recordingRow + ": recorded / without"

// measureRecording fills the table of recording.
func (b *bench) measureRecording(ctx context.Context, r *report) error {
	stop, err := b.openShop(ctx)
	if err != nil {
		return err
	}
	defer stop()
	ips, err := b.freshPods(ctx, 1)
	if err != nil {
		return err
	}
	if err := b.proxyShop(ctx); err != nil {
		return err
	}
	if _, err := b.intercepted(ctx, ips[0]); err != nil { // the first is slower
		return err
	}
	for round := range b.rounds {
		got := map[path]float64{}
		for i := range 2 {
			p := unrecorded
			if (round+i)%2 == 1 {
				p = recorded
			}
			if got[p], err = b.interceptedBy(ctx, ips[0], p); err != nil {
				return err
			}
			r.add(recordingRow, p, got[p])
		}
		r.add(recordingRatioRow, recorded, got[recorded]/got[unrecorded])
		say("round %d of %d: %.0f/s, recorded: %.0f/s", round+1, b.rounds, got[unrecorded], got[recorded])
	}
	return b.leaveShop(ctx)
}

// interceptedBy calls intercepted, and runs `kubevpn requests` beside it if p is recorded.
func (b *bench) interceptedBy(ctx context.Context, ip string, p path) (rate float64, err error) {
	if p == unrecorded {
		return b.intercepted(ctx, ip)
	}
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	follow := b.laptop(ctx, b.kubevpn(), "requests", appWorkload, "-f", "-o", "json")
	out, err := follow.StdoutPipe()
	if err != nil {
		return 0, err
	}
	if err := follow.Start(); err != nil {
		return 0, err
	}
	defer func() { cancel(); _ = follow.Wait() }()
	lines := bufio.NewReader(out)
	if err := b.firstRecord(ctx, lines, ip); err != nil {
		return 0, err
	}
	go func() { _, _ = io.Copy(io.Discard, lines) }()
	return b.intercepted(ctx, ip)
}

// firstRecord sends requests until one is recorded.
func (b *bench) firstRecord(ctx context.Context, records *bufio.Reader, ip string) error {
	ctx, cancel := context.WithCancel(ctx)
	var visits errgroup.Group
	visits.Go(func() error {
		for ctx.Err() == nil {
			visit := work{Kind: "requests", Targets: []string{ip}, Header: ownValue, Duration: 50 * time.Millisecond}
			if _, err := b.visit(ctx, visit); err != nil && ctx.Err() == nil {
				return err
			}
		}
		return nil
	})
	_, err := records.ReadString('\n')
	cancel()
	if err != nil {
		err = fmt.Errorf("kubevpn requests: %w", err)
	}
	return errors.Join(err, visits.Wait())
}

// intercepted returns how many requests a second the laptop answers to a visitor on a node.
func (b *bench) intercepted(ctx context.Context, ip string) (float64, error) {
	seconds := fmt.Sprintf("%.0fs", max(1, b.each.Seconds()))
	cmd, err := b.Command(ctx, "node1", "wrk", "-c", "16", "-t", "1", "-d", seconds, "-H", ownHeader+": "+ownValue,
		appURL(ip, "/"))
	if err != nil {
		return 0, err
	}
	out, err := cmd.CombinedOutput()
	if err != nil {
		return 0, fmt.Errorf("wrk: %w: %s", err, out)
	}
	if strings.Contains(string(out), "Non-2xx") {
		return 0, errors.New("some requests failed: " + string(out))
	}
	return figure(wrkRate, out)
}

// renderRecording makes the table of recording.
func (r *report) renderRecording() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s.\nMedians of %d pairs of %.0f s, in requests a second.\n\n", r.machine,
		len(r.values[cell{recordingRow, recorded}]), r.each.Seconds())
	header(&b, []string{"", string(unrecorded), string(recorded), "median of the ratios"})
	tableLine(&b, []string{recordingRow, r.shown("%.0f", recordingRow, unrecorded),
		r.shown("%.0f", recordingRow, recorded), r.shown("%.3f", recordingRatioRow, recorded)})
	return b.String()
}
