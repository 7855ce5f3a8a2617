//go:build linux

package main

import (
	"bytes"
	"fmt"
	"os"
	"runtime"
	"slices"
	"strings"
	"time"
)

// The tables go between these lines of the document; the rest of it is written by hand.
const (
	tableBegin = "<!-- make bench: begin -->\n"
	tableEnd   = "<!-- make bench: end -->\n"
)

type cell struct {
	row  string
	path path
}

// report collects every value of every cell.
type report struct{ values map[cell][]float64 }

func newReport() *report { return &report{values: map[cell][]float64{}} }

func (r *report) add(row string, p path, v float64) {
	c := cell{row, p}
	r.values[c] = append(r.values[c], v)
}

func (r *report) median(row string, p path) float64 {
	v := slices.Sorted(slices.Values(r.values[cell{row, p}]))
	if len(v) == 0 {
		return 0
	}
	return v[len(v)/2]
}

// render makes both tables.
func (r *report) render() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured %s on %d cores, Linux %s; medians of %d rounds.\n\n",
		time.Now().Format(time.DateOnly), runtime.NumCPU(), release(), len(r.values[cell{"down, 1 flow", gvisor}]))
	b.WriteString("| | kernel, routed | `kubectl port-forward` | gvisor | system | gvisor / port-forward | system / port-forward |\n|---|---|---|---|---|---|---|\n")
	for _, row := range []struct{ name, unit, format string }{
		{"down, 1 flow", "MB/s", "%.0f"}, {"down, 8 flows", "MB/s", "%.0f"}, {"up, 1 flow", "MB/s", "%.0f"}, {"up, 8 flows", "MB/s", "%.0f"},
		{"round trip of 1 byte, median", "µs", "%.0f"}, {"the same beside an upload", "µs", "%.0f"},
		{"new connections, 128 at a time", "/s", "%.0f"},
		{processorRow("down, 1 flow"), "s", "%.1f"}, {processorRow("down, 8 flows"), "s", "%.1f"},
		{processorRow("up, 1 flow"), "s", "%.1f"}, {processorRow("up, 8 flows"), "s", "%.1f"},
	} {
		fmt.Fprintf(&b, "| %s |", row.name)
		for _, p := range []path{kernel, portForward, gvisor, system} {
			fmt.Fprintf(&b, " "+row.format+" %s |", r.median(row.name, p), row.unit)
		}
		f := r.median(row.name, portForward)
		fmt.Fprintf(&b, " %.2f | %.2f |\n", r.median(row.name, gvisor)/f, r.median(row.name, system)/f)
	}
	b.WriteString("\n| | kubevpn, gvisor |\n|---|---|\n")
	for _, row := range []struct{ name, unit string }{
		{"connect, manager to be installed", "s"}, {"connect, manager running", "s"},
		{"daemon and helper at rest", "MB"}, {"traffic manager at rest", "MB"},
		{"an idle flow, laptop", "kB"}, {"an idle flow, traffic manager", "kB"},
	} {
		fmt.Fprintf(&b, "| %s | %.2f %s |\n", row.name, r.median(row.name, gvisor), row.unit)
	}
	return b.String()
}

// write puts the tables into the document.
func (r *report) write(file string) error {
	text := r.render()
	fmt.Println(text)
	doc, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	before, rest, ok := bytes.Cut(doc, []byte(tableBegin))
	_, after, ok2 := bytes.Cut(rest, []byte(tableEnd))
	if !ok || !ok2 {
		return fmt.Errorf("%s has no lines %q and %q", file, strings.TrimSpace(tableBegin), strings.TrimSpace(tableEnd))
	}
	out := slices.Concat(before, []byte(tableBegin), []byte(text), []byte(tableEnd), after)
	return os.WriteFile(file, out, 0o644)
}

func release() string {
	b, err := os.ReadFile("/proc/sys/kernel/osrelease")
	if err != nil {
		return runtime.GOOS
	}
	return strings.TrimSpace(string(b))
}
