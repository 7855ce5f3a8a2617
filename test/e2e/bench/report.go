//go:build linux

package main

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"time"
)

// The tables go between these lines of the document; the rest of it is written by hand.
const (
	tableBegin     = "<!-- make bench: begin -->\n"
	tableEnd       = "<!-- make bench: end -->\n"
	datagramsBegin = "<!-- make bench: datagrams begin -->\n"
	requestsBegin  = "<!-- make bench: requests begin -->\n"
	requestsEnd    = "<!-- make bench: requests end -->\n"
	datagramsEnd   = "<!-- make bench: datagrams end -->\n"
	recordingBegin = "<!-- make bench: recording begin -->\n"
	recordingEnd   = "<!-- make bench: recording end -->\n"
	diffBegin      = "<!-- make bench: diff begin -->\n"
	diffEnd        = "<!-- make bench: diff end -->\n"
	farBegin       = "<!-- make bench-far: begin -->\n"
	farEnd         = "<!-- make bench-far: end -->\n"
)

type cell struct {
	row  string
	path path
}

// report collects every value of every cell.
type report struct {
	machine machine
	each    time.Duration // how long one measurement of speed takes
	values  map[cell][]float64
}

func newReport(m machine, each time.Duration) *report {
	return &report{machine: m, each: each, values: map[cell][]float64{}}
}

func (r *report) add(row string, p path, v float64) {
	c := cell{row, p}
	r.values[c] = append(r.values[c], v)
}

func (r *report) has(row string, p path) bool { return len(r.values[cell{row, p}]) > 0 }

// median is 0 where nothing was measured.
func (r *report) median(row string, p path) float64 {
	v := slices.Sorted(slices.Values(r.values[cell{row, p}]))
	if len(v) == 0 {
		return 0
	}
	return v[len(v)/2]
}

// shown is a median as the tables have it.
func (r *report) shown(format, row string, p path) string {
	if !r.has(row, p) {
		return "–"
	}
	return fmt.Sprintf(format, r.median(row, p))
}

// medians says of how many rounds the figures of a table are the medians.
func medians(rounds int) string {
	if rounds == 1 {
		return "One round"
	}
	return fmt.Sprintf("Medians of %d rounds", rounds)
}

// tableRow is a row of the tables of speed.
type tableRow struct{ name, unit, format string }

func tableRows() []tableRow {
	var rows, processor []tableRow
	for _, m := range measurements {
		rows = append(rows, tableRow{m.row, m.unit, "%.0f"})
		if m.bulk() {
			processor = append(processor, tableRow{processorRow(m.row), "s", "%.1f"})
		}
	}
	return append(rows, processor...)
}

// render makes the tables.
func (r *report) render() string {
	var b strings.Builder
	fmt.Fprintf(&b, "Measured on %s.\n%s, each measurement of %v.\n\n",
		r.machine, medians(len(r.values[cell{measurements[0].row, gvisorProxy}])), r.each)
	head := []string{""}
	for _, p := range paths {
		head = append(head, string(p))
	}
	header(&b, head)
	for _, row := range tableRows() {
		cells := []string{fmt.Sprintf("%s (%s)", row.name, row.unit)}
		for _, p := range paths {
			cells = append(cells, r.shown(row.format, row.name, p))
		}
		tableLine(&b, cells)
	}
	r.renderMemory(&b)
	b.WriteString("\n")
	header(&b, []string{"", ""})
	for _, row := range []string{"connect, manager to be installed", "connect, manager running"} {
		tableLine(&b, []string{row, r.shown("%.2f s", row, all)})
	}
	for _, row := range []string{firstRow, twentyRow} {
		tableLine(&b, []string{row, r.shown("%.2f s", row, all)})
	}
	b.WriteString("\n")
	columns := []path{asItIs, passedOn, taken}
	header(&b, []string{"", string(asItIs), string(passedOn), string(taken)})
	for _, row := range []tableRow{{requestRow, "µs", "%.0f"}, {downloadRow, "MB/s", "%.0f"}} {
		cells := []string{fmt.Sprintf("%s (%s)", row.name, row.unit)}
		for _, p := range columns {
			cells = append(cells, r.shown(row.format, row.name, p))
		}
		tableLine(&b, cells)
	}
	return b.String()
}

// datagramPaths are the columns of UDP.
var datagramPaths = []path{
	kernel, gvisorForward, systemForward, gvisorProxy, systemProxy, gvisorDirect, systemDirect,
}

// renderDatagrams makes the table of UDP.
func (r *report) renderDatagrams() string {
	b := new(strings.Builder)
	fmt.Fprintf(b, "Measured on %s.\n%s, each measurement of %v.\n\n", r.machine,
		medians(len(r.values[cell{datagramRow(datagramMeasurements[0]), gvisorProxy}])), r.each)
	head := []string{fmt.Sprintf("datagrams of %d bytes", datagramSize)}
	for _, p := range datagramPaths {
		head = append(head, string(p))
	}
	header(b, head)
	var received, busy []tableRow
	rows := make([]tableRow, 0, len(datagramMeasurements))
	for _, kind := range datagramMeasurements {
		row := datagramRow(kind)
		rows = append(rows, tableRow{row, "lost, %", "%.2f"})
		received = append(received, tableRow{receivedRow(row), "Mb/s", "%.0f"})
		busy = append(busy, tableRow{busyRow(row), "number", "%.2f"})
	}
	var secure []tableRow
	for _, m := range secureMeasurements {
		secure = append(secure, tableRow{m.row, "MB/s", "%.0f"})
	}
	for _, row := range slices.Concat(rows, received, busy, secure) {
		cells := []string{fmt.Sprintf("%s (%s)", row.name, row.unit)}
		for _, p := range datagramPaths {
			cells = append(cells, r.shown(row.format, row.name, p))
		}
		tableLine(b, cells)
	}
	return b.String()
}

// renderMemory makes the tables of memory: at rest, and at most while data flows.
func (r *report) renderMemory(b *strings.Builder) {
	sides := []struct {
		name string
		path path
	}{{"daemon and helper", laptopSide}, {"traffic manager", managerSide}}
	b.WriteString("\n")
	header(b, []string{"resident memory", sides[0].name, sides[1].name})
	row := func(title, name, format string) {
		tableLine(b, []string{title, r.shown(format, name, laptopSide), r.shown(format, name, managerSide)})
	}
	row(restRow, restRow, "%.0f MB")
	row(fmt.Sprintf("%s, after all of this, within %.0f s", againRow, r.median(againRow, all)), againRow, "%.0f MB")
	row(gatewayRow, gatewayRow, "%.0f MB")
	row(idleFlowRow, idleFlowRow, "%.1f kB")
	b.WriteString("\n")
	head := []string{"resident memory at most (MB)"}
	for _, p := range paths {
		if p.ours() {
			head = append(head, string(p))
		}
	}
	header(b, head)
	for _, m := range measurements {
		if !m.bulk() || m.flows == 1 {
			continue
		}
		for _, side := range sides {
			cells := []string{m.row + ": " + side.name}
			for _, p := range paths {
				if p.ours() {
					cells = append(cells, r.shown("%.0f", memoryRow(m.row, p), side.path))
				}
			}
			tableLine(b, cells)
		}
	}
}

// header begins a table, line goes on with it.
func header(b *strings.Builder, cells []string) {
	tableLine(b, cells)
	b.WriteString(strings.Repeat("|---", len(cells)) + "|\n")
}

func tableLine(b *strings.Builder, cells []string) {
	for _, c := range cells {
		if c != "" {
			c = " " + c
		}
		b.WriteString("|" + c + " ")
	}
	b.WriteString("|\n")
}

// write puts the tables into the document, and the plots into the folder of its name.
func (r *report) write(file string) error {
	if err := r.writeDatagrams(file); err != nil {
		return err
	}
	if err := r.replace(file, tableBegin, tableEnd, r.render()); err != nil {
		return err
	}
	return r.draw(file, plots)
}

// draw draws plots into the folder of the document's name.
func (r *report) draw(file string, plots []chart) error {
	dir := strings.TrimSuffix(file, filepath.Ext(file))
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for _, p := range plots {
		svg, err := p.draw(r)
		if err != nil {
			return fmt.Errorf("drawing %s: %w", p.name, err)
		}
		if err := os.WriteFile(filepath.Join(dir, p.name+".svg"), svg, 0o644); err != nil {
			return err
		}
	}
	return nil
}

// writeDatagrams puts the table of UDP into the document.
func (r *report) writeDatagrams(file string) error {
	return r.replace(file, datagramsBegin, datagramsEnd, r.renderDatagrams())
}

// replace replaces what is between two lines of a file.
func (r *report) replace(file, begin, end, text string) error {
	doc, err := os.ReadFile(file)
	if err != nil {
		return err
	}
	if doc, err = insert(doc, begin, end, text); err != nil {
		return fmt.Errorf("%s: %w", file, err)
	}
	return os.WriteFile(file, doc, 0o644)
}

// insert replaces what is between the lines of the document.
func insert(doc []byte, begin, end, text string) ([]byte, error) {
	before, rest, ok := bytes.Cut(doc, []byte(begin))
	_, after, ok2 := bytes.Cut(rest, []byte(end))
	if !ok || !ok2 {
		return nil, fmt.Errorf("there are no lines %q and %q", strings.TrimSpace(begin), strings.TrimSpace(end))
	}
	return slices.Concat(before, []byte(begin), []byte(text), []byte(end), after), nil
}

// machine is what the figures are of.
type machine struct {
	date      string
	processor string
	cores     int
	memory    float64 // bytes
	kernel    string
}

func (m machine) String() string {
	return fmt.Sprintf("%s on %d cores of %s, %.0f GB of memory, Linux %s", m.date, m.cores, m.processor, m.memory/1e9,
		m.kernel)
}

// thisMachine says "unknown" of what it cannot find out.
func thisMachine() machine {
	m := machine{date: time.Now().Format(time.DateOnly), cores: runtime.NumCPU(), processor: "an unknown processor",
		kernel: "unknown"}
	if model, err := field("/proc/cpuinfo", "model name"); err == nil {
		m.processor = model
	}
	if total, err := field("/proc/meminfo", "MemTotal"); err == nil {
		if kb, err := strconv.ParseFloat(strings.TrimSuffix(total, " kB"), 64); err == nil {
			m.memory = kb * 1024
		}
	}
	if release, err := os.ReadFile("/proc/sys/kernel/osrelease"); err == nil {
		m.kernel = strings.TrimSpace(string(release))
	}
	return m
}

// field is the value of the first line "name: value" of a file.
func field(file, name string) (string, error) {
	text, err := os.ReadFile(file)
	if err != nil {
		return "", err
	}
	for line := range strings.Lines(string(text)) {
		if key, value, ok := strings.Cut(line, ":"); ok && strings.TrimSpace(key) == name {
			return strings.TrimSpace(value), nil
		}
	}
	return "", errors.New("no " + name)
}
