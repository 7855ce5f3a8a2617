//go:build linux

package main

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"os/exec"
	"strings"
	"syscall"
)

// The measurement of `kubevpn diff`: the latency of requests to the application at a fixed rate. In turn, they reach it
// directly, through an agent, and through an agent while `kubevpn diff` compares them.

const comparedMedianRow, comparedSlowRow = "median", "99 % are faster than"

// diffed is a column of the table, besides asItIs and passedOn.
const diffed path = "compared by `kubevpn diff`"

// comparedRate is the number of requests per second: as many as an agent records.
const comparedRate = 100

// measureDiff fills the table of diff.
func (b *bench) measureDiff(ctx context.Context, r *report) error {
	stop, err := b.openShop(ctx)
	if err != nil {
		return err
	}
	defer stop()
	ips, err := b.freshPods(ctx, 1)
	if err != nil {
		return err
	}
	measure := func(p path) error {
		got, err := b.visit(ctx, work{Kind: "requests", Targets: ips, Rate: comparedRate, Duration: b.each})
		if err != nil {
			return err
		}
		r.add(comparedMedianRow, p, got.P50us)
		r.add(comparedSlowRow, p, got.P99us)
		say("%s: %.0f µs, %.0f µs", p, got.P50us, got.P99us)
		return nil
	}
	for round := range b.rounds {
		say("round %d of %d", round+1, b.rounds)
		if err := measure(asItIs); err != nil {
			return err
		}
		if err := b.proxyShop(ctx); err != nil {
			return err
		}
		if err := errors.Join(measure(passedOn), b.leaveShop(ctx)); err != nil {
			return err
		}
		end, err := b.compareShop(ctx)
		if err != nil {
			return err
		}
		if err := errors.Join(measure(diffed), end()); err != nil {
			return err
		}
	}
	return nil
}

// compareShop starts `kubevpn diff`, and returns when it compares. end interrupts it.
func (b *bench) compareShop(ctx context.Context) (end func() error, err error) {
	diff := b.laptop(ctx, b.kubevpn(), "diff", appWorkload, "--port", appPort)
	said, err := diff.StderrPipe()
	if err != nil {
		return nil, err
	}
	if err := diff.Start(); err != nil {
		return nil, err
	}
	lines := bufio.NewReader(said)
	for {
		line, err := lines.ReadString('\n')
		if err != nil {
			return nil, errors.Join(fmt.Errorf("kubevpn diff: %w", err), diff.Wait())
		}
		if strings.HasPrefix(line, "comparing ") {
			break
		}
	}
	go func() { _, _ = io.Copy(io.Discard, lines) }()
	return func() error {
		if err := diff.Process.Signal(syscall.SIGINT); err != nil {
			return err
		}
		err := diff.Wait()
		if exit := (*exec.ExitError)(nil); errors.As(err, &exit) && exit.ExitCode() == 100 { // the names differ
			return nil
		}
		return fmt.Errorf("kubevpn diff ended without a difference: %w", err)
	}, nil
}

// renderDiff makes the table of diff.
func (r *report) renderDiff() string {
	columns := []path{asItIs, passedOn, diffed}
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s.\n%s of %v, %d requests a second.\n\n", r.machine,
		medians(len(r.values[cell{comparedMedianRow, diffed}])), r.each, comparedRate)
	head := []string{"a request to the application (µs)"}
	for _, p := range columns {
		head = append(head, string(p))
	}
	header(&b, head)
	for _, row := range []string{comparedMedianRow, comparedSlowRow} {
		cells := []string{row}
		for _, p := range columns {
			cells = append(cells, r.shown("%.0f", row, p))
		}
		tableLine(&b, cells)
	}
	return b.String()
}
